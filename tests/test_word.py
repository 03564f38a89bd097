"""All ranks pass forwards and backwards in one order: nobody waits, and no graph is left over."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtgrpo.batch.forest import build_batch
from mtgrpo.batch.packing import MicroBatch, Packing, empty_like, pack
from mtgrpo.batch.word import Pass, common_word, fillers
from mtgrpo.model.prefix import Prefix, passes, word_of
from mtgrpo.model.scorer import Scorer, flops_of
from mtgrpo.types import Trajectory
from test_attention import TASK, conversation, make_model, trajectories, turn
from test_packing import COST
from test_sharing import COSTS, RANKS, SHAPES, packed

MAX_EXTRA_PASSES = 1.3
BUDGETS = st.integers(1, 60)


def used(packings: Sequence[Packing]) -> list[list[MicroBatch]]:
    """Of each rank, without the empty ones: where there is a common word, fillers stand in their place."""
    return [[micro for micro in rank.micro_batches if micro.computed] for rank in packings]


@st.composite
def words(draw: st.DrawFn) -> str:
    """Any order in which each B has an F before it."""
    letters, open_graphs = "", 0
    for letter in draw(st.text("FB", max_size=12)):
        if letter == "F" or open_graphs:
            letters += letter
            open_graphs += 1 if letter == "F" else -1
    return letters


def assert_all_go_through(spelled: Sequence[str]) -> None:
    word = common_word(spelled)
    assert len(word) >= max(map(len, spelled))
    for own in spelled:
        found = fillers(word, own)
        assert len(found) == len(word)
        assert "".join(letter for letter, filler in zip(word, found, strict=True) if filler is None) == own
        graphs = 0
        for letter, filler in zip(word, found, strict=True):
            assert filler is None or (filler is Pass.backward) == (letter == "B")
            graphs += {Pass.loss: 1, Pass.backward: -1}.get(filler, 0)  # type: ignore[arg-type]
            assert graphs >= 0
        assert graphs == 0


@given(st.lists(words(), min_size=1, max_size=5))
def test_every_rank_goes_through_the_common_word(spelled: list[str]) -> None:
    assert_all_go_through(spelled)


@given(trajectories(), BUDGETS, st.integers(1, 6))
def test_every_rank_with_a_part_of_a_forest_does(played: list[Trajectory], budget: int, ranks: int) -> None:
    batch = build_batch(played)
    assert_all_go_through(
        [word_of(rank) for rank in used(pack(batch, torch.arange(len(batch)), budget, COST, ranks=ranks))]
    )


def test_words() -> None:
    assert common_word([]) == common_word(["", ""]) == ""
    assert common_word(["FBFB", "FB"]) == "FBFB"
    assert common_word(["FFBFBB", "FBFB", ""]) == "FFBFBB"
    assert common_word(["FFB", "FB"]) == "FFB"
    keys, loss, backward = Pass.keys, Pass.loss, Pass.backward
    assert fillers("FFBFBB", "FBFB") == [None, loss, None, None, None, backward]
    assert fillers("FFBFBB", "") == [loss, loss, backward, loss, backward, backward]
    assert fillers("FFB", "FB") == [None, keys, None]  # the other's first F is without gradient too


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_common_word_is_hardly_longer_than_the_longest(shape: str, kind: str, ranks: int) -> None:
    spelled = [word_of(rank) for rank in used(packed(shape, kind, ranks))]
    assert len(common_word(spelled)) <= MAX_EXTRA_PASSES * max(map(len, spelled))


class InStep:
    """A rank's passes, one for each letter of the common word."""

    def __init__(self, scorer: Scorer, weights: Tensor, own: Sequence[MicroBatch], empty: MicroBatch) -> None:
        self._scorer, self._weights, self._empty = scorer, weights, empty
        self._passes, self._graphs = passes(own), list[Tensor]()

    def go(self, filler: Pass | None) -> None:
        if filler is None:
            self._own(*next(self._passes))
        elif filler is Pass.backward:
            self._graphs.pop().backward()
        else:
            with torch.set_grad_enabled(filler is Pass.loss):
                nothing = self._scorer(self._empty, 0.8).logp.sum()
            if filler is Pass.loss:
                self._graphs.append(nothing)

    def _own(self, micro: MicroBatch, prefix: Prefix, step: Pass) -> None:
        if step is Pass.backward:
            prefix.backward()
            return
        with torch.set_grad_enabled(step is Pass.loss):
            scores = self._scorer(micro, 0.8, prefix).at(micro.target)
        prefix.loss = (self._weights[micro.entries] * (scores.logp + 0.1 * scores.entropy)).sum()
        if step is Pass.keys:
            prefix.forget()

    def assert_done(self) -> None:
        assert not self._graphs
        assert next(self._passes, None) is None


def gradient(played: Sequence[Trajectory], budget: int, ranks: int) -> tuple[Tensor, list[Packing]]:
    """What the gradients of all ranks add up to, and what each computes."""
    model, batch = make_model("qwen3"), build_batch(played)
    weights = torch.linspace(-1, 2, len(batch), dtype=torch.float64)
    packings = pack(batch, torch.arange(len(batch)), budget, flops_of(model), ranks=ranks)
    spelled = [word_of(own) for own in used(packings)]
    for own, letters in zip(used(packings), spelled, strict=True):
        rank = InStep(Scorer(model), weights, own, empty_like(packings[0].micro_batches[0]))
        for filler in fillers(common_word(spelled), letters):
            rank.go(filler)
        rank.assert_done()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]), packings


def siblings(prompt: int, turns: int) -> list[Trajectory]:
    """Of two tasks with the first half of their prompts in common, some of whose answers begin alike."""
    rng = random.Random(0)
    some = [[rng.randrange(2, 24) for _ in range(9)] for _ in range(40)]
    return [
        Trajectory(TASK, turns=[
            turn([2] * (prompt // 2) + [3 + task] * (prompt // 2), [*some[task], *some[number]]),
            *(turn(some[10 + number + k], some[20 + number + k], parent=k) for k in range(turns - 1)),
        ])
        for task in range(2) for number in range(4)
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("played", "budget"),
    [
        (siblings(20, 2), 10**6),
        (siblings(20, 2), 64),
        (siblings(20, 3), 30),
        (conversation(), 10**6),
        (conversation(), 20),
    ],
    ids=[
        "a trunk in every part",
        "a walk",
        "chains computed again",
        "condensed contexts",
        "a walk of condensed contexts",
    ],
)
def test_gradients_of_all_ranks_add_up_to_that_of_one(played: list[Trajectory], budget: int, ranks: int) -> None:
    expected, alone = gradient(played, budget, 1)
    found, packings = gradient(played, budget, ranks)
    assert (found - expected).norm() <= 1e-12 * expected.norm()
    assert all(used(packings))
    assert packings[0].distinct == alone[0].distinct
    assert ranks == 2 or packings[0].computed > alone[0].computed  # a tree was cut
