"""Numbers to be guessed, within ranges of which some are held out."""

import random
from dataclasses import dataclass

from mtgrpo.errors import ConfigError, require
from mtgrpo.tasks import Generated, Split, held_out, user
from mtgrpo.types import Message, Task

_TRIES = 1000  # ranges that are drawn to get one of the wanted split


@dataclass
class GuessNumber(Generated, min_width=">= 2", highest=">= 10", right=">= 0 and <= 1", guesses=">= 1"):
    """A number within a range, for environment=guess_number.

    A fifth of all ranges is held out. Halving the range finds one of 2 ** n - 1 numbers with n guesses.
    """

    min_width: int = 16  # numbers in the range, at least
    max_width: int = 31  # and at most
    highest: int = 49  # that a range may begin with; the lowest is 10
    seed: int = 0  # another seed gives other games
    right: float = 0.2  # share of demonstrations that halve the range; the others count up from its beginning
    guesses: int = 5  # in a demonstration, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, max_width=f">= {self.min_width} (min_width)")

    def task(self, split: Split, seed: int, index: int) -> Task:
        """A range. Raises ConfigError where there are too few for the split."""
        name = f"guess_number/{self.seed}/{seed}/{split.value}/{index}"
        rng = random.Random(name)
        for _ in range(_TRIES):
            low = rng.randint(10, self.highest)
            high = low + rng.randint(self.min_width, self.max_width) - 1
            if held_out(f"{low} to {high}", 0.2) is (split is Split.eval):
                number = rng.randint(low, high)
                prompt = self.with_prompt(user(f"Guess my number: {low} to {high}"))
                return Task(name, prompt, str(number), {"low": low, "high": high, "number": number})
        raise ConfigError(
            f"task.highest={self.highest} task.min_width={self.min_width} task.max_width={self.max_width} give too few "
            f"ranges: none of {_TRIES} is for split {split.value}; set them further apart"
        )

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Guesses and their answers, until the number is found or no guess is left."""
        halves = random.Random(f"demonstration/{seed}/{task.id}").random() < self.right
        low, high, number = (int(task.metadata[name]) for name in ("low", "high", "number"))
        messages: list[Message] = []
        for _ in range(self.guesses):
            guess = (low + high) // 2 if halves else low
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            reply = Message("user", f"{'higher' if guess < number else 'lower'}: {low} to {high}")
            messages += (Message("assistant", str(guess)), reply)
            if guess == number:
                break
        return tuple(messages[:-1])
