"""The command `mtgrpo`: reads its first word, and hands the others to whoever does what it says."""

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from mtgrpo import __version__
from mtgrpo.errors import ConfigError, RunError, meant, program, refuse_unreadable
from mtgrpo.runtime.resources import read_cpu_times
from mtgrpo.runtime.text import complain, show

_BEGAN = read_cpu_times()  # what the cores do from here on, until torch is imported, says how many of them are free
EXPERIMENTS = {
    "train": "warm start, evaluate, train, evaluate",
    "sft": "the warm start alone",
    "eval": "measure checkpoint=latest, checkpoint=FOLDER or model.name=NAME",
    "collect": "its conversations, also to fine-tune on: collect.form=messages",
    "serve": "such a policy behind an endpoint, to try an agent by hand",
    "play": "talk to such a policy and its tools in the terminal",
}
READERS = {  # commands about runs and machines, with flags and a module of their own
    "show": "conversations of a run, or of the newest: show [RUN] [--failures]",
    "report": "what runs did and learned, on one page: report [RUN ...]",
    "export": "a model for others: export RUN --to hf|peft|merged --out DIR",
    "watch": "a run, live in the terminal: watch [RUN]",
    "view": "runs on a page, down to the single token: view [RUN ...]",
    "launch": "a run by Docker, Ray, SageMaker, Slurm; a server: launch WHAT --help",
    "doctor": "what this machine has of what training can use",
    "data": "files, models: data gsm8k|smollm2, data check FILE, data build FILE",
}
COMMANDS = {**EXPERIMENTS, **READERS}
USAGE = f"""\
mtgrpo {__version__}: GRPO for language-model agents with tools, over many turns

mtgrpo COMMAND [KEY=VALUE ...]

{chr(10).join(f"  {name:<9}{text}" for name, text in COMMANDS.items())}

  --help, -h            this text; after a command its options; --help WORD
  --dry-run             find what a run would refuse, and run nothing
  --dry-run --online    the same, and what lies on a hub is checked too
  --multirun, -m        one run for each combination of KEY=VALUE1,VALUE2
  --cfg job|hydra|all   print the configuration (--resolve, --package NAME)
  --config-dir FOLDER   your own recipes (recipe/NAME.yaml) and configurations
  --config-name NAME    one of these, or a recipe, in place of the built-in one
  --info [WHAT]         of Hydra: config, defaults, defaults-tree, plugins, ...
  --shell-completion    eval "$(mtgrpo -sc install=bash)"
  --version             the version

  mtgrpo train                                   # the demo: minutes on a CPU
  mtgrpo train recipe=gsm8k model.name=Qwen/Qwen3-1.7B
  mtgrpo train 'recipe=[gsm8k,lora]' optimizer.lr=1e-5   # the last word wins
  mtgrpo train seed=1,2,3 algorithm.clip_high=0.2 --multirun
  mtgrpo train reward=my.py:MyReward task=jsonl task.path=my.jsonl
  mtgrpo train agent=python agent.function=my.py:solve recipe=jsonl
  mtgrpo train ... hydra.run.dir=FOLDER resume=true   # the same words: goes on
  mtgrpo eval checkpoint=PATH trust_code=true    # reaches what a record names
  mtgrpo eval checkpoint=PATH --fail-under 0.8   # exit code 1 below that

Runs are kept in outputs/DATE/TIME, several in multirun/DATE/TIME, or in
hydra.run.dir=PATH and hydra.sweep.dir=PATH.
Exit codes: 0 done, 1 the run failed, 2 the command or a setting is wrong."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave the process with its exit code."""
    try:
        try:
            run_command(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except (ConfigError, RunError) as error:
        complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(130)
    except (BrokenPipeError, SystemExit) as error:
        output, of_rich = select.poll(), isinstance(error.__context__, BrokenPipeError)  # rich then leaves with 1
        output.register(1, 0)  # told of errors alone
        if not (of_rich if isinstance(error, SystemExit) else output.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads on, as behind `| head`
        sys.exit(128 + signal.SIGPIPE)
    sys.exit(0)


def run_command(arguments: Sequence[str]) -> None:
    """Do what the words of the command line say. Raises ConfigError for the user's mistakes."""
    command, *words = arguments or [""]
    if command in ("-h", "--help", "help") and words:
        of_train = words[0] not in COMMANDS and (command != "help" or not meant(words[0], COMMANDS))
        command, words = ("train", words) if of_train else (words[0], words[1:])
        words = ["--help", *words]
    if command in ("", "-h", "--help", "help"):
        show(USAGE)
    elif command == "--version":
        show(f"mtgrpo {__version__}")
    elif command in ("-sc", "--shell-completion"):
        _complete(words)
    elif command in READERS:
        place = "report" if command == "report" else f"commands.{command}"
        with refuse_unreadable():
            code = importlib.import_module(f"mtgrpo.{place}").main(words)
        if code:
            sys.exit(code)
    elif command in EXPERIMENTS:
        from mtgrpo.commands import experiments  # noqa: PLC0415  it imports what reads a configuration

        experiments.main(command, COMMANDS[command], words, _BEGAN)
    elif command.startswith("-"):
        usage = f"{program()} COMMAND {command}"
        raise ConfigError(f"the command comes first: {usage}; the commands are {', '.join(COMMANDS)}")
    else:
        hint = meant(command, COMMANDS).rstrip() or f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {command!r}; {hint}")


def _complete(words: list[str]) -> None:
    """What the shell may put next; `install=bash` prints how the shell is told to ask."""
    line = os.environ.get("COMP_LINE", "")
    command, what = [*line.rpartition(" ")[0].split()[1:], "", ""][:2]  # words that are finished
    if "query=" in "".join(words) and command not in EXPERIMENTS:
        from mtgrpo.commands.launch import RUNS, WHAT  # noqa: PLC0415

        if command != "launch" or what not in RUNS:
            show("\n".join(COMMANDS if not command else WHAT if command == "launch" and not what else ()))
            return
        command = f"launch {what}"
    os.environ["COMP_LINE"] = line.replace(f" {command}", "", 1)
    from mtgrpo.commands import experiments  # noqa: PLC0415

    experiments.complete(command if command in EXPERIMENTS else "train", words)
