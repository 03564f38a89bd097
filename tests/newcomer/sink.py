from dataclasses import dataclass

from mtgrpo.log import Sink


@dataclass
class RewardsOnly(Sink):
    """The mean reward of every step, in a file."""

    path: str = "rewards.txt"

    def stage(self, name, total):
        pass

    def log(self, metrics, step):
        if "reward/mean" in metrics:
            with open(self.path, "a") as file:
                print(step, metrics["reward/mean"], file=file)

    def note(self, text):
        pass
