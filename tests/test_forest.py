"""From turns to a forest: shared prefixes are one path, and every sampled token stands after its whole context."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.batch.forest import Batch, Forest, build_batch, build_forest
from mtgrpo.errors import RunError
from mtgrpo.policy.guard import check_provenance
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

TOKENS = st.lists(st.integers(0, 2), max_size=7)  # few different tokens: much is shared
ROWS = st.lists(TOKENS, max_size=9)
TASK = Task("test/0", (Message("user", "?"),))


def trie(rows: Iterable[list[int]]) -> dict[int, Any]:
    """The slow way: {token: what follows it}."""
    root: dict[int, Any] = {}
    for row in rows:
        below = root
        for token in row:
            below = below.setdefault(token, {})
    return root


def path_to(forest: Forest, node: int) -> list[int]:
    """Node numbers from the root to `node`."""
    path = [node]
    while (parent := int(forest.parent[path[0]])) >= 0:
        path.insert(0, parent)
    return path


def rows_of(forest: Forest) -> list[list[int]]:
    """The token rows from root to leaf, depth-first. Duplicates and rows that are a prefix of another are gone."""
    return [forest.token[path].tolist() for path in forest.leaf_paths()]


def spelled(forest: Forest, node: int) -> list[int]:
    return forest.token[path_to(forest, node)].tolist()


def test_a_forest_by_hand() -> None:
    forest, nodes = build_forest([[5, 6, 8], [5, 6, 7], [4], [], [5, 6], [5, 6, 7]])
    assert forest.token.tolist() == [4, 5, 6, 7, 8]
    assert forest.parent.tolist() == [-1, -1, 1, 2, 2]
    assert forest.depth.tolist() == [0, 0, 1, 2, 2]
    assert forest.subtree_end.tolist() == [1, 5, 5, 4, 5]
    assert [found.tolist() for found in nodes] == [[1, 2, 4], [1, 2, 3], [0], [], [1, 2], [1, 2, 3]]
    assert rows_of(forest) == [[4], [5, 6, 7], [5, 6, 8]]
    assert {tensor.dtype for tensor in (*vars(forest).values(), *nodes)} == {torch.int64}


@given(ROWS)
def test_the_forest_is_the_trie_of_the_rows(rows: list[list[int]]) -> None:
    forest, nodes = build_forest(rows)

    def count(below: dict[int, Any]) -> int:
        return sum(1 + count(further) for further in below.values())

    assert trie(rows_of(forest)) == trie(rows)
    assert len(forest) == count(trie(rows))
    for row, found in zip(rows, nodes, strict=True):
        assert found.tolist() == (path_to(forest, int(found[-1])) if row else [])
        assert forest.token[found].tolist() == row
        assert forest.depth[found].tolist() == list(range(len(row)))


@given(ROWS)
def test_a_token_sees_itself_and_what_is_above_it(rows: list[list[int]]) -> None:
    forest, _ = build_forest(rows)
    number = torch.arange(len(forest))
    sees = (number[None] <= number[:, None]) & (number[:, None] < forest.subtree_end[None])
    assert [row.nonzero()[:, 0].tolist() for row in sees] == [path_to(forest, node) for node in number.tolist()]


@given(ROWS, st.randoms(use_true_random=False))
def test_neither_the_order_of_rows_nor_a_rebuild_changes_the_forest(rows: list[list[int]], random: Any) -> None:
    forest, nodes = build_forest(rows)
    order = random.sample(range(len(rows)), len(rows))
    again, nodes_again = build_forest([rows[i] for i in order])
    assert_same(forest, again)
    assert [found.tolist() for found in nodes_again] == [nodes[i].tolist() for i in order]
    assert_same(forest, build_forest(rows_of(forest))[0])


@pytest.mark.parametrize("token", [255, 256, 65_536, 2**32 - 2])
def test_tokens_of_any_size(token: int) -> None:
    forest, nodes = build_forest([[token, 1], [token + 1], [token], [1, token]])
    assert rows_of(forest) == [[1, token], [token, 1], [token + 1]]
    assert [found.tolist() for found in nodes] == [[2, 3], [4], [2], [0, 1]]


@given(ROWS, st.data())
def test_a_subset_is_a_forest_that_spells_the_same(rows: list[list[int]], data: st.DataObject) -> None:
    forest, _ = build_forest(rows)
    chosen = data.draw(st.lists(st.sampled_from(range(len(forest))))) if len(forest) else []
    nodes = forest.with_ancestors(torch.tensor(chosen, dtype=torch.long))
    assert nodes.tolist() == sorted({above for node in chosen for above in path_to(forest, node)})
    part = forest.subset(nodes)
    assert_same(part, build_forest([spelled(forest, node) for node in chosen])[0])


def assert_same(one: Forest, other: Forest) -> None:
    for name, values in vars(one).items():
        assert values.tolist() == getattr(other, name).tolist(), name


# Trajectories


def turn(new_context: list[int], output: list[int], parent: int) -> Turn:
    logprobs = [-0.01 * (1 + token) for token in output]
    return Turn(new_context, output, logprobs, [0] * len(output), Finish.STOP, Message("assistant"), parent)


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Any number of turns, in any tree; outputs may be empty, and trajectories may have no turns."""
    found: list[Trajectory] = []
    for _ in range(draw(st.integers(0, 4))):
        turns: list[Turn] = []
        for _ in range(draw(st.integers(0, 4))):
            parent = draw(st.integers(-1, len(turns) - 1))
            context = draw(TOKENS) if parent >= 0 else [draw(st.integers(0, 2)), *draw(TOKENS)]
            turns.append(turn(context, draw(TOKENS), parent))
        found.append(Trajectory(TASK, turns=turns))
    return found


