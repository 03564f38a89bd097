"""What an evaluation may claim: pass@k, best-of-n, majority vote, intervals, and the comparison of two policies.

Outcomes come by task: `outcomes[i]` are those of the samples of task i, e.g. 1.0 for a success and 0.0 for a failure.
Samples of one task are alike, so tasks are what is independent, and every interval here is one over tasks.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Outcomes = Sequence[Sequence[float]]
_GRID = 1 << 18  # the permutation test is exact where differences sum to so many common divisors at most
_FLIPS = 20_000  # random sign flips beyond that
_CONFIDENCE = 0.95  # of every interval
_FEW = 5  # tasks, of which the variance between them is not known well enough


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much higher the mean of the second policy is, and how likely as much is by chance where both are equal."""

    difference: Estimate
    p_value: float  # two-sided

    def __str__(self) -> str:
        gain, p_value = self.difference, "< 0.0001" if self.p_value < 1e-4 else f"= {self.p_value:.2g}"
        return f"{100 * gain.mean:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f}), p {p_value}"


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples succeeds, without bias, from `samples` of which `successes` did.

    1 - C(samples - successes, k) / C(samples, k), Chen et al. 2021, arXiv:2107.03374. Its mean over tasks is pass@k.
    Raises ValueError where there are fewer than k samples.
    """
    if not 0 <= successes <= samples:
        raise ValueError(f"successes must be between 0 and samples={samples}, got {successes}")
    _check_draws("k", k, samples)
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def best_of_n(rewards: Sequence[float], n: int) -> float:
    """The expected highest reward of n of the samples of one task, without bias: pass@n where rewards are 0 and 1.

    Raises ValueError where there are fewer than n samples.
    """
    _check_draws("n", n, len(rewards))
    ways = math.comb(len(rewards), n)  # of which comb(rank, n - 1) have the sample of that rank as their best
    return sum(reward * math.comb(rank, n - 1) / ways for rank, reward in enumerate(sorted(rewards)))


def majority_vote(answers: Sequence[str], outcomes: Sequence[float]) -> float:
    """What the answer given most often is worth: the mean outcome of those who gave it (maj@k, self-consistency).

    `answers` are final answers in a form in which equal ones are the same text; "" is no answer, and no vote. Answers
    tied for the first place count alike, as if one of them were drawn. 0.0 where nobody answered.
    """
    if len(answers) != len(outcomes):
        raise ValueError(f"every answer needs its outcome, got {len(answers)} answers and {len(outcomes)} outcomes")
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, outcome in zip(answers, outcomes, strict=True):
        votes[answer].append(outcome)
    votes.pop("", None)
    most = max(map(len, votes.values()), default=0)
    first = [sum(of_answer) / most for of_answer in votes.values() if len(of_answer) == most]
    return sum(first) / len(first) if first else 0.0


def wilson(mean: float, size: float) -> Estimate:
    """Wilson's score interval (1927) of a mean of `size` independent outcomes in [0, 1]; `size` may be a fraction.

    Several samples of a task are not independent: `mean_over_tasks` finds their size. The number of tasks is safe, and
    the interval then wide.
    """
    if not 0 <= mean <= 1:
        raise ValueError(f"Wilson's interval is for outcomes in [0, 1], got a mean of {mean}")
    if size <= 0:
        raise ValueError(f"an interval needs at least one outcome, got {size}")
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + (z / (2 * size)) ** 2)
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def mean_over_tasks(outcomes: Outcomes) -> Estimate:
    """The mean over all samples (avg@k) of outcomes in [0, 1], with its interval for samples clustered in tasks.

    The size is the effective one: of independent samples whose mean would vary as much as this one does between
    tasks, between the number of tasks and that of samples. With one sample per task, and of five tasks or fewer, it is
    the number of tasks.
    Raises ValueError for a task without samples or an outcome outside [0, 1].
    """
    means, counts = _by_task(outcomes)
    return _clustered(means, counts, float(counts.sum()))


def mean_pass_at_k(outcomes: Outcomes, k: int) -> Estimate:
    """pass@k over tasks of which each has k samples or more, outcomes 0 or 1, with its interval.

    Raises ValueError for a task with fewer samples.
    """
    _by_task(outcomes)
    values = [pass_at_k(round(sum(of_task)), len(of_task), k) for of_task in outcomes]
    samples = sum(len(of_task) // k for of_task in outcomes)
    return _clustered(np.array(values), np.ones(len(values)), samples)


def compare(before: Outcomes, after: Outcomes) -> Comparison:
    """Two policies on the same tasks in the same order: the difference of their means over tasks, interval, p-value.

    The p-value is `sign_flip_test`'s. The interval puts together Wilson's of both means and their correlation over
    tasks (MOVER: Zou and Donner 2008), and so stays within [-1, 1].
    """
    if len(before) != len(after):
        raise ValueError(f"both policies need the same tasks, got {len(before)} and {len(after)}")
    (first, first_counts), (second, second_counts) = _by_task(before), _by_task(after)
    equal = np.ones(len(first))
    a = _clustered(first, equal, float(first_counts.sum()))
    b = _clustered(second, equal, float(second_counts.sum()))
    spread = float(first.std() * second.std())
    correlation = float(((first - a.mean) * (second - b.mean)).mean()) / spread if spread else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one + other * other - 2 * correlation * one * other))

    difference = b.mean - a.mean
    low = difference - reach(b.mean - b.low, a.high - a.mean)
    high = difference + reach(b.high - b.mean, a.mean - a.low)
    return Comparison(Estimate(difference, max(-1.0, low), min(1.0, high)), sign_flip_test(second - first))


def compare_by_task(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Comparison | None:
    """Two policies by the outcomes of each task, on the tasks that both have; None where there is none."""
    shared = [task for task in before if task in after]
    return compare([before[task] for task in shared], [after[task] for task in shared]) if shared else None


def sign_flip_test(differences: Sequence[float] | Floats) -> float:
    """The two-sided p-value of paired differences, one per task, by permutation.

    Were both policies equal, every difference would be as likely with the other sign; p is the share of all choices of
    signs whose sum is as far from 0 as the one found, or further. All are counted where differences have a common
    divisor, as those of shares do: with one sample per task that is McNemar's exact test. Otherwise 20,000 are drawn,
    always the same. Differences may be of any unit, e.g. of rewards.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if not len(values):
        return 1.0
    multiples = _multiples(values)
    return _random_flips(values) if multiples is None else _all_flips(multiples)


