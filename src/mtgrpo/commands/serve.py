"""A finished policy behind the endpoint of agents, to try one by hand."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from mtgrpo.agents.none import NoAgent
from mtgrpo.config.experiment import Experiment
from mtgrpo.endpoint.server import open_endpoint
from mtgrpo.endpoint.session import AgentSession
from mtgrpo.stages.run import open_run
from mtgrpo.types import Limits, Task


def by_hand(experiment: Experiment) -> Experiment:
    """The settings under which somebody tries a policy."""
    return dataclasses.replace(
        experiment,
        agent=NoAgent(),
        watchdog_s=0.0,  # silence is no fault
        trainer=dataclasses.replace(experiment.trainer, deterministic=False),  # it would wait for who says nothing
    )


async def run_serving(experiment: Experiment, folder: Path) -> None:
    """Serve the model as it is until Ctrl-C; says where, and with which key."""
    async with open_run(by_hand(experiment), folder, trains=False) as run, open_endpoint() as endpoint:
        runner = run.runner.at("serve")
        session = AgentSession(
            Task("serve", ()),
            run.chat,
            runner.sampling,
            Limits(runner.limits.context_tokens),
            lambda number: runner.open_conversation(f"serve/chain{number}", "serve", 0),
        )
        async with endpoint.conversation(session) as address:
            run.sinks.note("serving until Ctrl-C:")
            for variable, value in address.environ().items():
                run.sinks.note(f"export {variable}={value}")
            await asyncio.Event().wait()
