"""From a forest to micro-batches: every entry is read once, after its whole context, within the token budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtgrpo.batch.forest import Batch, build_batch, build_forest
from mtgrpo.batch.packing import Cost, Layout, MicroBatch, Packing, pack, visits
from mtgrpo.batch.settings import BatchSettings
from mtgrpo.errors import ConfigError
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn
from test_forest import rows_of

TASK = Task("test/0", (Message("user", "?"),))
COST = Cost(token=10.0, pair=1.0, read=40.0)
LAYOUTS = pytest.mark.parametrize("layout", Layout)
RANKS = st.integers(1, 3)
Path = tuple[int, ...]


def trajectory(*parts: list[int]) -> Trajectory:
    """One segment: context, output, further context, output ..."""
    turns = [
        Turn(context, output, [-0.1] * len(output), [0] * len(output), Finish.STOP, Message("assistant"), i - 1)
        for i, (context, output) in enumerate(zip(parts[::2], parts[1::2], strict=True))
    ]
    return Trajectory(TASK, turns=turns)


@st.composite
def batches(draw: st.DrawFn, roots: int = 3) -> tuple[Batch, torch.Tensor, int]:
    """A batch of up to `roots` trees with few different tokens, some entries in any order, and a budget for them."""
    tokens = st.lists(st.integers(0, 2), max_size=4)
    context = st.builds(lambda root, rest: [root, *rest], st.integers(0, roots - 1), tokens)
    trajectories = draw(st.lists(st.builds(trajectory, context, tokens, tokens, tokens), max_size=7))
    batch = build_batch(trajectories)
    chosen = draw(st.lists(st.sampled_from(range(len(batch))), unique=True)) if len(batch) else []
    longest = max((len(context_of(batch, entry)) for entry in chosen), default=1)
    return batch, torch.tensor(chosen, dtype=torch.long), longest + draw(st.integers(0, 20))


def context_of(batch: Batch, entry: int) -> Path:
    node, found = int(batch.forest.parent[batch.node[entry]]), list[int]()
    while node >= 0:
        found.insert(0, int(batch.forest.token[node]))
        node = int(batch.forest.parent[node])
    return tuple(found)


def prefixes(paths: set[Path]) -> set[Path]:
    return {path[:stop] for path in paths for stop in range(1, len(path) + 1)}


def leaves(paths: set[Path]) -> list[Path]:
    """Those that begin no other one, depth-first."""
    begun = {path[:-1] for path in prefixes(paths)}
    return sorted(paths - begun)


def computed_paths(micro: MicroBatch) -> list[Path]:
    """What each hidden state of a micro-batch has seen, by flat index."""
    rows, width = micro.ids.shape
    if micro.forest is None:
        return [tuple(micro.ids[row, : column + 1].tolist()) for row in range(rows) for column in range(width)]
    ends = micro.forest.subtree_end
    return [tuple(micro.ids[0, : q + 1][ends[: q + 1] > q].tolist()) for q in range(width)]


def flat(packing: list[Packing]) -> list[MicroBatch]:
    return [micro for rank in packing for micro in rank.micro_batches]


def compute_cost(paths: set[Path], read: set[Path]) -> float:
    """Of computing `paths` and all that begins them once, and reading at `read`."""
    return sum(COST.token + COST.pair * len(path) for path in prefixes(paths)) + COST.read * len(read)


@LAYOUTS
@settings(max_examples=60)
@given(batches(), RANKS)
def test_every_entry_is_read_once_after_its_whole_context(
    layout: Layout, drawn: tuple[Batch, torch.Tensor, int], ranks: int
) -> None:
    batch, entries, budget = drawn
    seen: list[int] = []
    targets = 0
    for micro in flat(pack(batch, entries, budget, COST, layout, ranks)):
        paths = computed_paths(micro)
        asked = list(zip(micro.parent.tolist(), micro.token.tolist(), strict=True))
        assert len(set(asked)) == len(asked) and set(micro.target.tolist()) == set(range(len(asked)))
        for entry, target in zip(micro.entries.tolist(), micro.target.tolist(), strict=True):
            parent, token = asked[target]
            assert (paths[parent], token) == (context_of(batch, entry), batch.token[entry])
            seen.append(entry)
        targets += len(asked)
    assert sorted(seen) == sorted(entries.tolist())
    assert targets == len(batch.node[entries].unique())


@LAYOUTS
@settings(max_examples=60)
@given(batches(), RANKS)
def test_only_what_is_needed_is_computed_within_the_budget(
    layout: Layout, drawn: tuple[Batch, torch.Tensor, int], ranks: int
) -> None:
    batch, entries, budget = drawn
    packing = pack(batch, entries, budget, COST, layout, ranks)
    contexts = {context_of(batch, entry) for entry in entries.tolist()}
    assert packing[0].distinct == len(prefixes(contexts))
    assert packing[0].computed == sum(micro.computed for micro in flat(packing))
    rows: list[Path] = []
    for micro in flat(packing):
        assert micro.ids.shape == micro.position.shape and micro.computed <= budget
        assert micro.ids.dtype == micro.position.dtype == torch.int64
        paths = computed_paths(micro)
        read = {paths[parent] for parent in micro.parent.tolist()}
        if micro.forest is not None:
            local = build_forest(rows_of(micro.forest))[0]  # it is the forest of its rows: numbering and all
            for name, values in vars(local).items():
                assert values.tolist() == getattr(micro.forest, name).tolist(), name
            assert micro.ids.tolist() == [micro.forest.token.tolist()]
            assert micro.position.tolist() == [micro.forest.depth.tolist()]
            given = set(paths[: micro.given])
            assert micro.cost == pytest.approx(compute_cost(set(paths), read) - compute_cost(given, set()))
            if not micro.opens:
                assert set(leaves(set(paths))) <= read  # no path is computed in vain
                rows += leaves(set(paths))
        else:
            count, width = micro.ids.shape
            assert micro.position.tolist() == [list(range(width))] * count
            pairs = count * width * (width + 1) // 2
            assert micro.cost == pytest.approx(10 * count * width + pairs + 40 * len(read))
            for row in micro.ids.tolist() if width else []:
                rows.append(max((leaf for leaf in leaves(contexts) if tuple(row[: len(leaf)]) == leaf), key=len))
                assert row[len(rows[-1]) :] == [0] * (width - len(rows[-1]))
    assert sorted(rows) == leaves(contexts)  # each path in one micro-batch


@LAYOUTS
@settings(max_examples=60)
@given(batches(), RANKS)
def test_ranks_get_equally_many_micro_batches(
    layout: Layout, drawn: tuple[Batch, torch.Tensor, int], ranks: int
) -> None:
    batch, entries, budget = drawn
    packing = pack(batch, entries, budget, COST, layout, ranks)
    assert len(packing) == ranks
    assert len({len(rank.micro_batches) for rank in packing}) == 1
    assert bool(flat(packing)) == bool(len(entries))
    again = pack(batch, entries, budget, COST, layout, ranks)
    assert [micro.entries.tolist() for micro in flat(again)] == [micro.entries.tolist() for micro in flat(packing)]


@LAYOUTS
@settings(max_examples=60)
@given(batches(), RANKS)
def test_a_rank_computes_its_entries_as_one_process_would(
    layout: Layout, drawn: tuple[Batch, torch.Tensor, int], ranks: int
) -> None:
    batch, entries, budget = drawn
    for rank in pack(batch, entries, budget, COST, layout, ranks):
        used = [micro for micro in rank.micro_batches if micro.computed]
        own = entries[torch.isin(entries, torch.cat([entries[:0], *(micro.entries for micro in used)]))]
        (alone,) = pack(batch, own, budget, COST, layout)
        assert_equal(used, alone.micro_batches)


def assert_equal(found: list[MicroBatch], expected: list[MicroBatch]) -> None:
    """Bit for bit."""
    for one, other in zip(found, expected, strict=True):
        for name, value in vars(one).items():
            wanted = getattr(other, name)
            if name in ("forest", "kept"):
                value, wanted = (None if part is None else list(vars(part).values()) for part in (value, wanted))
            torch.testing.assert_close(value, wanted, rtol=0, atol=0)


@given(batches(roots=8))
def test_a_tree_within_the_budget_is_never_cut(drawn: tuple[Batch, torch.Tensor, int]) -> None:
    batch, entries, budget = drawn
    contexts = {context_of(batch, entry) for entry in entries.tolist()}
    packing = pack(batch, entries, budget, COST)
    homes: dict[int, list[int]] = {}
    for number, micro in enumerate(flat(packing)):
        for root in micro.ids[micro.position == 0].tolist():
            homes.setdefault(root, []).append(number)
    for root, found in homes.items():
        size = len(prefixes({path for path in contexts if path[0] == root}))
        assert len(found) == 1 or size > budget
    if all(len(found) == 1 for found in homes.values()):
        assert packing[0].computed == packing[0].distinct
        used = sum(micro.ids.numel() > 0 for micro in flat(packing))
        assert used == min(len(homes), len(flat(packing)))  # none is empty that could have had a tree


def star(prompt: int, outputs: list[int], first: int = 1) -> list[Trajectory]:
    """Siblings: outputs of these lengths (the last token of each is never computed) after a prompt."""
    return [trajectory([first] * prompt, [100 + i] * (output + 1)) for i, output in enumerate(outputs)]


def sizes(batch: Batch, budget: int, layout: Layout = Layout.forest, ranks: int = 1) -> list[list[tuple[int, ...]]]:
    packing = pack(batch, torch.arange(len(batch)), budget, COST, layout, ranks)
    return [[tuple(micro.ids.shape) for micro in rank.micro_batches] for rank in packing]


def test_a_group_beyond_the_budget_computes_its_prompt_once() -> None:
    batch = build_batch(star(10, [5] * 6))
    packing = pack(batch, torch.arange(len(batch)), 35, COST)
    assert (packing[0].distinct, packing[0].computed) == (40, 40)
    assert sizes(batch, 40) == [[(1, 40)]]
    assert sizes(batch, 39) == [[(1, 10), (1, 35), (1, 15)]]  # of which 10 are given to those that follow
    assert [micro.computed for micro in packing[0].micro_batches] == [10, 25, 5]


def test_a_short_trunk_is_computed_with_each_part_of_its_branches() -> None:
    batch = build_batch(star(2, [9] * 8))  # 2 of a budget of 64
    (packing,) = pack(batch, torch.arange(len(batch)), 64, COST)
    assert [(micro.computed, micro.given, micro.opens) for micro in packing.micro_batches] == [(38, 0, False)] * 2
    assert (packing.distinct, packing.computed) == (74, 76)
    assert sizes(build_batch(star(3, [9] * 8)), 64) == [[(1, 3), (1, 57), (1, 21)]]
    assert sizes(build_batch(star(2, [9, 9, 63])), 64) == [[(1, 2), (1, 20), (1, 65)]]  # a branch leaves it no room


def test_a_context_beyond_the_budget_is_computed_in_chains() -> None:
    batch = build_batch(star(20, [5, 5]))
    (packing,) = pack(batch, torch.arange(len(batch)), 8, COST)
    assert [(micro.computed, micro.opens, micro.held) for micro in packing.micro_batches] == [
        (8, True, False), (8, True, False), (4, True, False), (5, False, True), (5, False, True)
    ]  # fmt: skip
    assert packing.computed == 30 + 20


def test_chains_below_one_another_copy_no_more_than_the_longest_path() -> None:
    """Siblings that share their first tokens nest; each chain that is held has a copy of the path's keys and values."""
    nested = [trajectory([*range(100), *range(200, 200 + i)], [300 + i] * 30) for i in range(8)]
    batch = build_batch(nested)
    (packing,) = pack(batch, torch.arange(len(batch)), 150, COST)
    copied: list[int] = []
    most = 0
    for micro, entered in visits(packing.micro_batches):
        if not entered:
            copied.pop()
        elif micro.opens:
            copied.append(micro.given if micro.held else 0)
        most = max(most, sum(copied))
    assert 0 < most <= int(batch.forest.depth.max()) + 1
    assert packing.computed <= 1.1 * packing.distinct


