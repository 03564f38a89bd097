"""HumanEval: Python functions to be completed."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Folder, Prompt
from mtgrpo.tasks import Split, user
from mtgrpo.tasks.published import Published, in_code_block, text
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.types import Message, Task


@dataclass
class HumanEval(Published):
    """164 functions to be written from signature and docstring, all held out (Chen et al. 2021, arXiv:2107.03374).

    Read from `path`, else from humaneval/HumanEval.jsonl in $MTGRPO_DATA, else from openai/openai_humaneval on the
    Hugging Face hub. The metadata have `setup`, code to run before the answer's, and `tests`, code to run after it,
    which raises where the answer is wrong. The answer is a reference solution.
    """

    system_prompt: Prompt = "Answer with the whole function in one fenced code block."
    path: Folder = ""  # the file HumanEval.jsonl

    place = "humaneval"
    stem = "HumanEval"
    splits = ("test", "test")
    on_hub = ("openai/openai_humaneval", "")
    layout = "HumanEval rows have task_id, prompt, entry_point, canonical_solution and test, all text"

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        """All are held out. Raises ConfigError for split train."""
        if split is Split.train:
            raise ConfigError("task=humaneval is for evaluation alone; train on others, such as task=mbpp")
        return range(len(rows))

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        return in_code_block(task.answer)

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        prompt, name = text(row, "prompt"), text(row, "entry_point")
        metadata = {"setup": prompt, "tests": f"{text(row, 'test')}\ncheck({name})\n", "entry_point": name}
        messages = user(f"Complete this function:\n\n```python\n{prompt.strip()}\n```")
        number = text(row, "task_id").rpartition("/")[2]
        return Task(f"humaneval/{number}", messages, prompt + text(row, "canonical_solution"), metadata)
