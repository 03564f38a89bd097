"""No foreign agent: the environment answers the model."""

from dataclasses import dataclass

from mtgrpo.agents import Address, Agent, Outcome
from mtgrpo.errors import refuse_without_effect
from mtgrpo.types import Task


@dataclass
class NoAgent(Agent):
    """The model talks to the environment."""

    active = False

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = ("max_requests", "timeout_s", "train", "pin_system", "posts_rewards", "strict")
        refuse_without_effect(self, settings, "choose an agent, such as agent=python")

    async def run(self, task: Task, address: Address) -> Outcome:
        """Nothing: nobody leads the conversation."""
        return Outcome()
