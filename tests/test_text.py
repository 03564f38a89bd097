"""Texts for people at a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from mtgrpo.runtime.text import complain, show


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_lines_break_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text, path = "one two three four\n  five --six", "/a/folder/with-a-long-name/of-some-length"
    for out in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        show(text)
        complain(f"no {path} there")
        if isinstance(out, Terminal):
            assert out.getvalue() == f"one two three four\n  five --six\nmtgrpo: no\n{path}\nthere\n"
        else:
            assert out.getvalue() == f"{text}\nmtgrpo: no {path} there\n"
