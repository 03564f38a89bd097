"""What each command runs, and how it is told what ended it."""

from __future__ import annotations

import asyncio
import errno
import importlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mtgrpo.config.experiment import Experiment
from mtgrpo.config.trust import sign
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.parts.extension import TRACEBACK, explained, keep_traceback, of_own_code

STAGES = {  # what runs
    "train": "stages.trainer.run_training",
    "sft": "stages.sft.run_sft",
    "eval": "stages.evaluate.run_evaluation",
    "collect": "stages.evaluate.run_collection",
    "serve": "commands.play.run_serving",
    "play": "commands.play.run_playing",
}


def run_command(command: str, experiment: Experiment, folder: Path) -> None:
    """Run what `command` says, in `folder`, whose record is signed as this user's.

    Raises RunError for whatever ends it by somebody's own code, or a full disk, in two lines.
    """
    sign(folder)
    module, _, run = STAGES[command].rpartition(".")
    with _failures_told(folder):
        asyncio.run(getattr(importlib.import_module(f"mtgrpo.{module}"), run)(experiment, folder))


@contextmanager
def _failures_told(folder: Path) -> Generator[None]:
    """Whatever ends the run in its `folder` by somebody's own code, or a disk that is full, as a RunError of a line.

    The traceback is in the folder, of any other error too.
    """
    kept = folder / TRACEBACK
    kept.unlink(missing_ok=True)  # of what ended a run that is resumed
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not isinstance(error, RunError):
            keep_traceback(error, folder)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunError(
                    f"the disk is full: cannot write {error.filename or folder}; make room, then go on with "
                    f"hydra.run.dir={folder} resume=true"
                ) from error
            if not of_own_code(error):
                raise
        said = str(error) if isinstance(error, RunError) else explained(error)
        raise RunError(f"{said}\nthe traceback is in {kept}" if kept.is_file() else said) from error
