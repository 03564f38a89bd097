"""From turns to rows and back: every sampled token is read once, from the place that predicts it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.batch.padded import build_batch, micro_batches
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

TASK = Task("test/0", (Message("user", "?"),))
TOKENS = st.lists(st.integers(0, 99), max_size=6)


def turn(new_context: list[int], output: list[int], extends: bool) -> Turn:
    logprobs = [-0.01 * token for token in output]
    return Turn(new_context, output, logprobs, [0] * len(output), Finish.STOP, Message("assistant"), extends)


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Any number of turns, in any segments; outputs may be empty, and trajectories may have no turns."""
    found: list[Trajectory] = []
    for _ in range(draw(st.integers(1, 4))):
        turns: list[Turn] = []
        for _ in range(draw(st.integers(0, 4))):
            extends = bool(turns) and draw(st.booleans())
            context = draw(TOKENS) if extends else [*draw(TOKENS), draw(st.integers(0, 99))]
            turns.append(turn(context, draw(TOKENS), extends))
        found.append(Trajectory(TASK, turns=turns))
    return found


def test_a_turn_that_extends_continues_the_row_and_another_starts_one() -> None:
    first = Trajectory(TASK, turns=[turn([1, 2], [3, 4], False), turn([5], [6], True), turn([7, 8, 9], [10], False)])
    second = Trajectory(TASK, turns=[turn([1], [11, 12], False)])
    batch = build_batch([first, second])
    assert batch.rows == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [1, 11, 12]]
    assert batch.row.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.position.tolist() == [2, 3, 5, 3, 1, 2]
    assert batch.token.tolist() == [3, 4, 6, 10, 11, 12]
    assert batch.trajectory.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.turn.tolist() == [0, 0, 1, 2, 0, 0]
    assert batch.behaviour_logp.tolist() == pytest.approx([-0.03, -0.04, -0.06, -0.1, -0.11, -0.12])


@given(trajectories())
def test_entries_are_the_sampled_tokens_after_their_whole_context(played: list[Trajectory]) -> None:
    batch = build_batch(played)
    entry = 0
    for index, trajectory in enumerate(played):
        for number, one in enumerate(trajectory.turns):
            for count, token in enumerate(one.output):
                row, position = batch.rows[batch.row[entry]], int(batch.position[entry])
                assert row[:position] == trajectory.context(number) + one.output[:count]
                assert row[position] == batch.token[entry] == token
                assert batch.behaviour_logp[entry] == one.logprobs[count]
                assert (batch.trajectory[entry], batch.turn[entry]) == (index, number)
                entry += 1
    assert len(batch) == entry  # nothing else has an entry: no token of a template, a user or a tool
    assert len(batch.rows) == sum(trajectory.segments for trajectory in played)


@given(trajectories(), st.integers(1, 60), st.data())
def test_micro_batches_cover_the_entries_once(played: list[Trajectory], token_budget: int, data: st.DataObject) -> None:
    batch = build_batch(played)
    chosen = data.draw(st.lists(st.sampled_from(range(len(batch))), unique=True)) if len(batch) else []
    entries = torch.tensor(sorted(chosen), dtype=torch.long)
    seen: list[int] = []
    used_rows = 0
    for micro in micro_batches(batch, entries, token_budget):
        rows, width = micro.ids.shape
        assert rows == 1 or rows * width <= token_budget
        assert sorted(set(micro.row.tolist())) == list(range(rows))  # no row is computed in vain
        used_rows += rows
        columns = (micro.entries, micro.row, micro.parent, micro.token)
        for entry, row, parent, token in zip(*(column.tolist() for column in columns), strict=True):
            known = batch.rows[batch.row[entry]]
            assert micro.ids[row].tolist() == known + [0] * (width - len(known))
            assert token == batch.token[entry] == micro.ids[row, parent + 1]
            assert parent == batch.position[entry] - 1 >= 0
            seen.append(entry)
    assert sorted(seen) == sorted(chosen)
    assert used_rows == len({int(batch.row[entry]) for entry in chosen})


def test_rows_of_like_length_are_computed_together() -> None:
    lengths = [3, 40, 4, 38, 5]
    batch = build_batch([Trajectory(TASK, turns=[turn([1], [2] * (n - 1), False)]) for n in lengths])
    shapes = [tuple(micro.ids.shape) for micro in micro_batches(batch, torch.arange(len(batch)), 80)]
    assert shapes == [(2, 40), (3, 5)]
