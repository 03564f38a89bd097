from asyncio import gather, sleep
from dataclasses import dataclass

from mtgrpo.rewards import Reward


@dataclass
class Tidy(Reward):
    """The share of characters that are letters."""

    def reward(self, trajectory):
        return sum(map(str.isalpha, trajectory.final)) / max(1, len(trajectory.final))


@dataclass
class Judge(Reward):
    """Asks somebody else, about all siblings at once."""

    wait_s: float = 0.01

    async def rewards(self, siblings):
        return await gather(*map(self.ask, siblings), return_exceptions=True)

    async def ask(self, trajectory):
        await sleep(self.wait_s)
        return len(trajectory.final) % 3
