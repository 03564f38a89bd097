"""Data sets of the Hugging Face hub."""

from dataclasses import dataclass, field

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Network, Text
from mtgrpo.tasks import Split
from mtgrpo.tasks.published import Published
from mtgrpo.tasks.rows import Columns, HubRows, Row, Rows, task_from_row
from mtgrpo.types import Task


@dataclass
class Hub(Published):
    """Any data set that the package `datasets` can load: a name on the hub, or a folder in the same layout.

    It is downloaded once and mapped from disk.
    Example: `task=hub task.path=openai/gsm8k task.subset=main task.columns.prompt=question`.
    """

    path: Network = ""  # the name of a data set, such as openai/gsm8k, or a folder
    subset: Text = ""  # which configuration of it; "" = its default
    train_split: Text = "train"
    eval_split: Text = "test"
    columns: Columns = field(default_factory=Columns)

    skips = True

    def rows(self, split: Split) -> Rows:
        if not self.path:
            raise ConfigError("task.path is not set; give the name of a data set, such as openai/gsm8k")
        name = self.train_split if split is Split.train else self.eval_split
        cure = "correct task.path, task.subset, task.train_split or task.eval_split, or give files with task=jsonl"
        return HubRows(self.path, self.subset, name, cure)

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        return task_from_row(row, self.columns, rows.where(index), rows.default_id(index))
