"""What an evaluation claims: against numbers from elsewhere, by hand, by enumeration, and by how often it is right."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.evaluation.statistics import (
    Estimate,
    best_of_n,
    compare,
    majority_vote,
    mean_over_tasks,
    mean_pass_at_k,
    pass_at_k,
    sign_flip_test,
    wilson,
)

RATES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
FLAGS = st.lists(st.booleans(), min_size=1, max_size=8)


def draw_tasks(generator: np.random.Generator, rate: float, tasks: int, samples: int, alike: float) -> np.ndarray:
    """Successes of `samples` samples of each task, whose chance of success is drawn for each task.

    alike: the correlation of two samples of a task.
    """
    scale = 1 / alike - 1
    return generator.binomial(samples, generator.beta(rate * scale, (1 - rate) * scale, tasks))


def as_outcomes(successes: np.ndarray, samples: int) -> list[list[float]]:
    return [[1.0] * int(number) + [0.0] * (samples - int(number)) for number in successes]


# ---------------------------------------------------------------- pass@k, best-of-n, majority vote


@pytest.mark.parametrize(("successes", "samples"), [(0, 6), (1, 6), (3, 7), (6, 6), (5, 8)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_success(successes: int, samples: int) -> None:
    flags = [1] * successes + [0] * (samples - successes)
    for k in range(1, samples + 1):
        expected = mean(max(chosen) for chosen in itertools.combinations(flags, k))
        assert pass_at_k(successes, samples, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_product_of_chen_et_al() -> None:
    for n, c, k in [(200, 13, 10), (200, 13, 100), (200, 150, 1), (10_000, 3, 1_000)]:
        products = 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)) if n - c >= k else 1.0
        assert pass_at_k(c, n, k) == pytest.approx(products, rel=1e-10)


@pytest.mark.parametrize(("successes", "samples", "k"), [(3, 2, 1), (-1, 2, 1), (1, 2, 3), (1, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(successes: int, samples: int, k: int) -> None:
    with pytest.raises(ValueError, match="between"):
        pass_at_k(successes, samples, k)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.data())
def test_best_of_n_is_the_mean_best_of_all_choices(rewards: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(rewards)))
    expected = mean(max(chosen) for chosen in itertools.combinations(rewards, n))
    assert best_of_n(rewards, n) == pytest.approx(expected, abs=1e-12)


@given(FLAGS, st.data())
def test_best_of_n_successes_is_pass_at_n(flags: list[bool], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(flags)))
    assert best_of_n([float(flag) for flag in flags], n) == pytest.approx(pass_at_k(sum(flags), len(flags), n))


def test_a_majority_votes() -> None:
    assert majority_vote(["7", "8", "7", "9"], [1, 0, 1, 0]) == 1
    assert majority_vote(["7", "8", "8", "9"], [1, 0, 0, 0]) == 0
    assert majority_vote(["7", "8", "7", "8", "9"], [1, 0, 1, 0, 0]) == 0.5  # a draw, drawn
    assert majority_vote(["", "", "", "7"], [0, 0, 0, 1]) == 1  # silence is no vote
    assert majority_vote(["", ""], [0, 0]) == 0
    assert majority_vote(["7", "7"], [1, 0.5]) == 0.75
    with pytest.raises(ValueError, match="2 answers and 1 outcomes"):
        majority_vote(["7", "8"], [1])


def test_pass_at_k_over_tasks() -> None:
    outcomes = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0, 0]]
    found = mean_pass_at_k(outcomes, 2)
    assert found.mean == pytest.approx(mean([1 / 2, 0, 1, 1 - 3 / 10]))
    assert 0 < found.low < found.mean < found.high < 1
    assert mean_pass_at_k([[1], [0], [0]], 1) == mean_over_tasks([[1], [0], [0]])
    with pytest.raises(ValueError, match=r"k must be between 1 and the number of samples, 4, got 5"):
        mean_pass_at_k(outcomes, 5)


# ---------------------------------------------------------------- intervals

# Newcombe 1998, Statistics in Medicine 17, 857-872, table I: method 3 (score).
NEWCOMBE = [
    (81, 263, (0.2553, 0.3662)),
    (15, 148, (0.0624, 0.1605)),
    (0, 20, (0.0, 0.1611)),
    (1, 29, (0.0061, 0.1718)),
]


@pytest.mark.parametrize(("successes", "trials", "score"), NEWCOMBE)
def test_intervals_are_those_of_the_published_table(successes: int, trials: int, score: tuple[float, float]) -> None:
    found, (low, high) = wilson(successes / trials, trials), score
    assert found.mean == pytest.approx(successes / trials)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def exact_coverage(intervals: Sequence[Estimate], rate: float) -> float:
    """How often the interval of so many independent trials holds `rate`: a sum, no simulation."""
    trials = len(intervals) - 1
    chances = (math.comb(trials, x) * rate**x * (1 - rate) ** (trials - x) for x in range(trials + 1))
    return sum(chance for chance, found in zip(chances, intervals, strict=True) if found.low <= rate <= found.high)


@pytest.mark.parametrize(("tasks", "least"), [(50, 0.93), (100, 0.93), (200, 0.94), (500, 0.94)])
def test_coverage_with_one_sample_per_task(tasks: int, least: float) -> None:
    score = [mean_over_tasks([[1.0]] * x + [[0.0]] * (tasks - x)) for x in range(tasks + 1)]
    assert score == [wilson(x / tasks, tasks) for x in range(tasks + 1)]
    assert min(exact_coverage(score, rate) for rate in RATES) >= least


def covered(tasks: int, samples: int, rate: float, alike: float, times: int) -> float:
    generator = np.random.default_rng([tasks, samples, round(100 * rate), round(100 * alike)])
    found = (
        mean_over_tasks(as_outcomes(draw_tasks(generator, rate, tasks, samples, alike), samples)) for _ in range(times)
    )
    return mean(estimate.low <= rate <= estimate.high for estimate in found)


def test_coverage_with_several_samples_per_task() -> None:
    assert 0.93 <= covered(50, 8, 0.1, alike=0.2, times=6_000) <= 0.97
    assert 0.94 <= covered(200, 2, 0.7, alike=0.5, times=2_000) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("tasks", "least"), [(50, 0.93), (200, 0.94)])
@pytest.mark.parametrize(("samples", "alike"), [(2, 0.2), (4, 0.5), (8, 0.2), (8, 0.8)])
def test_coverage_of_clusters(tasks: int, least: float, samples: int, alike: float, rate: float) -> None:
    assert covered(tasks, samples, rate, alike, times=10_000) >= least


def test_an_interval_that_takes_samples_of_a_task_for_independent_is_wrong() -> None:
    generator = np.random.default_rng(0)
    drawn = (draw_tasks(generator, 0.4, 100, 8, alike=0.5).sum() / 800 for _ in range(1000))
    naive = [wilson(share, 800) for share in drawn]
    assert sum(found.low <= 0.4 <= found.high for found in naive) < 750


@given(st.lists(st.booleans(), min_size=2, max_size=30), st.integers(2, 5))
def test_samples_that_are_all_alike_count_once(flags: list[bool], copies: int) -> None:
    one, several = ([[float(flag)] * number for flag in flags] for number in (1, copies))
    single, copied = mean_over_tasks(one), mean_over_tasks(several)
    if len(set(flags)) > 1:
        assert (copied.low, copied.high) == (pytest.approx(single.low), pytest.approx(single.high))


def test_samples_that_differ_as_if_independent_all_count() -> None:
    assert mean_over_tasks([[1, 0, 0, 1]] * 25) == wilson(0.5, 100)


@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_of_few_tasks_samples_do_not_count(tasks: int) -> None:
    assert mean_over_tasks([[1, 0] * 500] * tasks) == wilson(0.5, tasks)


def test_tasks_may_have_lost_samples() -> None:
    found = mean_over_tasks([[1, 1, 0], [0], [1, 0]])
    assert found.mean == pytest.approx(3 / 6)
    assert 0 < found.low < 0.5 < found.high < 1


@given(st.lists(FLAGS, min_size=1, max_size=12))
def test_an_interval_holds_its_mean(tasks: list[list[bool]]) -> None:
    outcomes = [[float(flag) for flag in flags] for flags in tasks]
    found = mean_over_tasks(outcomes)
    assert found.mean == pytest.approx(mean(itertools.chain(*outcomes)))
    assert 0 <= found.low <= found.mean <= found.high <= 1


def test_what_no_interval_can_be_made_of() -> None:
    for outcomes, message in [([], "at least one task"), ([[1], []], "task 1 has no samples"), ([[2]], r"in \[0, 1\]")]:
        with pytest.raises(ValueError, match=message):
            mean_over_tasks(outcomes)
    with pytest.raises(ValueError, match=r"mean of 1\.5"):
        wilson(1.5, 10)
    with pytest.raises(ValueError, match="at least one outcome, got 0"):
        wilson(0, 0)


# ---------------------------------------------------------------- two policies


def test_darwins_maize() -> None:
    """Fisher, The Design of Experiments (1935), section 21: of 32,768 choices of signs, 863 reach 314."""
    differences = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert sum(differences) == 314
    assert sign_flip_test(differences) == pytest.approx(2 * 863 / 2**15, abs=1e-12)
    assert sign_flip_test([value / 8 for value in differences]) == pytest.approx(2 * 863 / 2**15, abs=1e-12)


def test_one_sample_per_task_is_mcnemars_exact_test() -> None:
    before = [[1.0]] * 30 + [[0.0]] * 12 + [[1.0]] * 2 + [[0.0]] * 6  # 12 gained, 2 lost
    after = [[1.0]] * 30 + [[1.0]] * 12 + [[0.0]] * 2 + [[0.0]] * 6
    found = compare(before, after)
    assert found.p_value == pytest.approx(2 * sum(math.comb(14, lost) for lost in range(3)) / 2**14, abs=1e-12)
    assert found.difference.mean == pytest.approx(10 / 50)
    assert 0 < found.difference.low < 0.2 < found.difference.high


@given(st.lists(st.fractions(-1, 1, max_denominator=6), min_size=1, max_size=9))
def test_the_flips_are_all_counted(differences: list[float]) -> None:
    values = [float(value) for value in differences]
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product([1, -1], repeat=len(values))
    ]
    assert sign_flip_test(values) == pytest.approx(mean(found >= abs(sum(values)) - 1e-9 for found in sums))


def test_differences_of_any_size_are_drawn() -> None:
    values = np.random.default_rng(1).normal(0.1, 1.0, 14)
    sums = np.abs(np.array(list(itertools.product([1, -1], repeat=14))) @ values)
    exact = float((sums >= abs(values.sum()) - 1e-9).mean())
    assert 0.01 < exact < 0.99
    assert abs(sign_flip_test(values) - exact) < 4 * math.sqrt(exact * (1 - exact) / 20_000)
    assert sign_flip_test(values) == sign_flip_test(values)
    assert sign_flip_test([1e-7, 0.5]) == pytest.approx(0.5, abs=0.02)


def test_equal_policies_do_not_differ() -> None:
    outcomes = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    found = compare(outcomes, outcomes)
    assert (found.p_value, found.difference.mean) == (1.0, 0.0)
    assert found.difference.low <= 0 <= found.difference.high
    with pytest.raises(ValueError, match="the same tasks, got 3 and 2"):
        compare(outcomes, outcomes[:2])


@pytest.mark.parametrize(("tasks", "samples", "least"), [(50, 1, 0.02), (50, 4, 0.03), (200, 4, 0.04), (200, 1, 0.025)])
def test_equal_policies_are_told_apart_no_more_often_than_claimed(tasks: int, samples: int, least: float) -> None:
    """Nominal: 5 %. Sums of few distinct values cannot reach it exactly, and then stay below."""
    generator = np.random.default_rng([tasks, samples])
    times, found = 2_500, 0
    for _ in range(times):
        chances = generator.beta(1, 1.5, tasks)
        first, second = (generator.binomial(samples, chances) / samples for _ in range(2))
        found += sign_flip_test(second - first) <= 0.05
    assert least <= found / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


@pytest.mark.parametrize(("tasks", "samples"), [(50, 1), (50, 4), (200, 2)])
def test_the_interval_of_a_difference_holds_it_as_often_as_claimed(tasks: int, samples: int) -> None:
    generator = np.random.default_rng([tasks, samples])
    times, found = 1_500, 0
    for _ in range(times):
        before = generator.beta(2, 3, tasks)  # 0.4 on average; the other solves half of what is left: 0.7
        drawn = (generator.binomial(samples, chances) for chances in (before, (1 + before) / 2))
        difference = compare(*(as_outcomes(successes, samples) for successes in drawn)).difference
        found += difference.low <= 0.3 <= difference.high
    assert 0.935 <= found / times <= 0.985


def test_pairing_tells_what_two_intervals_do_not() -> None:
    hard_and_easy = [[0.0] * 4] * 40 + [[1.0] * 4] * 40
    better = [[0.0, 0.0, 0.0, 1.0]] * 12 + hard_and_easy[12:]
    before, after = mean_over_tasks(hard_and_easy), mean_over_tasks(better)
    assert after.low < before.high  # the intervals overlap widely
    found = compare(hard_and_easy, better)
    assert found.p_value == pytest.approx(2 / 2**12)
    assert found.difference.low > 0


def test_an_estimate_reads_well() -> None:
    assert str(wilson(0.5, 100)) == "0.500 (0.404 to 0.596)"


def test_the_example_of_the_documentation() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "results.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    printed: list[str] = []
    exec(code, {"print": lambda value: printed.append(str(value))})
    assert printed == re.findall(r"print.*  # (.*)", code)
