from dataclasses import dataclass

from mtgrpo.tasks import IndexedStream, TaskSource
from mtgrpo.types import Message, Task


@dataclass
class Squares(TaskSource):
    """Squares of small numbers."""

    largest: int = 99

    def stream(self, split, seed, repeat=True):
        def task(index):
            number = index % self.largest
            question = Message("user", f"What is {number} squared?")
            return Task(f"squares/{split.value}/{index}", (question,), answer=str(number**2))

        return IndexedStream(None if repeat else 20, task, seed, repeat)
