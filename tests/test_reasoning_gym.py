"""Puzzles of reasoning-gym: the same by the same seed, in one split only, graded by the library."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mtgrpo.config.compose import compose, parse
from mtgrpo.errors import ConfigError
from mtgrpo.integrations.reasoning_gym import EXPRESSIONS, LISTS, ReasoningGymTasks, is_expression
from mtgrpo.integrations.reasoning_gym import ReasoningGym as Graded
from mtgrpo.tasks import Split
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

# Small and large, with and without files of their own, settings that depend on the number of questions, numpy's state.
NAMES = ("chain_sum", "gsm_symbolic", "list_functions", "pool_matrix", "spell_backward", "syllogism", "word_ladder")


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)  # where programs of the data set codeio write files
    return pytest.importorskip("reasoning_gym")


def tasks(name: str, count: int = 20, split: Split = Split.train, seed: int = 0, **config: Any) -> list[Task]:
    return list(itertools.islice(ReasoningGymTasks(dataset=name, config=config).stream(split, seed), count))


def graded(task: Task, said: str, **settings: Any) -> float:
    turn = Turn([], [], [], [], Finish.STOP, Message("assistant", said))
    return Graded(**settings).reward(Trajectory(task, turns=[turn]))


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_a_function_of_seed_split_and_number(name: str) -> None:
    assert tasks(name) == tasks(name)
    assert tasks(name, seed=1) != tasks(name)
    source = ReasoningGymTasks(dataset=name)
    stream = source.stream(Split.train, 3)
    list(itertools.islice(stream, 12))
    resumed = source.stream(Split.train, 3)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert list(itertools.islice(resumed, 3)) == tasks(name, 15, seed=3)[12:]


@pytest.mark.parametrize("name", NAMES)
def test_no_question_is_in_both_splits(name: str) -> None:
    trained = {task.messages[-1].content for seed in (0, 5) for task in tasks(name, 40, seed=seed)}
    held_out = {task.messages[-1].content for seed in (0, 5) for task in tasks(name, 10, Split.eval, seed)}
    assert trained.isdisjoint(held_out)


def test_the_splits_are_disjoint_where_there_are_few_questions() -> None:
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    trained, held_out = (
        {task.messages[-1].content for task in tasks("chain_sum", 1000, split, **few)} for split in Split
    )
    assert trained.isdisjoint(held_out)
    assert len(trained | held_out) > 190  # of 200: + and - over ten by ten digits
    assert len(held_out) == pytest.approx(40, abs=12)


@pytest.mark.parametrize("name", NAMES)
def test_the_library_accepts_its_own_answers_and_no_others(name: str) -> None:
    for task in tasks(name, 5):
        (message,) = ReasoningGymTasks(dataset=name).demonstration(task, 0) or ()
        assert graded(task, f"I think.\n{message.content}") == pytest.approx(1)
        assert graded(task, f"I think <answer>{task.answer}</answer>.") == pytest.approx(1)
        assert graded(task, "#### nonsense") < 1
        assert graded(task, task.answer) == 0  # nothing says that it is the answer
        assert graded(task, task.answer, require_marker=False) == pytest.approx(1)
        assert graded(task, "", require_marker=False) == 0


@pytest.mark.real
@pytest.mark.timeout(600)
def test_every_data_set_makes_tasks_and_grades_them_without_a_network(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("a data set asks the network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) >= 105
    for name in names:
        source = ReasoningGymTasks(dataset=name)
        (task,) = itertools.islice(source.stream(Split.train, 0), 1)
        assert task.messages[-1].content and 0 <= graded(task, "#### nonsense") < 1, name
        if task.answer:
            assert graded(task, f"#### {task.answer}") >= 0.99, name


def test_what_the_grading_cannot_read_is_worth_nothing(library: Any) -> None:
    (task,) = tasks("prime_factorization", 1)
    with pytest.raises(ValueError, match="nonsense"):
        library.get_score_answer_fn("prime_factorization")("nonsense", task.metadata["entry"])
    assert graded(task, "#### nonsense") == 0


def test_what_takes_too_long_to_grade_is_worth_nothing_and_holds_up_nobody() -> None:
    (task,) = tasks("countdown", 1)
    assert graded(task, "#### exp(exp(exp(20)))", timeout_s=0.5) == 0
    assert Graded.cpu_heavy and Graded().works_unopened
    with pytest.raises(ConfigError, match="`timeout_s` must be > 0"):
        Graded(timeout_s=0)


def test_a_grading_that_takes_any_text_is_not_asked(library: Any) -> None:
    for task in tasks("game_of_life_halting", 6):
        other = {"True": "False", "False": "True"}[task.answer]
        assert [graded(task, f"#### {said}") for said in (task.answer.lower(), other, "nonsense")] == [1, 0, 0]


RUNS_CODE = "__import__('pathlib').Path('ran').write_text('x')"


def test_the_data_sets_that_run_answers_are_known_and_run_none(library: Any) -> None:
    """Whichever data set hands the answer to Python's eval, itself or through sympy, gets what is no code."""
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    running = re.compile(r"\b(eval|exec|sympify|parse_expr)\((user_)?answer")
    found = {name for name, (cls, _) in DATASETS.items() if running.search(inspect.getsource(cls.score_answer))}
    assert found == LISTS | EXPRESSIONS
    for name in sorted(found):
        (task,) = tasks(name, 1)
        for said in (RUNS_CODE, f"[{RUNS_CODE}]", f"24 + 0 * {RUNS_CODE}", f"x if {RUNS_CODE} else x"):
            assert graded(task, f"#### {said}") < 0.1, (name, said)
        if task.answer:
            assert graded(task, f"#### {task.answer}") == pytest.approx(1), name
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "text", ["(1 + 2) * -3 / 4.5", "x**3/3 + C", "sin(2*x)*exp(-x) + pi", "x**(1/2)", "4*x**2*y - 7"]
)
def test_expressions_are_known(text: str) -> None:
    assert is_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "9**9**9", "2**1000", "((9**99)**99)**99", "x.y", "f(x)", "eval(x)", "x[0]", "lambda: 1", "'x'", "x; y"),
        *(
            "\uff45val(x)",
            "sin(x, evaluate=x)",
            "x\nimport os",
            "(" * 500,
            "1+" * 500 + "1",
            "1 # x",
            "10**x**y",
            "x == 1",
        ),
    ],
)
def test_what_is_no_arithmetic_is_no_expression(text: str) -> None:
    assert not is_expression(text)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("chain_sums", {}, r"task\.dataset='chain_sums' is no data set .* chain_sum,"),
        ("", {}, "task.dataset='' is no data set"),
        ("chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
        ("chain_sum", {"terms": 9}, "unexpected keyword argument 'terms'"),
        ("chain_sum", {"seed": 9}, "multiple values for keyword argument 'seed'"),
        ("composite", {"datasets": [{"name": "countdown", "weight": 1, "config": {}}]}, "does not suit"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReasoningGymTasks(dataset=name, config=config).stream(Split.train, 0)


def test_too_few_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"none of 100 questions is for split .* too few different ones"):
        for split in Split:
            tasks("count_primes", 1, split, min_n=5, max_n=5)


def test_tasks_of_others_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"other/1 has no `entry` .* task=reasoning_gym"):
        graded(Task("other/1", (Message("user", "?"),), "1"), "#### 1")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'mtgrpo\[reasoning-gym\]'"):
        ReasoningGymTasks(dataset="leg_counting").stream(Split.train, 0)


def test_a_config_can_be_given_on_the_command_line() -> None:
    words = ["task=reasoning_gym", "reward=reasoning_gym", "task.dataset=chain_sum", "task.config={max_terms: 2}"]
    experiment = compose(parse([*words, "sft.steps=0"])).experiment
    (task,) = itertools.islice(experiment.task.stream(Split.train, 0), 1)
    assert task.metadata["config"] == {"max_terms": 2}
    assert experiment.reward.reward(Trajectory(task)) == 0
