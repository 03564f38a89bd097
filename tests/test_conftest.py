"""The rule that nothing is skipped where everything is required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import GONE

SKIPPING = """
import pytest

def test_passes():
    pass

def test_asks_for_data(data_folder):
    pass

@pytest.mark.skip(reason="not today")
def test_is_marked():
    pass

@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False
"""
SKIPPED_FILE = "import pytest\npytest.importorskip('no_such_module')\n"


@pytest.mark.parametrize(
    ("require", "summary"),
    [("", "1 passed, 3 skipped, 1 xfailed"), ("all", "1 passed, 1 xfailed, 3 errors")],
)
def test_a_skip_fails_where_everything_is_required(tmp_path: Path, require: str, summary: str) -> None:
    for name in ("conftest.py", "variations.txt"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    (tmp_path / "test_skipped_file.py").write_text(SKIPPED_FILE)
    environment = {**os.environ, "MTGRPO_REQUIRE": require, "MTGRPO_DATA": str(tmp_path / "absent")}
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", "--rootdir", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert summary in run.stdout
    assert (run.returncode != 0) == (require == "all")


def test_every_variation_is_a_test(pytestconfig: pytest.Config) -> None:
    assert not pytestconfig.stash[GONE]
    tests = Path(__file__).parent
    lines = (tests / "variations.txt").read_text().splitlines()
    assert all((tests.parent / line.partition("::")[0]).is_file() for line in lines)
