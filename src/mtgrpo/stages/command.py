"""What each command runs, and how it is told what ended it."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mtgrpo.config.experiment import Experiment
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.extension import TRACEBACK, explained, keep_traceback, of_own_code


def run_command(command: str, experiment: Experiment, folder: Path, checkpoint: Path | None) -> None:
    """Run what `command` says, in `folder`; checkpoint: of the policy that is measured, if any.

    Raises RunError for whatever ends it by somebody's own code, or a full disk, in two lines.
    """
    with _failures_told(folder):
        _run(command, experiment, folder, checkpoint)


def _run(command: str, experiment: Experiment, folder: Path, checkpoint: Path | None) -> None:
    if command == "eval":
        from mtgrpo.stages.evaluate import run_evaluation  # noqa: PLC0415

        run_evaluation(experiment, folder, checkpoint)
    elif command == "collect":
        from mtgrpo.stages.collect import run_collection  # noqa: PLC0415

        run_collection(experiment, folder, checkpoint)
    elif command == "serve":
        from mtgrpo.stages.serve import run_serving  # noqa: PLC0415

        run_serving(experiment, folder, checkpoint)
    elif command == "play":
        from mtgrpo.stages.play import run_playing  # noqa: PLC0415

        run_playing(experiment, folder, checkpoint)
    elif command == "sft":
        from mtgrpo.stages.sft import run_sft  # noqa: PLC0415

        run_sft(experiment, folder)
    else:
        from mtgrpo.stages.trainer import run_training  # noqa: PLC0415

        run_training(experiment, folder)


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
