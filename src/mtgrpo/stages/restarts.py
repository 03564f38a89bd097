"""Where a cluster has lost a rank, the run goes on by itself: ranks are placed anew, from the last checkpoint on."""

import asyncio
import copy
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mtgrpo.config.experiment import LATEST, Experiment
from mtgrpo.errors import RanksError
from mtgrpo.runtime.text import complain
from mtgrpo.weights.saved import find_newest

T = TypeVar("T")


async def restarting(experiment: Experiment, folder: Path, work: Callable[[Experiment], Coroutine[Any, Any, T]]) -> T:
    """What `work` gives, which is a run in `folder`; begun again with what the journal and the last checkpoint have.

    Raises RanksError where there is no cluster, or ranks were lost too often without a new checkpoint in between.
    """
    most, lost, saved = experiment.cluster.restarts, 0, -1
    if not most:
        return await work(experiment)
    while True:
        try:  # in a task of its own: that of a run whose rank has failed is cancelled
            return await asyncio.create_task(work(experiment))
        except RanksError as error:
            newest = find_newest(folder, complain)
            step = newest.step if newest else 0
            lost = lost + 1 if step <= saved else 1
            saved = max(saved, step)
            if lost > most:
                raise
            complain(f"{error}\nit goes on from step {step}; restarts with no new checkpoint: {lost} of at most {most}")
        cluster = copy.copy(experiment.cluster)
        cluster.restarted += 1
        resume = LATEST if newest else experiment.resume or LATEST
        experiment = replace(experiment, resume=resume, cluster=cluster)
