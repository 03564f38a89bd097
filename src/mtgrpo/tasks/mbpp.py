"""MBPP: short Python programs."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtgrpo.parts import Folder, Prompt
from mtgrpo.tasks import Split, user
from mtgrpo.tasks.published import Published, in_code_block, text
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.types import Message, Task

_TRAIN, _EVAL = range(511, 975), range(11, 511)  # task_id; 1 to 10 are the examples of the paper's prompt
_BROKEN = {367, 927}  # their reference solutions fail their own tests on Python 3.11


@dataclass
class MBPP(Published):
    """463 programs to train on and 499 held out, each with three tests (Austin et al. 2021, arXiv:2108.07732).

    Read from `path`, else from mbpp/mbpp.jsonl in $MTGRPO_DATA, else from google-research-datasets/mbpp on the Hugging
    Face hub. Left out are tasks 367 and 927, which no program passes. The metadata have `setup`, code to run before the
    answer's, and `tests`, code to run after it, which raises where the answer is wrong. The answer is a reference
    solution.
    """

    system_prompt: Prompt = "Answer with the whole program in one fenced code block."
    path: Folder = ""  # the file mbpp.jsonl

    place = stem = "mbpp"
    splits = ("train+validation+test", "train+validation+test")
    on_hub = ("google-research-datasets/mbpp", "full")
    layout = "MBPP rows have task_id, text, code and a test_list"

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        wanted = _TRAIN if split is Split.train else _EVAL
        numbers = (rows[index].get("task_id") for index in range(len(rows)))
        return [index for index, number in enumerate(numbers) if number in wanted and number not in _BROKEN]

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        return in_code_block(task.answer)

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        if not isinstance(row["test_list"], list) or not row["test_list"]:
            raise ValueError("test_list")
        shown = "\n".join(map(str, row["test_list"]))
        prompt = f"{text(row, 'text').strip()} The program must pass these tests:\n\n```python\n{shown}\n```"
        metadata = {"setup": row.get("test_setup_code", ""), "tests": f"{shown}\n"}
        code = text(row, "code").replace("\r\n", "\n").replace("\r", "\n")
        return Task(f"mbpp/{row['task_id']}", user(prompt), code, metadata)
