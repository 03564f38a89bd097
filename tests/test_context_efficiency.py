"""The reward for short contexts: lengths count among right answers only, and never as much as being right."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.config.compose import compose, parse
from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.rewards.context_efficiency import ContextEfficiency, Domain, Form, FormatRules
from mtgrpo.rewards.exact_match import ExactMatch
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.types import Finish, Message, Status, Task, Trajectory, Turn

MATH = ContextEfficiency(domain=Domain.math)
PLAIN = ContextEfficiency(domain=Domain.math, form=Form.plain)
CODING = ContextEfficiency(domain=Domain.coding)
RIGHT, WRONG = "#### 72", "#### 71"


def turn(context: int, output: int, text: str = "", extends: bool = False, auxiliary: bool = False) -> Turn:
    said = Message("assistant", text)
    return Turn(
        [1] * context, [2] * output, [0.0] * output, [0] * output, Finish.STOP, said, extends, auxiliary=auxiliary
    )


def told(text: str, tokens: int = 2, answer: str = "72", metadata: Mapping[str, Any] | None = None) -> Trajectory:
    task = Task("task/1", (Message("user", "?"),), answer, metadata or {})
    return Trajectory(task, turns=[turn(tokens - 1, 1, text)])


def ended(right: bool, tokens: int) -> Trajectory:
    return told(RIGHT if right else WRONG, tokens)


def advantages(reward: Reward, siblings: Sequence[Trajectory], divide_by_std: bool = False) -> list[float]:
    returns = torch.tensor(reward.rewards(siblings), dtype=torch.float64)
    baseline = GRPO(divide_by_std=divide_by_std).baseline(returns, torch.zeros(len(returns), dtype=torch.int64))
    return ((returns - baseline.centre) / baseline.scale).tolist()


ENDS = st.tuples(st.booleans(), st.integers(2, 300))
BONUSES = st.floats(0.001, 0.499)


def test_bounded_by_hand() -> None:
    siblings = [ended(True, 100), ended(True, 200), ended(False, 10), ended(True, 400)]
    assert MATH.rewards(siblings) == pytest.approx([0.95, 0.875, 0.0, 0.8375])
    all_right = [ended(True, 100), ended(True, 200)]
    assert ContextEfficiency(domain=Domain.math, bonus=0.4).rewards(all_right) == pytest.approx([1.0, 0.8])


def test_plain_by_hand() -> None:
    siblings = [ended(True, 100), ended(True, 200), ended(False, 10), ended(True, 400)]
    assert PLAIN.rewards(siblings) == pytest.approx([0.01, 0.005, 0.0, 0.0025])


def test_a_single_right_answer_has_its_share_of_the_bonus_whatever_its_length() -> None:
    for tokens in (10, 1000):
        rewards = MATH.rewards([ended(False, 5), ended(True, tokens), ended(False, 500), ended(False, 50)])
        assert rewards == pytest.approx([0.0, 0.85, 0.0, 0.0])
    assert MATH.reward(ended(True, 50)) == MATH.rewards([ended(True, 50)])[0] == 1.0


def test_the_longest_turn_counts_and_condensing_pays() -> None:
    task = Task("task/1", (), "72")
    whole = Trajectory(task, turns=[turn(40, 10), turn(40, 10, RIGHT, extends=True)])
    condensed = Trajectory(task, turns=[turn(40, 10), turn(30, 10, RIGHT)])
    assert PLAIN.rewards([whole, condensed]) == [1 / 100, 1 / 50]
    assert MATH.rewards([whole, condensed]) == pytest.approx([0.9, 1.0])
    condensed.turns.insert(1, turn(40, 10, "what matters", extends=True, auxiliary=True))
    assert PLAIN.reward(condensed) == 1 / 100


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans()), max_size=8))
def test_longest_context_tokens_is_that_of_the_contexts_themselves(drawn: list[tuple[int, int, bool]]) -> None:
    turns = [turn(context, output, extends=extends and i > 0) for i, (context, output, extends) in enumerate(drawn)]
    trajectory = Trajectory(Task("task/1", ()), turns=turns)
    slow = max((len(trajectory.context(i)) + len(one.output) for i, one in enumerate(turns)), default=0)
    assert trajectory.longest_context_tokens == slow


@given(st.lists(ENDS, min_size=1, max_size=8), st.sampled_from(Form))
def test_wrong_answers_are_worth_nothing_and_right_ones_are_successes(ends: list[tuple[bool, int]], form: Form) -> None:
    reward = ContextEfficiency(domain=Domain.math, form=form)
    for (right, _), worth in zip(ends, reward.rewards([ended(*end) for end in ends]), strict=True):
        assert (worth >= reward.success_at) == right
        assert right or worth == 0


@given(st.lists(ENDS, min_size=1, max_size=8), BONUSES)
def test_right_answers_lie_in_a_range_narrower_than_what_being_right_is_worth(
    ends: list[tuple[bool, int]], bonus: float
) -> None:
    reward = ContextEfficiency(domain=Domain.math, bonus=bonus)
    rewards = reward.rewards([ended(*end) for end in ends])
    worths = [worth for (right, _), worth in zip(ends, rewards, strict=True) if right]
    pass_rate = len(worths) / len(ends)
    assert all(1 - bonus < worth <= 1 - bonus + bonus * pass_rate + 1e-12 for worth in worths)
    assert not worths or max(worths) == pytest.approx(1 - bonus + bonus * pass_rate)
    assert not worths or max(worths) - min(worths) < bonus < 1 - bonus


@given(st.lists(ENDS, min_size=2, max_size=8), st.sampled_from(Form), st.randoms(use_true_random=False))
def test_shorter_right_answers_are_never_worth_less_and_order_does_not_matter(
    ends: list[tuple[bool, int]], form: Form, rng: random.Random
) -> None:
    reward = ContextEfficiency(domain=Domain.math, form=form)
    rewards = reward.rewards([ended(*end) for end in ends])
    right = sorted((tokens, worth) for (right, tokens), worth in zip(ends, rewards, strict=True) if right)
    for (shorter, better), (longer, worse) in itertools.pairwise(right):
        assert better > worse if shorter < longer else better == worse
    order = rng.sample(range(len(ends)), len(ends))
    assert reward.rewards([ended(*ends[i]) for i in order]) == [rewards[i] for i in order]


@given(st.lists(ENDS, min_size=1, max_size=7), BONUSES, st.integers(2, 300), st.integers(2, 300), st.integers(2, 300))
def test_what_length_and_being_right_move_an_advantage_by(
    others: list[tuple[bool, int]], bonus: float, long: int, short: int, early: int
) -> None:
    """The bounds of the docstring, with all that a trajectory changes of its siblings' rewards."""
    reward = ContextEfficiency(domain=Domain.math, bonus=bonus)
    n = len(others) + 1

    def advantage(right: bool, tokens: int) -> float:
        return advantages(reward, [ended(right, tokens), *(ended(*end) for end in others)])[0]

    being_right = advantage(True, long) - advantage(False, early)
    assert being_right > (1 - bonus - bonus / n) * (1 - 1 / n) - 1e-12 > 0
    assert abs(advantage(True, long) - advantage(True, short)) <= 2 * bonus * (1 - 1 / n) + 1e-12


