"""Conversations token by token in a terminal: as the policy saw them, each sampled token coloured by its advantage."""

import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from mtgrpo.errors import ConfigError
from mtgrpo.record.decoding import open_tokenizer, parted
from mtgrpo.record.reading import step_of
from mtgrpo.record.shapes import Json
from mtgrpo.record.tokens import FLAGS, read_tokens, recorded_steps
from mtgrpo.runtime.text import number, printable

_GOOD, _BAD = (0, 110, 60), (165, 30, 40)  # of the largest advantage, and of the least; dark, under white text
_LEVELS = 8  # of each colour


class ShownTokens:
    """The tokens of one step. Raises ConfigError where a run has kept none of it."""

    def __init__(self, folder: Path, name: str) -> None:
        """name: of the file of conversations, "step_000010"; "" = the newest step whose tokens are kept."""
        steps = recorded_steps(folder)
        step = step_of(name) if name else max(steps, default=0)
        record = read_tokens(folder, step)
        if record is None:
            kept = f"it has those of the steps {', '.join(map(str, steps))}" if steps else "record.tokens keeps them"
            raise ConfigError(f"{folder} has kept no tokens of {name or 'any step'}; {kept}")
        self.name = f"step_{step:06d}"
        self._record, self._tokenizer = record, open_tokenizer(folder)
        self._advantage = record.arrays.get("advantage", record.arrays["weight"] * 0)
        self._most = float(np.abs(self._advantage[np.isfinite(self._advantage)]).max(initial=0.0))

    def __contains__(self, line: int) -> bool:
        """Whether the tokens of the conversation on this line, from 0, are kept."""
        return self._record.turns(line) is not None

    def paid(self, line: int) -> bool:
        """Whether any token of the conversation on this line has an advantage."""
        turns = self._record.turns(line) or range(0)
        return any(self._advantage[self._record.tokens(turns, place)[2]].any() for place in range(len(turns)))

    def legend(self, out: Console) -> Text:
        """What the colours mean; without colours, the numbers."""
        if not _colours(out):
            return Text("sampled tokens stand in <>, after their advantage; the others are not trained")
        text = Text("advantage ")
        for level in range(-_LEVELS, _LEVELS + 1, 2):
            text.append("   ", self._style(math.copysign((level / _LEVELS) ** 2, level) * self._most))
        text.append(f" {number(-self._most)} to {number(self._most)}; what was not sampled is dim")
        return text

    def lines(self, line: int, row: Json, out: Console) -> Iterator[Text]:
        """A conversation turn by turn: what is new in the context, then what was sampled."""
        turns, paid = self._record.turns(line) or range(0), row.get("turn_rewards", [])
        for place in range(len(turns)):
            tokens, known, entries = self._record.tokens(turns, place)
            context, said = parted(self._tokenizer, tokens, known, entries.stop - entries.start)
            text = Text("" if known else "[a new context]\n", "bold")
            text.append(printable(context), "dim")
            values = self._advantage[entries].tolist()
            for value, group in groupby(zip(values, said, strict=True), key=lambda pair: pair[0]):
                piece = printable("".join(part for _, part in group))
                text.append(piece if _colours(out) else f"<{value:+.3g} {piece}>", self._style(value))
            text.append(f"  turn {place + 1}: {self._facts(entries)}", "dim")
            text.append(f", reward {number(paid[place])}" if place < len(paid) else "", "dim")
            yield text

    def _facts(self, entries: slice) -> str:
        arrays, count = self._record.arrays, entries.stop - entries.start
        parts = [f"{count} tokens", f"advantage {number(float(self._advantage[entries].mean()))}" if count else ""]
        if "before" in arrays and count and np.isfinite(apart := arrays["before"][entries].astype(float)).any():
            ratio = np.exp(apart[np.isfinite(apart)])
            parts.append(f"ratio to the sampler {ratio.min():.4g} to {ratio.max():.4g}")
        if "entropy" in arrays and count and np.isfinite(arrays["entropy"][entries]).any():
            parts.append(f"entropy {number(float(np.nanmean(arrays['entropy'][entries].astype(float))))}")
        flags = arrays["flags"][entries]
        raised = [(name, int((flags & 1 << bit > 0).sum())) for bit, name in enumerate(FLAGS)]
        return ", ".join([*filter(None, parts), *(f"{name} {often}" for name, often in raised if often)])

    def _style(self, advantage: float) -> Style:
        """White on a dark colour, as strong as the root of the advantage."""
        if not self._most or not math.isfinite(advantage):
            return Style(underline=True)
        strength = math.ceil(_LEVELS * math.sqrt(abs(advantage) / self._most)) / _LEVELS
        parts = (round(40 + (part - 40) * strength) for part in (_GOOD if advantage >= 0 else _BAD))
        return Style(color="rgb(255,255,255)", bgcolor=f"rgb({','.join(map(str, parts))})")


def _colours(out: Console) -> bool:
    return out.color_system is not None and not out.no_color