def _multiples(values: Floats) -> NDArray[np.int64] | None:
    """The values in units of their greatest common divisor; None where it is too small to count with."""
    fractions = [Fraction(float(value)).limit_denominator(_GRID) for value in values]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * unit) for fraction in fractions]
    divisor = math.gcd(*whole)
    if not all(whole) or sum(map(abs, whole)) // divisor > _GRID:
        return None
    return np.array([number // divisor for number in whole])


def _all_flips(multiples: NDArray[np.int64]) -> float:
    """The p-value by the distribution of the sum of the differences whose sign is plus."""
    sizes = np.abs(multiples)
    total = int(sizes.sum())
    chances = np.zeros(total + 1)
    chances[0] = 1.0
    for size in sizes:
        chances /= 2
        chances[size:] += chances[:-size].copy()
    sums = np.abs(2 * np.arange(total + 1) - total)
    return min(1.0, float(chances[sums >= abs(int(multiples.sum()))].sum()))


def _random_flips(values: Floats) -> float:
    generator = np.random.default_rng(0)
    least = abs(float(values.sum())) * (1 - 1e-12)
    signs = (generator.integers(0, 2, len(values), dtype=np.int8) * 2 - 1 for _ in range(_FLIPS))
    return (1 + sum(abs(float(values @ chosen)) >= least for chosen in signs)) / (1 + _FLIPS)


def _by_task(outcomes: Outcomes) -> tuple[Floats, Floats]:
    """The mean of each task and the number of its samples."""
    if not outcomes:
        raise ValueError("an interval needs at least one task, got none")
    for number, of_task in enumerate(outcomes):
        if not of_task:
            raise ValueError(f"task {number} has no samples: leave out tasks whose samples all failed")
        if not all(0 <= outcome <= 1 for outcome in of_task):
            raise ValueError(f"outcomes must be in [0, 1], got {list(of_task)} for task {number}")
    counts = np.array([len(of_task) for of_task in outcomes], dtype=np.float64)
    return np.array([sum(of_task) for of_task in outcomes], dtype=np.float64) / counts, counts


def _clustered(means: Floats, weights: Floats, samples: float) -> Estimate:
    """Wilson's interval of the weighted mean of tasks' `means`, at the effective size, at most `samples`."""
    total, tasks = float(weights.sum()), len(means)
    mean = float(weights @ means) / total
    # Were all samples of a task alike: the number of tasks, where they weigh alike.
    least = total**2 / float(weights @ weights)
    variance = float(((weights * (means - mean)) ** 2).sum()) / total**2 * tasks / max(1, tasks - 1)
    # Where all outcomes are the same nothing tells whether samples of a task differ: then tasks are counted.
    size = mean * (1 - mean) / variance if variance else samples if 0 < mean < 1 else least
    size = size if tasks > _FEW else least
    return wilson(mean, min(max(size, least), max(samples, least)))


def _check_draws(name: str, draws: int, samples: int) -> None:
    if not 1 <= draws <= samples:
        raise ValueError(f"{name} must be between 1 and the number of samples, {samples}, got {draws}")