def test_trees_are_spread_by_cost() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 1]  # distinct trees: their first tokens differ
    batch = build_batch([one for i, length in enumerate(lengths) for one in star(length, [0], first=i)])
    total = sum(lengths)
    assert sizes(batch, total) == [[(1, total)]]
    assert [len(rank) for rank in sizes(batch, 17)] == [3]
    for ranks in (2, 3, 4):
        packing = pack(batch, torch.arange(len(batch)), total, COST, ranks=ranks)
        costs = [sum(micro.cost for micro in rank.micro_batches) for rank in packing]
        assert len(flat(packing)) == ranks
        assert max(costs) - min(costs) <= 51  # the cost of the least tree


def test_micro_batches_are_spread_over_ranks_by_cost() -> None:
    batch = build_batch([one for i, length in enumerate([9, 8, 6, 5]) for one in star(length, [0], first=i)])
    assert sizes(batch, 9, ranks=2) == [[(1, 9), (1, 5)], [(1, 8), (1, 6)]]
    assert sizes(batch, 9, Layout.padded, ranks=2) == [[(1, 9), (1, 5)], [(1, 8), (1, 6)]]


@LAYOUTS
def test_more_ranks_than_units_leaves_some_with_nothing_to_do(layout: Layout) -> None:
    batch = build_batch([*star(3, [0], first=1), *star(3, [0], first=2)])
    packing = pack(batch, torch.arange(len(batch)), 100, COST, layout, ranks=3)
    assert sorted(micro.ids.numel() for micro in flat(packing)) == [0, 3, 3]
    (empty,) = (micro for micro in flat(packing) if micro.ids.numel() == 0)
    assert [len(tensor) for tensor in (empty.parent, empty.token, empty.entries, empty.target)] == [0] * 4
    assert empty.cost == 0