@given(st.lists(ENDS, min_size=2, max_size=8).filter(lambda ends: len({right for right, _ in ends}) == 2))
def test_in_a_mixed_group_the_early_wrong_answer_has_the_least_advantage(ends: list[tuple[bool, int]]) -> None:
    for reward in (MATH, PLAIN):
        for divide_by_std in (False, True):
            found = list(zip(ends, advantages(reward, [ended(*end) for end in ends], divide_by_std), strict=True))
            wrong = [advantage for (right, _), advantage in found if not right]
            assert max(wrong) < 0
            assert max(wrong) < min(advantage for (right, _), advantage in found if right)


def gain_of_a_short_way(right_rate: float, divide_by_std: bool) -> float:
    """The expected advantage of one that answers early, right at that rate, among siblings that are right and long."""
    others = [ended(True, 1000)] * 7
    right, wrong = (advantages(MATH, [ended(r, 10), *others], divide_by_std)[0] for r in (True, False))
    return right_rate * right + (1 - right_rate) * wrong


def test_a_short_way_that_is_often_wrong_pays_only_where_differences_are_stretched() -> None:
    assert gain_of_a_short_way(0.8, divide_by_std=False) < 0
    assert gain_of_a_short_way(1.0, divide_by_std=False) > 0
    assert gain_of_a_short_way(0.55, divide_by_std=True) > 0


