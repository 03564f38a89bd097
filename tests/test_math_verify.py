"""Mathematics that is compared in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext
from mtgrpo.rewards import math_verify as module
from mtgrpo.rewards import opened, scores
from mtgrpo.rewards.math_verify import MathVerify
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

pytest.importorskip("math_verify")


def said(text: str, answer: str) -> Trajectory:
    task = Task("task/1", (Message("user", "?"),), answer)
    return Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))])


RIGHT = [
    (r"so \boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    ("The answer is $x = 5$.", "5"),
    ("First 3, then 72.", "72"),
    ("It costs $3 a day, or $21.\n#### 72", "72"),
    ("#### $1,200", "1200"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{1,200}", "1200"),
    (r"$\{3, 1, 2\}$", r"\{1,2,3\}"),
    (r"\boxed{\text{even}}", r"\text{even}"),
    (r"\boxed{3}", r"The sum is $\boxed{3}$"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{[0, 1)}", "[0,1)"),
    (r"\boxed{18.90}", r"\$18.90"),
    (r"#### \sqrt{3} \text{ cm}", r"\sqrt{3}"),
    ("#### (3, 4)", "(3,4)"),
    ("#### **5**\n\nI checked 7 cases.", "5"),
    ("#### The answer is 5", "5"),
    (r"#### \boxed{5}", "5"),
    (r"\boxed{1 200}", "1 200"),
    ("#### Final Answer\n\n$$\\boxed{72}$$", "72"),
    ("#### Final answer:\n72", "72"),
    ("#### Step 3: Conclusion\nSo the answer is \\boxed{5}.", "5"),
    ("The answer is \\boxed{5}.\n\n#### Note\nThis holds for n=3.", "5"),
    *((f"\\boxed{{60{sign}}}", f"60{of}") for sign in ("", "%", "\\%") for of in ("", "%", "\\%")),
    ("#### 18%", "18"),
    ("#### 60%", "0.6"),
    ("#### 0.333333", "1/3"),
    ("#### x = 0.666667", r"\frac{2}{3}"),
    ("#### 12 hundred-dollar bills", "12"),
    ("Tom has 3 apples.\n<answer>5</answer>", "5"),
    ("Tom has 2 apples; the rest is `5`", "5"),
    (r"\boxed{10~\text{cm}}", "10"),
    ("#### \u22127", "-7"),
    ("The answer is \u22127.", "-7"),
    ("#### -$7", "-7"),
    ("#### 1 1/2", "1.5"),
    *((f"#### {line}", "5") for line in ("5 N", "5 m/s", "5 m^2", "5k", "5 (a)", "5;", "5!", "A: 5")),
]
WRONG = [
    (r"\boxed{0.25}", r"\frac{1}{2}"),
    (r"\boxed{71} or 72", "72"),
    ("", "72"),
    ("72 ####", "72"),
    ("no idea", "72"),
    (r"\boxed{(x+1)^2}", "x^2+1"),
    (r"\boxed{[0, 1]}", "[0,1)"),
    (r"\boxed{\text{odd}}", r"\text{even}"),
    (r"\boxed{", "72"),
    ("\x00\ud800", "72"),
    (r"\boxed{13}", r"\$12"),
    ("#### x^2", "2"),
    ("#### (3, 4)", "4"),
    ("#### 5\n\nI checked 7 cases.", "7"),
    ("The answer is \\boxed{5}.\n\n#### Note\nThis holds for n=3.", "3"),
    ("I think it's 3.\n<answer>5</answer>", "3"),
    ("Tom has 2 apples; the rest is `5`", "2"),
    ("#### 1 1/2", "1"),
    *((f"so 3\n#### {line}", "3") for line in ("There is no solution", "x", "twelve")),
]


@pytest.mark.parametrize("text, answer", RIGHT)
def test_equal_expressions_are_right(text: str, answer: str) -> None:
    assert MathVerify().reward(said(text, answer)) == 1


def test_answers_that_are_written_otherwise_are_one_in_a_vote() -> None:
    texts = (r"So \boxed{5}", r"We see $\boxed{5.0}$.", "It is 5", "#### 5")
    assert {MathVerify().answer(said(text, "5")) for text in texts} == {"5"}
    assert {MathVerify().answer(said(text, "")) for text in (r"\boxed{x + 1}", "#### \\boxed{x+1}")} == {"x+1"}
    assert MathVerify().answer(said("", "5")) == ""
    assert len({MathVerify().answer(said(f"It is ${pair}$", "")) for pair in ("(1, 2)", "(3, 2)", "x+2")}) == 3


@pytest.mark.parametrize("text, answer", WRONG)
def test_other_expressions_are_wrong(text: str, answer: str) -> None:
    assert MathVerify().reward(said(text, answer)) == 0


@pytest.mark.parametrize("text", [r"\boxed{9^{9^{9^9}}}", r"\boxed{10^{10^{10}}}", r"\boxed{99999999!}"])
def test_what_takes_too_long_is_worth_nothing_and_the_next_is_compared(text: str) -> None:
    start = time.perf_counter()
    assert MathVerify(timeout_s=0.5).reward(said(text, "72")) == 0
    assert MathVerify().reward(said("72", "72")) == 1
    assert time.perf_counter() - start < 20


def test_a_huge_message_is_compared_or_given_up() -> None:
    for unit in ("$", r"\boxed{", "1+", "(", r"\frac{1}{", "72 "):
        assert MathVerify(timeout_s=1).reward(said(unit * 5_000 + " 71", "72")) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_others_end_is_an_error(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_verdict", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(RuntimeError, match=f"ended with code -{number.value}"):
        MathVerify().reward(said("72", "72"))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_message_that_the_process_dies_of_is_worth_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_verdict", lambda *_: os.kill(os.getpid(), number))
    assert MathVerify().reward(said("72", "72")) == 0


def test_what_fails_in_another_way_is_never_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_verdict", lambda *_: 1 // 0)
    with pytest.raises(RuntimeError, match="ended with code 0"):
        MathVerify().reward(said("72", "72"))


def test_what_is_imported_does_not_count() -> None:
    module._library.cache_clear()
    assert MathVerify(timeout_s=0.1).reward(said("72", "72")) == 1


def test_the_event_loop_goes_on_meanwhile(tmp_path: Path) -> None:
    async def run() -> tuple[list[float], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        async with opened(MathVerify(timeout_s=1), RunContext(tmp_path, print, {})) as reward:
            await scores(reward, [said("72", "72")])  # the processes start
            ticking = asyncio.create_task(tick())
            found = await scores(reward, [said(r"\boxed{9^{9^{9^9}}}", "72"), said("72", "72")])
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
        return [getattr(one, "total", -1.0) for one in found], ticks

    found, ticks = asyncio.run(run())
    assert found == [0, 1]
    assert ticks > 30


@pytest.mark.parametrize("answer", ["", "  "])
def test_a_task_without_a_formula_is_refused(answer: str) -> None:
    with pytest.raises(ConfigError, match=r"task/1.*neither a number nor a formula.*reward=em"):
        MathVerify().reward(said("72", answer))


def test_settings_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="`timeout_s` must be > 0, got 0"):
        MathVerify(timeout_s=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'mtgrpo\[math\]'"):
        MathVerify()


@pytest.mark.real
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_an_answer_of_gsm8k_is_right_about_itself_and_wrong_about_the_next(every: int, data_folder: Path) -> None:
    rows = [json.loads(line) for line in (data_folder / "gsm8k" / "test.jsonl").read_text().splitlines()[::every]]
    solutions = [row["answer"] for row in rows]
    answers = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert all(MathVerify().reward(said(text, answer)) == 1 for text, answer in zip(solutions, answers, strict=True))
    numbers = [float(answer.replace(",", "")) for answer in answers]
    following = [(solutions[at], answers[at - 1]) for at in range(len(rows)) if numbers[at] != numbers[at - 1]]
    assert len(following) > 1200 / every
    assert [pair for pair in following if MathVerify().reward(said(*pair)) != 0] == []