def columns(batch: Batch) -> dict[str, list[Any]]:
    """Each entry's values, with what its node's path spells in place of a number."""
    found = {name: getattr(batch, name).tolist() for name in ("token", "behaviour_logp", "trajectory", "turn")}
    return found | {"path": [spelled(batch.forest, node) for node in batch.node.tolist()]}


def test_siblings_share_their_prompt_and_what_they_sampled_alike() -> None:
    first = Trajectory(TASK, turns=[turn([1, 2], [3, 4], -1), turn([5], [6], 0), turn([7], [8], -1)])
    second = Trajectory(TASK, turns=[turn([1, 2], [3, 9], -1)])
    batch = build_batch([first, second])
    assert rows_of(batch.forest) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [7, 8]]
    assert batch.node.tolist() == [2, 3, 5, 8, 2, 6]  # both sampled node 2: one node, two entries
    assert batch.token.tolist() == [3, 4, 6, 8, 3, 9]
    assert batch.trajectory.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.turn.tolist() == [0, 0, 1, 2, 0, 0]
    assert batch.behaviour_logp.tolist() == pytest.approx([-0.04, -0.05, -0.07, -0.09, -0.04, -0.1])
    assert batch.behaviour_logp.dtype == torch.float64
    assert len(batch) == 6
    assert batch.shared == (6 + 2 + 4) / 9  # tokens of three segments, nodes


@given(trajectories())
def test_entries_are_the_sampled_tokens_after_their_whole_context(trajectories: list[Trajectory]) -> None:
    batch = build_batch(trajectories)
    expected: dict[str, list[Any]] = {name: [] for name in columns(batch)}
    for index, trajectory in enumerate(trajectories):
        for number, one in enumerate(trajectory.turns):
            for position, token in enumerate(one.output):
                expected["token"].append(token)
                expected["behaviour_logp"].append(one.logprobs[position])
                expected["trajectory"].append(index)
                expected["turn"].append(number)
                expected["path"].append(trajectory.context(number) + one.output[: position + 1])
    assert columns(batch) == expected  # and nothing else: no token of a template, a user or a tool
    whole = [
        trajectory.context(i) + one.output for trajectory in trajectories for i, one in enumerate(trajectory.turns)
    ]
    assert trie(rows_of(batch.forest)) == trie(whole)


@given(trajectories())
def test_what_was_sampled_is_found_in_the_batch(trajectories: list[Trajectory]) -> None:
    """Also after turns that sampled nothing, by turns that add nothing to their context."""
    check_provenance(build_batch(trajectories), trajectories)


def test_an_auxiliary_turn_without_tokens_is_trained_with_the_rest() -> None:
    empty = replace(turn([], [], 0), auxiliary=True)
    trajectory = Trajectory(TASK, turns=[turn([1, 2], [3, 4], -1), empty, turn([], [5], 1), turn([], [6], 2)])
    batch = build_batch([trajectory])
    check_provenance(batch, [trajectory])
    swapped = replace(batch, node=batch.node.flip(0))
    with pytest.raises(RunError, match="is not that of a sampled token"):
        check_provenance(swapped, [trajectory])


def test_chains_that_take_turns_keep_a_row_each_and_a_branch_begins_another() -> None:
    turns = [turn([1], [2], -1), turn([9], [8], -1), turn([3], [4], 0), turn([7], [6], 1), turn([5], [5], 0)]
    trajectory = Trajectory(TASK, turns=turns)
    batch = build_batch([trajectory])
    assert batch.segment.tolist() == [0, 1, 0, 1, 2]
    assert trajectory.segments == 3
    assert rows_of(batch.forest) == [[1, 2, 3, 4], [1, 2, 5, 5], [9, 8, 7, 6]]


