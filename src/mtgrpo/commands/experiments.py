"""Commands that run an experiment: all is checked, then Hydra starts each run in a folder of its own.

They take `key=value` and the flags of Hydra. Nothing is written before the configuration has passed every check that
needs no model.
"""

import argparse
import asyncio
import contextlib
import errno
import functools
import importlib
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mtgrpo.cluster.launch import join
from mtgrpo.config.compose import Configured, ExperimentLoader, composed_from
from mtgrpo.config.experiment import Experiment
from mtgrpo.config.helptext import help_text
from mtgrpo.config.options import counterpart
from mtgrpo.config.recipe import quoted
from mtgrpo.config.run_record import MEASURED, claimed, found_in
from mtgrpo.config.sweep import combinations, corners, describe_space, read_space
from mtgrpo.config.trust import sign
from mtgrpo.errors import Arguments, ConfigError, RunError, meant, program, refuse_unreadable
from mtgrpo.model.settings import FROM_SCRATCH
from mtgrpo.parallel.launch import DOOR
from mtgrpo.parts.extension import TRACEBACK, explained, keep_traceback, of_own_code
from mtgrpo.record.reading import held_out_reward
from mtgrpo.runtime.hub import stay_offline
from mtgrpo.runtime.resources import CpuTimes, fit_openmp
from mtgrpo.runtime.text import complain, show
from mtgrpo.stages.budget import described
from mtgrpo.stages.checks import check, refuse_other_steps

STAGES = {  # what runs
    "train": "stages.trainer.run_training",
    "sft": "stages.sft.run_sft",
    "eval": "stages.evaluate.run_evaluation",
    "collect": "stages.evaluate.run_collection",
    "serve": "commands.play.run_serving",
    "play": "commands.play.run_playing",
}
MEASURES = ("eval", "collect", "serve", "play")  # commands that train nothing
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
SWITCHES = ("-h --help", "--dry-run", "--online", "-m --multirun", "-r --run", "--resolve")
TEXTS = ("-p --package", "-cd --config-dir", "-cp --config-path", "-cn --config-name")
FLAGS: dict[str, dict[str, Any]] = {
    **{names: {"action": "store_true"} for names in SWITCHES},
    **{names: {} for names in TEXTS},
    "-c --cfg": {"choices": ("job", "hydra", "all")},
    "-i --info": {"choices": INFO, "const": "all", "nargs": "?"},
    "--fail-under": {"type": float},
}


def main(command: str, purpose: str, arguments: Sequence[str], began: CpuTimes) -> None:
    """Run `command`, whose purpose is for its help. began: when the program did.

    Raises ConfigError for the user's mistakes, and RunError.
    """
    if os.environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
        if command in MEASURES:
            if os.environ.get("RANK", "0") == "0":
                raise ConfigError(
                    f"WORLD_SIZE={os.environ['WORLD_SIZE']}: {command} takes one process; start it without torchrun"
                )
            return
        join()
    args = _flags(arguments)
    folders = [Path(folder) for folder in (args.config_dir, args.config_path) if folder]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")
    if args.help:
        words = [word for word in args.overrides if not word.startswith(("checkpoint=", "trust_code=", "hydra."))]
        asked = " ".join(word for word in words if "=" not in word)
        text = help_text([word for word in words if "=" in word], folders, asked)
        show(f"mtgrpo {command} [KEY=VALUE ...]: {purpose}\n\n{text}")
        return
    loader = ExperimentLoader(folders, args.config_name or "base", evaluates=command in MEASURES, job=command)
    try:
        _start(command, args, loader, began)
    except ConfigError as error:
        if hint := loader.hint(str(error)):
            raise ConfigError(f"{error}{hint}") from error
        raise


