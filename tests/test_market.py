"""Questions about the example MCP server."""

from __future__ import annotations

import itertools

from mtgrpo.tasks import Split
from mtgrpo.tasks.market import Market
from mtgrpo.tools.market import EVENTS, STOCKS, day_of, open_day, price
from mtgrpo.types import Task


def tasks(split: Split, count: int = 500) -> list[Task]:
    return list(itertools.islice(Market().stream(split, 0), count))


def test_right_demonstrations_end_with_the_answer_and_others_hardly_ever() -> None:
    calls: set[int] = set()
    for right, least, most in ((1.0, 1.0, 1.0), (0.0, 0.0, 0.1)):
        source = Market(right=right)
        told = [(task, source.demonstration(task, 0)) for task in tasks(Split.train)]
        share = sum(said[-1].content == f"#### {task.answer}" for task, said in told) / len(told)
        assert least <= share <= most
        calls |= {len(said) // 2 for _, said in told}
    assert calls == {1, 2, 3, 4}  # the market is closed on some days


def test_what_is_asked_is_known_to_the_server_and_held_out() -> None:
    train, held = ({task.messages for task in tasks(split, 2000)} for split in Split)
    assert len(held) > 500 and not train & held
    asked = itertools.product(STOCKS, EVENTS, (10, 99))
    answers = [int(price(stock, open_day(day_of(event, year)))) for stock, event, year in asked]
    assert min(answers) >= 100 and max(answers) <= 999 and len(set(answers)) > 100
    assert price("Gold", 12) == "closed on day 12" and price("Lead", 10).startswith("no stock Lead; there are Gold")