@given(trajectories())
def test_storing_turns_in_more_segments_changes_nothing(trajectories: list[Trajectory]) -> None:
    apart = [
        Trajectory(TASK, turns=[turn(one.context(i), one.turns[i].output, -1) for i in range(len(one.turns))])
        for one in trajectories
    ]
    batch, again = build_batch(trajectories), build_batch(apart)
    assert_same(batch.forest, again.forest)
    assert columns(batch) == columns(again)


@given(trajectories(), st.randoms(use_true_random=False))
def test_the_order_of_trajectories_changes_only_the_order_of_entries(
    trajectories: list[Trajectory], random: Any
) -> None:
    order = random.sample(range(len(trajectories)), len(trajectories))
    batch, again = build_batch(trajectories), build_batch([trajectories[i] for i in order])
    assert_same(batch.forest, again.forest)
    entries = [entry for i in order for entry in (batch.trajectory == i).nonzero()[:, 0].tolist()]
    assert again.node.tolist() == batch.node[entries].tolist()
    assert again.behaviour_logp.tolist() == batch.behaviour_logp[entries].tolist()


def cut(output: list[int], kept: list[list[int]]) -> Turn:
    """A turn that was sampled from few tokens."""
    made = turn([1, 2], output, -1)
    made.kept = [array("i", tokens) for tokens in kept]
    return made


def test_what_was_kept_stays_with_its_entry_and_is_stored_once() -> None:
    turns = [cut([5, 6], [[5], [6, 8, 9]]), cut([7], [[4, 7]]), cut([8, 5], [[6, 8, 9], [5]])]
    kept = build_batch([Trajectory(TASK, turns=[turn]) for turn in turns]).kept
    assert kept is not None
    assert (kept.sets, kept.number.tolist()) == (3, [0, 1, 2, 1, 0])
    assert kept.offset.tolist() == [0, 1, 4, 6]
    assert kept.token.tolist() == [5, 6, 8, 9, 4, 7]
    offset, token = kept.listed(torch.tensor([2, 0, 2]))
    assert (offset.tolist(), token.tolist()) == ([0, 2, 3, 5], [4, 7, 5, 4, 7])
    assert kept.listed(torch.empty(0, dtype=torch.long))[0].tolist() == [0]


def test_a_batch_is_cut_throughout_or_not_at_all() -> None:
    trajectories = [Trajectory(TASK, turns=[cut([5], [[5]])]), Trajectory(TASK, turns=[turn([1, 2], [7], -1)])]
    with pytest.raises(RunError, match="1 of 2 sampled tokens say what"):
        build_batch(trajectories)


def test_a_batch_of_nothing() -> None:
    for trajectories in ([], [Trajectory(TASK)], [Trajectory(TASK, turns=[turn([], [], -1)])]):
        batch = build_batch(trajectories)
        assert (len(batch), len(batch.forest), rows_of(batch.forest)) == (0, 0, [])
        assert batch.node.dtype == batch.token.dtype == batch.trajectory.dtype == batch.turn.dtype == torch.int64


FINE = turn([1], [2, 3], -1)
WRONG = {
    "parent=0 is no turn before it": (turn([1], [2], 0), 0),
    "2 output tokens but 1 log-probabilities": (Turn([1], [2, 3], [-0.1], [0, 0], Finish.STOP, FINE.message), 1),
    "2 output tokens but 1 versions": (Turn([1], [2, 3], [-0.1, -0.1], [0], Finish.STOP, FINE.message), 1),
    "output position 1, token 3, has log-probability nan": (
        Turn([1], [2, 3], [-0.1, float("nan")], [0, 0], Finish.STOP, FINE.message),
        1,
    ),
    "output position 0, token 2, has log-probability -inf": (
        Turn([1], [2], [float("-inf")], [0], Finish.STOP, FINE.message, parent=0),
        1,
    ),
    "output position 0, token 2, was sampled from an empty context": (turn([], [2], -1), 1),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_trained_on_is_refused(message: str) -> None:
    wrong, number = WRONG[message]
    trajectories = [Trajectory(TASK, turns=[FINE]), Trajectory(TASK, sample_index=3, turns=[FINE] * number + [wrong])]
    with pytest.raises(RunError, match=f"task 'test/0', sample 3, turn {number}: {message}"):
        build_batch(trajectories)