def complete(command: str, words: list[str]) -> None:
    """Print what the shell may put next behind `command`; the words `install=bash` print how it is told to ask."""
    with contextlib.suppress(ConfigError):  # the line is wrong so far: nothing to offer
        ExperimentLoader(evaluates=command in MEASURES, job=command).hydra.shell_completion("base", words)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, and as `overrides` the words that are none. Raises ConfigError."""
    parser = Arguments("mtgrpo COMMAND", add_help=False)
    parser.add_argument("overrides", nargs="*", type=quoted)
    for names, kind in FLAGS.items():
        parser.add_argument(*names.split(), **kind)
    try:
        args, rest = parser.parse_known_intermixed_args(arguments)
    except ConfigError as error:
        own = [word for word in arguments if word.endswith((".yaml", ".yml")) and "=" not in word]
        raise ConfigError(f"{error}; a recipe of your own is recipe={own[0]}" if own else str(error)) from error
    if rest:
        typed = rest[0].partition("=")[0]
        hint = meant(typed, " ".join(FLAGS).split()).rstrip() if typed.startswith("-") else ""
        if ours := counterpart(typed.lstrip("-").replace("-", "_")):
            hint = f"here it is {ours}; options are key=value, without --"
        usage = f"options are key=value, without --: {typed.lstrip('-')}=VALUE; flags: {program()} --help"
        raise ConfigError(f"there is no {rest[0]}; {hint or usage}")
    return args


def _start(command: str, args: argparse.Namespace, loader: ExperimentLoader, began: CpuTimes) -> None:
    words = list(args.overrides)
    if args.fail_under is not None:
        if command != "eval":
            raise ConfigError(f"--fail-under {args.fail_under:g} is for eval, it does nothing for {command}")
        words.append(f"eval.fail_under={args.fail_under}")
    if (args.resolve or args.package) and not args.cfg:
        raise ConfigError("--resolve and --package are for --cfg: say what to print, as --cfg job")
    if args.online and not args.dry_run:
        raise ConfigError("--online is for --dry-run; a run asks the hub for what it needs")
    if offline := args.dry_run and not args.online:
        stay_offline()
    if args.info:
        loader.hydra.show_info(args.info, "base", words)
    elif args.cfg:
        loader.hydra.show_cfg("base", words, args.cfg, args.package, args.resolve)
    else:
        with contextlib.ExitStack() as run:
            with fit_openmp(began):  # the stages import torch, and a file of the user's may
                several = args.multirun or _asks_for_several(args, loader)
                _refuse_misplaced(command, words, several)
                config = loader.load_configuration("base", words, RunMode.MULTIRUN if several else RunMode.RUN)
                jobs = list(_jobs(config, loader)) if several else [("", config)]
                place = _place(command, words, config, several)
                at = None if several else place[0]
                if args.dry_run:
                    found_in(*place)
                else:
                    folder = QuotedString(str(run.enter_context(claimed(*place))), Quote.single)
                    words.append(f"hydra.{'sweep' if several else 'run'}.dir={folder.with_quotes()}")
                for title, job in jobs:
                    composed = _checked(command, job, loader, offline, at)
                    if args.dry_run and (title or not several):
                        show(title + described(command, composed, at))
                if args.dry_run:
                    return
                if not several:
                    _stage(command)
            _run(command, loader, words, several)


def _refuse_misplaced(command: str, words: Sequence[str], several: bool) -> None:
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    if command == "eval" and "sampling.temperature" in keys:
        raise ConfigError("sampling.temperature has no effect: samples are of temperature 1, and greedy ones besides")
    idle = {"collect": ("eval.tasks", "eval.samples"), "eval": ("collect.tasks", "collect.samples")}.get(command, ())
    for key in keys.intersection(idle):
        own = f"{command}.tasks and {command}.samples"
        raise ConfigError(f"{key} is for {key.partition('.')[0]}, it does nothing for {command}, which has {own}")
    if several and DOOR in os.environ:
        raise ConfigError("torchrun starts the ranks of one run, not of --multirun; leave one of them out")
    if several and "hydra.run.dir" in keys:
        raise ConfigError("hydra.run.dir is for a single run; with --multirun give hydra.sweep.dir=PATH")
    if several and any("hydra.sweeper.params" in key for key in keys):  # Hydra cannot add to none
        raise ConfigError("hydra.sweeper.params belongs in a file; here give the settings themselves, as seed=1,2")
    if not several and "hydra.sweep.dir" in keys:
        raise ConfigError("hydra.sweep.dir is for several runs; add --multirun, or give hydra.run.dir=PATH")


def _asks_for_several(args: argparse.Namespace, loader: ExperimentLoader) -> bool:
    """Whether `hydra.mode` says so, where a word or a configuration of the user's own may set it."""
    if not args.config_name and not any("hydra.mode" in word for word in args.overrides):
        return False
    return loader.load_configuration("base", args.overrides, RunMode.MULTIRUN).hydra.mode is RunMode.MULTIRUN


def _place(command: str, words: Sequence[str], config: DictConfig, several: bool) -> tuple[Path, bool, bool]:
    """The folder of the run or sweep, whether the user chose it, and whether it goes on there."""
    key = "hydra.sweep.dir" if several else "hydra.run.dir"
    given = {word.partition("=")[0] for word in words}
    resumable = command not in MEASURES or (command == "eval" and "resume" in given)  # else it is the record's
    HydraConfig.instance().set_config(config)
    wanted = Path(str(OmegaConf.select(config, key))).expanduser()
    resumed, metrics = resumable and str(config.resume).lower() == "true", wanted / "metrics.jsonl"
    trained = (wanted / "checkpoints").is_dir()
    measured = (wanted / MEASURED).is_file() and not trained
    begun = trained or measured or (metrics.is_file() and metrics.stat().st_size)
    if resumed and begun and measured != (command == "eval"):
        what = "an evaluation" if measured else "a run that trains"
        raise ConfigError(f"{wanted} is the folder of {what}: {command} needs another, as hydra.run.dir=PATH")
    return wanted, key in given, resumed


