"""Pages of amounts to be added up: long conversations whose context may be condensed, for models that can only copy."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from mtgrpo.errors import require
from mtgrpo.tasks import Generated, Split, called, user
from mtgrpo.tasks.calculator import numbers
from mtgrpo.types import SUMMARY, Message, Task

PROMPT = "Add up the amounts on all pages."


@dataclass
class Ledger(Generated, min_pages=">= 2", right=">= 0 and <= 1"):
    """Pages with one amount each, read one by one (tool next_page); a running total is kept with the calculator.

    The answer is the total after `####`. At any time only the total so far and the page last read are needed, so that
    an agent that keeps the end of the conversation, or writes the total down, can finish whatever the number of pages.
    A fifth of all amounts is held out: it appears in `eval` tasks only. It needs
    'environment.tools=[calculator,next_page]' and environment.max_turns of twice the pages and one more.
    """

    min_pages: int = 8
    max_pages: int = 12
    seed: int = 0  # another seed gives other problems
    right: float = 1.0  # share of demonstrations without an error; the others stop at an earlier page

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, max_pages=f">= {self.min_pages} (min_pages)")

    def task(self, split: Split, seed: int, index: int) -> Task:
        name = f"ledger/{self.seed}/{seed}/{split.value}/{index}"
        rng = random.Random(name)
        amounts = _AMOUNTS[split is Split.eval]
        pages = tuple(rng.choice(amounts) for _ in range(rng.randint(self.min_pages, self.max_pages)))
        return Task(name, self.with_prompt(user(PROMPT)), str(sum(pages)), {"pages": pages})

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Pages, sums and an answer, with a summary after each step for condensers that need one."""
        rng = random.Random(f"demonstration/{seed}/{task.id}")
        pages = list(task.metadata["pages"])
        finished = rng.random() < self.right
        return tuple(_converse(pages if finished else pages[: rng.randrange(1, len(pages))], finished))


_AMOUNTS = {held_out: numbers(100, 999, held_out) for held_out in (False, True)}


def _converse(pages: list[int], finished: bool) -> Iterator[Message]:
    """The conversation after the task; if `finished`, up to the reply that there are no more pages."""
    total = 0
    for amount in pages:
        yield from called("next_page", {}, str(amount))
        if total:
            yield Message("assistant", f"total {total} new {amount}", name=SUMMARY)
            yield from called("calculator", {"expression": f"{total} + {amount}"}, str(total + amount))
        total += amount
        yield Message("assistant", f"total {total}", name=SUMMARY)
    if finished:
        yield from called("next_page", {}, "no more pages")
        yield Message("assistant", f"total {total} end", name=SUMMARY)
    yield Message("assistant", f"#### {total}")
