"""A tool: a function that the model may call, and one that remembers what was said.

    mtgrpo train 'environment.tools=[calculator,examples/tool.py:convert,examples/tool.py:Notes]' trainer.steps=2

The model sees name, arguments and docstring. What it does wrong is a `ToolError`, which it reads. Any other exception
says that the tool is broken: the conversation is run again, then left out of training.
"""

from dataclasses import dataclass

from mtgrpo.tools import Tool, ToolError

METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "inch": 0.0254, "mile": 1609.344}


def convert(value: float, source: str, target: str) -> str:
    """Convert a length.

    Args:
        value: how many of `source`
        source: a unit, such as cm
        target: the unit to convert to
    """
    for unit in (source, target):
        if unit not in METRES:
            raise ToolError(f"there is no unit {unit}; there are {', '.join(METRES)}")
    return f"{value * METRES[source] / METRES[target]:g} {target}"


@dataclass
class Notes(Tool):
    """Write down a line. The answer is all lines so far.

    Args:
        line: what to write down
    """

    most: int = 20  # lines; a setting: environment.tools.Notes.most=5

    idempotent = False  # a call that is made twice writes twice, so it is never repeated
    blocking = False  # it needs no thread of its own

    async def start(self, task):
        self.lines: list[str] = []  # each conversation has a copy of the tool

    def __call__(self, line: str) -> str:
        if len(self.lines) == self.most:
            raise ToolError(f"the notes are full: {self.most} lines")
        self.lines.append(line)
        return "\n".join(self.lines)
