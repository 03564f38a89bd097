"""Questions about the example MCP server: the price of something on the day of an event."""

import random
from dataclasses import dataclass

from mtgrpo.tasks import Generated, Split, called, held_out, user
from mtgrpo.tools.market import EVENTS, STOCKS, day_of, open_day, price
from mtgrpo.types import Message, Task

QUESTION = "What is the price of {stock} on the day of the {event} of {year}?"
YEARS = range(10, 100)
_EVAL_FRACTION = 0.2


@dataclass
class Market(Generated, right=">= 0 and <= 1"):
    """What something costs on the day of an event; where the market is closed then, on the next day it is open.

    It takes two calls of the server `python -m mtgrpo.tools.market`, day_of and price, and where price says that the
    market is closed, open_day and price again. The answer is the price after `####`. A fifth of all questions appears
    in `eval` tasks only.
    """

    right: float = 1.0  # share of demonstrations without an error; the others take the year for the day, or give up

    def task(self, split: Split, seed: int, index: int) -> Task:
        name = f"market/{seed}/{split.value}/{index}"
        rng = random.Random(name)
        while True:
            stock, event, year = rng.choice(STOCKS), rng.choice(EVENTS), rng.choice(YEARS)
            if held_out(f"{stock}/{event}/{year}", _EVAL_FRACTION) is (split is Split.eval):
                break
        names = {"stock": stock, "event": event, "year": year}
        messages = self.with_prompt(user(QUESTION.format(**names)))
        return Task(name, messages, price(stock, open_day(day_of(event, year))), names)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
        rng = random.Random(f"demonstration/{seed}/{task.id}")
        stock, event, year = (task.metadata[name] for name in ("stock", "event", "year"))
        kind = "right" if rng.random() < self.right else rng.choice(["year for day", "gave up"])
        day = year if kind == "year for day" else day_of(event, year)
        messages = [] if kind == "year for day" else [*called("day_of", {"event": event, "year": year}, str(day))]
        if kind == "gave up":
            return (*messages, Message("assistant", f"#### {day}"))
        if open_day(day) != day:
            messages += called("price", {"stock": stock, "day": day}, price(stock, day))
            messages += called("open_day", {"day": day}, str(open_day(day)))
            day = open_day(day)
        messages += called("price", {"stock": stock, "day": day}, price(stock, day))
        return (*messages, Message("assistant", f"#### {price(stock, day)}"))
