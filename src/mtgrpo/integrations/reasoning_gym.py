"""Generated puzzles of the package reasoning-gym, about 100 data sets, and what its own grading says."""

import ast
import functools
import json
import random
import string
import sys
from dataclasses import dataclass
from mmap import mmap
from typing import Annotated, Any

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Reach, Text
from mtgrpo.rewards import Reward, required
from mtgrpo.rewards.em import stated_answer
from mtgrpo.rewards.math_verify import MAX_BYTES
from mtgrpo.runtime.isolation import DEATHS, run_forked
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.tasks import Generated, Split, TaskStream, held_out, user
from mtgrpo.types import Message, Task, Trajectory

_EVAL_FRACTION = 0.2
_SIZE = 1000  # questions per seed of the library
_TRIES = 100  # questions that are tried to get one of the wanted split
_MARKER = "####"
_TAKES_ANY_TEXT = {"game_of_life_halting"}  # the library (0.1.25) calls every text right: answers are compared instead
# Data sets whose grading hands the answer to Python's eval: as a list, and as an expression, through sympy.
LISTS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
EXPRESSIONS = {
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
}
_LONGEST, _HIGHEST = 1000, 100  # characters of an expression, and its exponents
_NAMES = {*string.ascii_letters, "pi"}
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"}


@dataclass
class ReasoningGymTasks(Generated):
    """One data set of reasoning-gym, graded by its own rules with reward=reasoning_gym.

    Held out is a fifth of all questions, by a hash of their text: no question is both trained on and evaluated.
    Example: `task=reasoning_gym task.dataset=chain_sum task.config='{max_terms: 3}' reward=reasoning_gym`. The answer
    is expected after `####`, or in <answer></answer>, as in the library: name the form in task.system_prompt.
    """

    dataset: Text = ""  # its name in the library
    config: Annotated[Any, Reach.file] = None  # the data set's own settings: {name: value}

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        _questions(self.dataset, self._config, 0)
        return super().stream(split, seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The library's answer; None for tasks with several right answers, of which it names none."""
        return (Message("assistant", f"#### {task.answer}"),) if task.answer else None

    @property
    def _config(self) -> str:
        return json.dumps(self.config or {}, sort_keys=True)

    def task(self, split: Split, seed: int, index: int) -> Task:
        """The next question that belongs to the split. Raises ConfigError where there are too few."""
        config = self._config
        for number in range(index * _TRIES, (index + 1) * _TRIES):
            entry = _entry(self.dataset, config, seed, number)
            if held_out(entry["question"], _EVAL_FRACTION) is (split is Split.eval):
                return Task(
                    id=f"reasoning_gym/{self.dataset}/{seed}/{split.value}/{index}",
                    messages=self.with_prompt(user(entry["question"])),
                    answer=entry["answer"] or "",
                    metadata={"dataset": self.dataset, "config": json.loads(config), "entry": entry},
                )
        raise ConfigError(
            f"task.dataset={self.dataset} task.config={config}: none of {_TRIES} questions is for split {split.value}; "
            "it has too few different ones: set its config to more"
        )


def _entry(name: str, config: str, seed: int, number: int) -> dict[str, Any]:
    """Question `number` of the endless row of questions that `seed` begins."""
    part, place = divmod(number, _SIZE)
    start = random.Random(f"reasoning_gym/{seed}/{part}").randrange(2**31)
    questions = _questions(name, config, start)
    state = random.getstate()
    random.seed(start + place)  # list_functions draws from the global generator
    try:
        return questions[place]
    finally:
        random.setstate(state)


@functools.lru_cache(maxsize=4)
def _questions(name: str, config: str, seed: int) -> Any:
    """A data set of the library. Raises ConfigError when there is none of that name and those settings."""
    refuse_without_package("reasoning_gym", "task=reasoning_gym")
    import reasoning_gym  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    if name not in DATASETS:
        raise ConfigError(f"task.dataset={name!r} is no data set of reasoning-gym: {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **json.loads(config))
    except Exception as error:  # a data set checks its settings as it likes
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"task.config={config} does not suit task.dataset={name}: {why}") from error


@dataclass
class ReasoningGym(Reward, timeout_s="> 0"):
    """The score, from 0 to 1, that the data set of task=reasoning_gym gives the answer; some give parts of 1.

    The answer is what stands after the last `####` of the final message, else in its last <answer></answer>. What the
    data set's grading cannot read is worth 0. No answer is run: where the library would, it has to be a list of plain
    values, or an expression of numbers, letters and usual functions. It is graded in a process of its own.
    """

    cpu_heavy = True

    timeout_s: float = 5.0  # processor time for one message; one that takes longer is worth 0
    require_marker: bool = True  # false: where there is neither, the whole message is the answer

    @property
    def works_unopened(self) -> bool:
        """A task of another source is refused at the start."""
        return True

    def answer(self, trajectory: Trajectory) -> str:
        _, marker, answer = (text := trajectory.final.strip()).rpartition(_MARKER)
        if not marker:
            answer = stated_answer(text, "answer") or ("" if self.require_marker else text)
        return answer.strip()

    def reward(self, trajectory: Trajectory) -> float:
        """The score. Raises TaskError for tasks of another source."""
        task = trajectory.task
        entry = required(task, "entry", "reasoning_gym", "reasoning_gym")
        if not (answer := self.answer(trajectory)):
            return 0.0
        if task.metadata["dataset"] in _TAKES_ANY_TEXT:
            return float(answer.lower() == task.answer.lower())
        if task.metadata["dataset"] in EXPRESSIONS and not is_expression(answer):
            return 0.0
        grade = _grader(task.metadata["dataset"], json.dumps(task.metadata["config"]))
        score = memoryview(mmap(-1, 8)).cast("d")  # shared with the process

        def write() -> None:  # the library's parsers raise whatever they like at text that is no answer
            score[0] = min(1.0, max(0.0, float(grade(answer, entry))))

        if (code := run_forked(write, self.timeout_s, MAX_BYTES)) not in (0, *DEATHS):
            raise RuntimeError(f"the process that grades ended with code {code}")
        return score[0]


@functools.cache
def _grader(dataset: str, config: str) -> Any:
    questions = _questions(dataset, config, 0)
    if dataset in LISTS:
        vars(sys.modules[type(questions).__module__])["eval"] = ast.literal_eval
    return questions.score_answer


def is_expression(text: str) -> bool:
    """Whether `text` is arithmetic and nothing else, so that sympy, which runs it as code, computes and no more."""
    if len(text) > _LONGEST or not text.isascii() or not text.isprintable() or "#" in text:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _is_arithmetic(tree, powers=2)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_arithmetic(node: ast.expr, powers: int) -> bool:
    """powers: how many may stand within one another."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return not isinstance(number, bool) and abs(number) < 1e15
        case ast.Name(id=name):
            return name in _NAMES
        case ast.UnaryOp(ast.UAdd() | ast.USub(), operand):
            return _is_arithmetic(operand, powers)
        case ast.BinOp(left, ast.Pow(), right):
            return powers > 0 and _is_arithmetic(left, powers - 1) and _is_exponent(right)
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right):
            return _is_arithmetic(left, powers) and _is_arithmetic(right, powers)
        case ast.Call(ast.Name(id=name), [argument], []):
            return name in _FUNCTIONS and _is_arithmetic(argument, powers)
        case _:
            return False


def _is_exponent(node: ast.expr) -> bool:
    """A low number with its sign, a letter, or a fraction of such."""
    match node:
        case ast.BinOp(left, ast.Div(), right):
            return _is_exponent(left) and _is_exponent(right)
        case ast.UnaryOp(ast.UAdd() | ast.USub(), operand):
            return _is_exponent(operand)
        case ast.Constant(value=int() | float() as number) if abs(number) > _HIGHEST:
            return False
        case _:
            return not isinstance(node, ast.BinOp) and _is_arithmetic(node, 0)