def test_padded_rows_of_like_length_are_computed_together() -> None:
    batch = build_batch([one for i, length in enumerate([3, 40, 4, 38, 5]) for one in star(length, [0], first=i)])
    assert sizes(batch, 80, Layout.padded) == [[(2, 40), (3, 5)]]


def test_a_padded_prefix_is_read_in_the_first_row_that_holds_it() -> None:
    batch = build_batch([trajectory([1], [2, 3, 4]), trajectory([1], [2, 3, 5, 6])])
    (micro,) = flat(pack(batch, torch.arange(len(batch)), 100, COST, Layout.padded))
    assert micro.ids.tolist() == [[1, 2, 3, 5]]  # 4 and 6 are sampled last: nothing is read at them
    assert micro.parent.tolist() == [0, 1, 2, 2, 3]
    assert micro.token.tolist() == [2, 3, 4, 5, 6]
    batch = build_batch([trajectory([1], [2, 3]), trajectory([1], [4, 5, 6])])
    (micro,) = flat(pack(batch, torch.arange(len(batch)), 100, COST, Layout.padded))
    assert micro.ids.tolist() == [[1, 4, 5], [1, 2, 0]]
    assert sorted(zip(micro.parent.tolist(), micro.token.tolist(), strict=True)) == [
        (0, 2),
        (0, 4),
        (1, 5),
        (2, 6),
        (4, 3),
    ]


def test_a_padded_row_longer_than_the_budget_is_refused() -> None:
    batch = build_batch([trajectory([1, 2, 3], [4, 5])])
    assert len(flat(pack(batch, torch.arange(2), 4, COST, Layout.padded))) == 1
    with pytest.raises(ConfigError, match=r"4 tokens .* batch\.token_budget=3; set it to at least 4"):
        pack(batch, torch.arange(2), 3, COST, Layout.padded)
    assert len(flat(pack(batch, torch.tensor([0]), 3, COST, Layout.padded))) == 1  # its second token is not asked for


def test_a_budget_is_positive() -> None:
    with pytest.raises(ConfigError, match=r"`token_budget` must be >= 1, got 0"):
        BatchSettings(token_budget=0)
