"""No foreign agent: the environment answers the model."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.agents import Address, Agent, Outcome
from mtgrpo.types import Task


@dataclass
class NoAgent(Agent):
    """The model talks to the environment."""

    active = False

    async def run(self, task: Task, address: Address) -> Outcome:
        raise NotImplementedError("there is no agent to run")
