"""A run is saved while it goes on, and whatever ends it: the last whole step is then on disk."""

import asyncio
import shlex
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtgrpo.errors import ConfigError
from mtgrpo.policy.step import Metrics
from mtgrpo.record.curve import Curve
from mtgrpo.stages.resume import settings_of
from mtgrpo.stages.run import Run
from mtgrpo.weights import checkpoint


@dataclass
class _Mark:
    """The end of a step, from which the run could go on."""

    step: int
    state: dict[str, Any]
    changes: int  # of what the trainer holds: as long as they are so many, it is that of this step


class Saver:
    """Keeps what a run has come to; writes checkpoints in a thread of its own, one at a time."""

    def __init__(self, run: Run, curve: Curve, thread: ThreadPoolExecutor) -> None:
        """Where the run is resumed, `curve` is filled with what was there."""
        self._run, self._curve = run, curve
        self.state: dict[str, Any] = run.resumed.state if run.resumed else {}  # what the run goes on from
        self.summary: Metrics = dict(self.state.get("summary", {}))  # what `summary.json` will hold
        curve.reward[:] = self.state.get("reward", [])
        curve.success.update({int(step): value for step, value in self.state.get("success", {}).items()})
        self._began = time.perf_counter() - self.state.get("seconds", 0.0)
        self._tokenizer = checkpoint.tokenizer_files(run.tokenizer)
        began = {k: v for k, v in self.state.get("settings", {}).items() if k == "model.name"}  # as are its weights
        self._settings = settings_of(run.folder) | began
        self._thread = thread
        self._writing: Future[Path] | None = None
        self._mark: _Mark | None = None  # that is not written yet
        self.measured = 0  # the step whose held-out success is being measured: it may be the best; 0 = none
        self.path = run.resumed.path if run.resumed else None  # of the checkpoint that was last seen whole

    @property
    def seconds(self) -> float:
        """How long the run has taken, that of the processes before this one included."""
        return time.perf_counter() - self._began

    @property
    def step(self) -> int:
        """That of the checkpoint that was last seen whole; 0 = none, or the beginning, as after a warm start."""
        resumed = self._run.resumed
        if resumed and self.path == resumed.path:  # which may have any name
            return resumed.step if "stream" in resumed.state else 0
        return int(self.path.name.rpartition("_")[2]) if self.path else 0

    def due(self, step: int) -> bool:
        """Whether a checkpoint after `step` steps was asked for."""
        every = self._run.experiment.checkpoint.every_steps
        return bool(every) and step % every == 0

    def mark(self, step: int, **state: Any) -> None:
        """A step has ended: the run could go on from `state` (for JSON), and what the trainer holds."""
        metrics = self._run.folder / "metrics.jsonl"
        state |= {
            "summary": dict(self.summary),
            "reward": list(self._curve.reward),
            "success": dict(self._curve.success),
            "seconds": self.seconds,
            "metrics_bytes": metrics.stat().st_size if metrics.is_file() else 0,
            "settings": self._settings,
            "threads": torch.get_num_threads(),
        }
        self._mark = _Mark(step, state, self._run.trainer.changes)

    async def save(self) -> None:
        """Begin to write the step that ended last, once the checkpoint before is written; the run may go on.

        Raises what went wrong with the checkpoint before.
        """
        if self._writing is not None:
            try:
                self.path = await asyncio.shield(asyncio.wrap_future(self._writing))
            except Exception:
                self._writing = None  # the step after it may still be written
                raise
        if self._mark is not None:
            self._write(self._mark)

    def save_last(self) -> None:
        """Write the step that ended last, unless it is, and return when all is on disk.

        Notes where its weights are gone, because another update has begun to change them.
        """
        if (writing := self._writing) is not None:
            self._writing = None
            self.path = writing.result()
        if self._mark is None:
            return
        if self._mark.changes == self._run.trainer.changes:
            self.path = self._write(self._mark).result()
        else:
            self._run.sinks.note(f"the update after step {self._mark.step} had begun: that step is not saved")

    def _write(self, mark: _Mark) -> Future[Path]:
        run, settings = self._run, self._run.experiment.checkpoint
        measured = {step: success for step, success in self._curve.success.items() if step}
        by_success = sorted(measured, key=lambda step: (measured[step], step))
        best = by_success[-settings.keep_best :] if settings.keep_best else []
        best += [0] if run.experiment.sft.steps else []  # the policy after the warm start
        best += [self.measured] if settings.keep_best and self.measured else []
        content = run.trainer.snapshot(), mark.state, self._tokenizer
        self._mark = None
        self._writing = self._thread.submit(checkpoint.write, run.folder, mark.step, *content, settings.keep_last, best)
        return self._writing


@contextmanager
def saving(run: Run, curve: Curve) -> Generator[Saver]:
    """A saver; whatever ends what is done within, the last whole step is on disk afterwards."""
    with ThreadPoolExecutor(1) as thread:
        saver = Saver(run, curve, thread)
        try:
            yield saver
            saver.save_last()
        except BaseException as error:
            with suppress(OSError, SystemExit):  # the console may be gone
                try:
                    saver.save_last()
                except Exception as worse:
                    run.sinks.note(f"nothing more could be saved: {worse}")
                begun = run.resumed and run.resumed.path
                refused = isinstance(error, ConfigError) and saver.path == begun  # the same command would be, too
                if saver.path and saver.path.is_relative_to(run.folder) and not refused:  # else nothing new is saved
                    interrupted = isinstance(error, asyncio.CancelledError)
                    how = "interrupted" if interrupted else f"ended by {type(error).__name__}"
                    again = f"the same command with resume=true {shlex.quote(f'hydra.run.dir={run.folder}')}"
                    run.sinks.note(f"{how}; saved in {saver.path}. To go on: {again}")
            raise