@pytest.mark.parametrize("right_rate, share", [(0.75, 0.05), (0.75, 0.5), (0.75, 0.95), (0.5, 0.5)])
def test_risk_for_shortness_never_pays_whatever_others_do(right_rate: float, share: float) -> None:
    """A way that is right less than 1 - bonus of the time, taken by a share of siblings, against a sure long one."""
    kinds = [(True, 1000), (True, 20), (False, 20)]
    weights = [1 - share, share * right_rate, share * (1 - right_rate)]
    sure = risky = 0.0
    for others in itertools.product(range(3), repeat=3):
        chance = math.prod(weights[kind] for kind in others)
        siblings = [ended(*kinds[kind]) for kind in others]
        each = [advantages(MATH, [ended(*kind), *siblings])[0] for kind in kinds]
        sure += chance * each[0]
        risky += chance * (right_rate * each[1] + (1 - right_rate) * each[2])
    assert risky < sure


ACTIONS = {
    "right long": (True, 800),
    "right short": (True, 200),
    "wrong short": (False, 50),
    "wrong long": (False, 800),
}


def trained(reward: Reward, start: Mapping[str, float], steps: int = 1500) -> list[dict[str, float]]:
    """The probabilities of the actions under the exact expected policy gradient, step by step; groups of 4."""
    groups = list(itertools.product(range(len(ACTIONS)), repeat=4))
    ends = [ended(*end) for end in ACTIONS.values()]
    moved = torch.zeros(len(groups), len(ACTIONS), dtype=torch.float64)  # the sum of advantages of each action
    for row, group in zip(moved, groups, strict=True):
        row.index_add_(0, torch.tensor(group), torch.tensor(advantages(reward, [ends[a] for a in group])).double())
    logits = torch.tensor([start[name] for name in ACTIONS], dtype=torch.float64).log()
    history: list[dict[str, float]] = []
    for _ in range(steps):
        policy = logits.softmax(0)
        history.append(dict(zip(ACTIONS, policy.tolist(), strict=True)))
        logits = logits + policy[torch.tensor(groups)].prod(1) @ moved
    return history


def test_the_context_reward_shortens_contexts_at_equal_success() -> None:
    start = {"right long": 0.45, "right short": 0.05, "wrong short": 0.45, "wrong long": 0.05}
    history = trained(MATH, start)
    assert history[-1]["right short"] > 0.95
    assert max(step["wrong short"] for step in history) <= start["wrong short"]
    assert history[-1]["wrong short"] < 0.02


def test_only_the_context_reward_minds_the_length() -> None:
    even = dict.fromkeys(ACTIONS, 0.25)
    indifferent, shortened = trained(Numeric(), even)[-1], trained(MATH, even)[-1]
    assert indifferent["right long"] == pytest.approx(indifferent["right short"]) == pytest.approx(0.5, abs=0.02)
    assert shortened["right short"] > 0.95


@pytest.mark.parametrize("bonus", [-0.1, 0.0, 0.5, 1.0, math.nan])
def test_the_bonus_has_bounds(bonus: float) -> None:
    with pytest.raises(ConfigError, match=r"reward\.bonus must be above 0 and below 0\.5"):
        ContextEfficiency(bonus=bonus)


@pytest.mark.parametrize("text", ["#### 72", "72", "The Paris.", "paris", r"\boxed{72.0}", "", "#### 1"])
@pytest.mark.parametrize("answer", ["72", "Paris"])
def test_domains_grade_as_the_rewards_that_they_name(text: str, answer: str) -> None:
    trajectory = told(text, answer=answer)
    assert ContextEfficiency().reward(trajectory) == ExactMatch().reward(trajectory)
    if answer == "72":
        assert MATH.reward(trajectory) == Numeric().reward(trajectory)
    else:
        with pytest.raises(ConfigError, match="'Paris' is not a number"):
            MATH.reward(trajectory)


def test_general_accepts_any_of_the_answers() -> None:
    trajectory = told("Roma", answer="", metadata={"answers": ["Rome", "Roma"]})
    assert ContextEfficiency().reward(trajectory) == 1.0


def test_a_truncated_trajectory_is_graded_by_its_final_message() -> None:
    truncated = dataclasses.replace(ended(True, 10), status=Status.TRUNCATED, reason="max_turns")
    assert MATH.reward(truncated) == Numeric().reward(truncated) == 1.0


