"""What the benchmarks share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtgrpo.extension import load_file

RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "record.py"


def test_the_machine_is_described_on_any_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = load_file(RECORD)
    monkeypatch.setattr(record.platform, "processor", lambda: "arm")
    monkeypatch.setattr(record, "CPUINFO", tmp_path / "absent")
    assert record.machine().startswith(f"arm, {os.cpu_count()} cores")
    monkeypatch.setattr(record, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast 3000\n")
    assert record.machine().startswith("Fast 3000, ")