def _run(command: str, loader: ExperimentLoader, words: list[str], several: bool) -> None:
    """Let Hydra start the run, or its sweeper choose the runs and its launcher start them."""
    if several:
        loader.hydra.multirun("base", functools.partial(run_job, command), [*words, "hydra.mode=MULTIRUN"])
        return

    def alone(config: DictConfig) -> Exception | None:
        try:
            run_job(command, config)
        except (ConfigError, RunError) as error:
            return error  # Hydra would put a line of its own before it

    if error := loader.hydra.run("base", alone, [*words, "hydra.mode=RUN"]).return_value:
        raise error


def _jobs(config: DictConfig, loader: ExperimentLoader) -> Iterator[tuple[str, DictConfig]]:
    """Title and configuration of each run of a sweep, "" where it only stands for others. Raises ConfigError."""
    sweeper = config.hydra.sweeper
    if sweeper._target_.endswith(".BasicSweeper"):
        for number, job in enumerate(combinations(read_space(config, loader))):
            yield f"# run {number}: {' '.join(job)}\n", loader.load_sweep_config(config, job)
    elif sweeper._target_.endswith(".OptunaSweeper"):
        space = read_space(config, loader)
        title = f"# {sweeper.trials} trials: {describe_space(space)}; one of them:\n"
        for number, job in enumerate(corners(space, sweeper.trials)):
            yield "" if number else title, loader.load_sweep_config(config, job)


def _checked(
    command: str, config: DictConfig, loader: ExperimentLoader, offline: bool, folder: Path | None
) -> Configured:
    """The experiment of a run that could begin: all is checked that needs no model. Raises ConfigError.

    loader: has composed it, and may have notes. offline: hubs are not asked, and what only they have is not checked.
    folder: of a run that may go on.
    """
    composed = composed_from(config)
    if command == "sft":
        composed = replace(composed, experiment=composed.experiment.imitating())
    experiment = composed.experiment
    if command == "train":
        experiment.check_training()
    if command in MEASURES:  # a checkpoint brings its own tokenizer
        if experiment.model.name in FROM_SCRATCH:
            raise ConfigError(
                f"{command} needs checkpoint=RUN/checkpoints/step_000025, checkpoint=latest, or model.name=NAME of a "
                "trained model"
            )
        experiment = replace(experiment, resume="")
    with refuse_unreadable():
        try:
            refuse_other_steps(experiment, folder, command == "sft")
            notes = check(experiment, offline, command not in MEASURES, folder)
        except (Exception, SystemExit) as error:
            if isinstance(error, OSError | ConfigError) or not of_own_code(error):
                raise
            raise ConfigError(explained(error)) from error
    for note in (*loader.notes, *notes):
        complain(note)
    return replace(composed, noted=bool(notes))


def _stage(command: str) -> Callable[[Experiment, Path], Coroutine[Any, Any, None]]:
    """What runs `command`. Its module imports torch, which takes seconds where nothing has done so."""
    module, _, run = STAGES[command].rpartition(".")
    if sys.stderr.isatty() and "torch" not in sys.modules:
        print(f"mtgrpo {command}: loading, some seconds", file=sys.stderr)
    return getattr(importlib.import_module(f"mtgrpo.{module}"), run)


def run_job(command: str, config: DictConfig) -> float | None:
    """One run, called by Hydra; everything it leaves is in Hydra's output folder. Returns its held-out reward."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    run_stage(command, composed_from(config).experiment, folder)
    return held_out_reward(folder)


def run_stage(command: str, experiment: Experiment, folder: Path) -> None:
    """Run what `command` says, in `folder`, whose record is signed as this user's.

    Raises RunError for whatever ends it by somebody's own code, or a full disk, in two lines. The traceback is in the
    folder, of any other error too.
    """
    sign(folder)
    kept = folder / TRACEBACK
    kept.unlink(missing_ok=True)  # of what ended a run that is resumed
    try:
        asyncio.run(_stage(command)(experiment, folder))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        said = str(error)
        if isinstance(error, SystemExit) and not of_own_code(error):
            raise
        if not isinstance(error, RunError):
            keep_traceback(error, folder)
            said = explained(error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                said = f"the disk is full: cannot write {error.filename or folder}; make room, then go on with "
                raise RunError(f"{said}hydra.run.dir={folder} resume=true") from error
            if not of_own_code(error):
                raise
        raise RunError(f"{said}\nthe traceback is in {kept}" if kept.is_file() else said) from error