SAME_CODE = [
    ("```python\ndef f(x):\n    return x + 1\n```", "def f(x): return x+1"),
    ("```\nx = 1  # one\n```", "x = (1)\n"),
    ("```\nx = 2\n```\nno, rather\n```py\nx = 1\n```\nDone.", "x = 1"),
    ("~~~~\nx = 1\n~~~~", "```\nx = 1\n```"),
    ("1. so:\n   ```python\n   x = 1\n   ```", "x = 1"),
    ("````\n```\nx = 1\n```\n````", "````\n```\nx = 1\n```\n````"),
    ("```c\nint x;  \nint y;\n\n```", "int x;\nint y;"),
    ("```python\r\nx = 1\r\n```\r\n", "x = 1"),
    ("```\n'\\d'\n```", r"'\d'"),
    ('```\nx = """\n```py\n"""\n```', 'x = """\n```py\n"""'),
]
OTHER_CODE = [
    ("```\nx = 2\n```", "x = 1"),
    ("```\ny = 1\n```", "x = 1"),
    ("x = 1", "x = 1"),
    ("```\nx = 1", "x = 1"),
    ("```x = 1```", "x = 1"),
    ("```\nx = 1\n```\n```\nx = 2\n```", "x = 1"),
    ("```\nint x;\n```", "int  x;"),
    ("```\nint x;\n```", "x = 1"),
    ("```\nraise SystemExit\n```", "x = 1"),
    ("", "x = 1"),
    ("```\n```", "x = 1"),
    ("```\nx = 1\n~~~", "x = 1"),
    ("````\nx = 1\n```", "x = 1"),
]


@pytest.mark.parametrize("text, answer, worth", [(*c, 1.0) for c in SAME_CODE] + [(*c, 0.0) for c in OTHER_CODE])
def test_code_is_compared_as_a_syntax_tree(text: str, answer: str, worth: float) -> None:
    assert CODING.reward(told(text, answer=answer)) == worth


@pytest.mark.parametrize("unit", ["(", "-", "1+", "a.", "[", "f(", "not ", "lambda:", "\x00", "\ud800", "```x\n"])
@pytest.mark.parametrize("count", [1, 100, 20_000])
def test_no_code_is_too_odd(unit: str, count: int) -> None:
    assert CODING.reward(told(f"```\n{unit * count}1\n```", answer="x = 1")) == 0.0


def test_code_is_never_run(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    assert CODING.reward(told(f"```\n{code}\n```", answer=code)) == 1.0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "rules, text, kept",
    [
        ({}, "", True),
        ({"min_chars": 8}, "#### 72", False),
        ({"min_chars": 7}, "#### 72", True),
        ({"required_patterns": ["####", r"\d$"]}, "#### 72", True),
        ({"required_patterns": ["####", r"\d$"]}, "#### 72.", False),
        ({"forbidden_patterns": ["(?i)sorry"]}, "Sorry", False),
        ({"forbidden_patterns": ["(?i)sorry"]}, "Gladly", True),
        ({"code_block": True}, "```\nx\n```", True),
        ({"code_block": True}, "```\nx", False),
    ],
)
def test_format_rules(rules: dict[str, Any], text: str, kept: bool) -> None:
    assert FormatRules(**rules).followed(text) is kept


def test_a_right_answer_in_a_wrong_form_is_worth_nothing_and_sets_no_measure() -> None:
    reward = dataclasses.replace(MATH, format_rules=FormatRules(forbidden_patterns=["#### 72,"]))
    siblings = [told("#### 72, sir", 5), ended(True, 100), ended(True, 200), ended(False, 100)]
    assert reward.rewards(siblings) == pytest.approx([0.0, 0.9, 0.85, 0.0])


def test_format_rules_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match=r"min_chars must be >= 0, got -1"):
        FormatRules(min_chars=-1)
    for name in ("required_patterns", "forbidden_patterns"):
        with pytest.raises(ConfigError, match=rf"reward\.format_rules\.{name}: '\[' is not a regular expression"):
            dataclasses.replace(FormatRules(), **{name: ["ok", "["]})


