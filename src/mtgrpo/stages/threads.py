"""What becomes of the threads that `fit_openmp` chose: noted, as before on resume, fewer where others use the cores."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from mtgrpo.config.experiment import Experiment
from mtgrpo.runtime.resources import THREADS_SET, cores, free_between, read_cpu_times, threads_for
from mtgrpo.weights.saved import Checkpoint

WINDOW_S = 5.0  # of steps, after which it is seen whether the cores were free


@contextmanager
def settle_threads(experiment: Experiment, resumed: Checkpoint | None, note: Callable[[str], None]) -> Generator[None]:
    """Note with how many threads the run computes; where digits shall be those of before, as many as before."""
    threads, chosen = torch.get_num_threads(), sorted(os.environ.keys() & THREADS_SET)
    recorded = resumed.state.get("threads", threads) if resumed else threads
    said = f" ({' and '.join(chosen)})" if chosen else ""
    if recorded == threads:
        note(f"threads: {threads} on {cores()} cores{said}")
    elif experiment.resumes_exactly and experiment.deterministic and not chosen:
        torch.set_num_threads(recorded)
        note(f"threads: {recorded} as before, for the same digits; the free cores have room for {threads}")
    else:
        made = "sums are made in another order, so digits differ from here on"
        note(f"threads: {threads} on {cores()} cores{said}, and {recorded} before: {made}")
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Neighbours:
    """Sees whether other processes use the cores that a run's threads need during its steps."""

    def __init__(self, follows: bool) -> None:
        """follows: the run may go on with fewer threads, where the user has not set their number."""
        self._threads = min(torch.get_num_threads(), cores())
        self._watches = self._threads > 1 and not torch.cuda.is_available()
        self._follows = follows and not os.environ.keys() & THREADS_SET
        self._noted = False
        self._free_s = self._seen_s = 0.0

    def begin_step(self) -> None:
        """What the cores do from here on counts."""
        if self._watches:
            self._began = read_cpu_times()

    def end_step(self) -> list[str]:
        """What counts ends here; a note where, for the first time, others use cores that the threads need."""
        if not self._watches:
            return []
        now = read_cpu_times()
        seconds = now.at_s - self._began.at_s
        self._free_s += seconds * free_between(self._began, now)
        self._seen_s += seconds
        if self._seen_s < WINDOW_S:
            return []
        fit = min(self._threads, threads_for(self._free_s / self._seen_s))
        self._free_s = self._seen_s = 0.0
        if self._follows and fit != torch.get_num_threads():
            torch.set_num_threads(fit)
        if fit == self._threads or self._noted:
            return []
        self._noted = True
        cure = (
            f"as many threads as cores are free compute from here on, now {fit}"
            if self._follows
            else f"end them, or interrupt the run and go on with OMP_NUM_THREADS={fit} and resume=true (digits differ "
            "then); with trainer.deterministic=false a run follows by itself"
        )
        return [f"other processes use cores that the run's {self._threads} threads wait for: {cure}"]
