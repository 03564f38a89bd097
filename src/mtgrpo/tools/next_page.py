"""The pages of a task, one at a time."""

from dataclasses import dataclass

from mtgrpo.errors import ConfigError
from mtgrpo.tools import Tool
from mtgrpo.types import Task


@dataclass
class NextPage(Tool):
    """Shows the `pages` in the task's metadata one after the other, then says that there are no more."""

    blocking = False

    async def start(self, task: Task) -> None:
        if not task.metadata.get("pages"):
            raise ConfigError(f"task {task.id} has no pages to show; the tool next_page is for task=ledger")
        self._pages, self._turned = task.metadata["pages"], 0

    def __call__(self) -> str:
        """Read the next page."""
        self._turned += 1
        return str(self._pages[self._turned - 1]) if self._turned <= len(self._pages) else "no more pages"