def answers(folder: Path, *lines: str) -> str:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_answers_of_a_file_take_precedence(tmp_path: Path) -> None:
    name = answers(tmp_path, '{"id": "task/1", "answer": "Rome"}', "", '{"id": 2, "answer": 0.5}', "")
    reward = ContextEfficiency(ground_truth_file=name)
    assert reward.reward(told("Rome", answer="Paris", metadata={"answers": ["Paris", "Lutetia"]})) == 1.0
    assert reward.reward(told("Lutetia", answer="Paris", metadata={"answers": ["Paris", "Lutetia"]})) == 0.0
    second = told("#### 1/2", answer="")
    second.task = dataclasses.replace(second.task, id="2")
    assert ContextEfficiency(domain=Domain.math, ground_truth_file=name).reward(second) == 1.0
    other = told("Paris", answer="Paris")
    other.task = dataclasses.replace(other.task, id="task/3")
    assert reward.reward(other) == 1.0


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", r"line 2: not valid JSON"),
        ("[1]", r"line 2: a line must be"),
        ('{"id": "b"}', r"line 2: a line must be"),
        ('{"id": "b", "answer": null}', r"line 2: a line must be"),
        ('{"id": "b", "answer": " "}', r"line 2: a line must be"),
        ('{"id": true, "answer": "1"}', r"line 2: a line must be"),
        ('{"id": "a", "answer": "2"}', r"line 2: there is a line for id 'a' already"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_played(line: str, said: str, tmp_path: Path) -> None:
    name = answers(tmp_path, '{"id": "a", "answer": "1"}', line)
    with pytest.raises(ConfigError, match=rf"answers\.jsonl, {said}"):
        ContextEfficiency(ground_truth_file=name)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.ground_truth_file=.*missing\.jsonl cannot be read"):
        ContextEfficiency(ground_truth_file=str(tmp_path / "missing.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.jsonl cannot be read"):
        ContextEfficiency(ground_truth_file=str(tmp_path / "binary.jsonl"))


def test_a_task_without_an_answer_is_refused(tmp_path: Path) -> None:
    name = answers(tmp_path, '{"id": "a", "answer": "1"}')
    with pytest.raises(ConfigError, match=r"task task/1 has no answer and reward\.ground_truth_file=.*answers\.jsonl"):
        ContextEfficiency(ground_truth_file=name).reward(told("x", answer=""))
    for domain in Domain:
        with pytest.raises(ConfigError, match=r"task task/1 has no answer; choose"):
            ContextEfficiency(domain=domain).reward(told("x", answer=""))


@pytest.mark.parametrize(
    "domain, text, worth",
    [
        (Domain.general, "#### anything", 1.0),
        (Domain.general, r"\boxed{x}", 1.0),
        (Domain.general, "anything", 0.0),
        (Domain.math, "#### 3", 1.0),
        (Domain.math, r"\boxed{3}", 1.0),
        (Domain.math, "#### anything", 0.0),
        (Domain.math, "3", 0.0),
        (Domain.coding, "```\nx = 1\n```", 1.0),
        (Domain.coding, "x = 1", 0.0),
    ],
)
def test_the_heuristic_grades_only_what_has_no_answer(domain: Domain, text: str, worth: float) -> None:
    reward = ContextEfficiency(domain=domain, heuristic=True)
    assert reward.reward(told(text, answer="")) == worth
    assert reward.reward(told(text, answer="72")) == 0.0


def test_notices() -> None:
    assert MATH.note(divide_by_std=False) == ""
    assert "set algorithm.divide_by_std=false" in MATH.note(divide_by_std=True)
    assert "drown" in PLAIN.note(divide_by_std=False)
    assert "unit variance" in PLAIN.note(divide_by_std=True)
    assert "reward.heuristic=true" in ContextEfficiency(heuristic=True).note(divide_by_std=False)
    assert Numeric().note(divide_by_std=True) == ""


def test_it_is_an_option_of_the_command_line(tmp_path: Path) -> None:
    words = ["reward=context_efficiency", "reward.domain=math", "reward.form=plain", "reward.format_rules.min_chars=3"]
    reward = compose(parse([*words, r"reward.format_rules.required_patterns=['\d+']"])).experiment.reward
    rules = FormatRules(min_chars=3, required_patterns=[r"\d+"])
    assert reward == dataclasses.replace(PLAIN, format_rules=rules)
    for word, said in {
        "reward.bonus=0.7": r"reward\.bonus must be",
        "reward.format_rules.forbidden_patterns=['(']": r"forbidden_patterns: '\(' is not",
        "reward.domain=poetry": r"expected one of general, math, coding",
        f"reward.ground_truth_file={tmp_path}/none.jsonl": r"none\.jsonl cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=said):
            compose(parse([*words, word]))
