"""What every test shares. `MTGRPO_DATA` names the folder of real data, `MTGRPO_REQUIRE=all` forbids skipping."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

import mtgrpo
from mtgrpo import cli
from mtgrpo.runtime import workers

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
Run = Callable[..., tuple[int, str, str]]
PROJECT = Path(__file__).resolve().parent.parent
VARIATIONS = Path(__file__).with_name("variations.txt")
GONE = pytest.StashKey[set[str]]()  # what it names and is not there

os.environ["HF_HUB_OFFLINE"] = "1"  # a test never depends on the network
os.environ["OMP_NUM_THREADS"] = "1"  # as do processes that tests start: more threads sum in another order
workers.NICE = 0  # beside other tests a process that gives way would wait for minutes
hypothesis.settings.register_profile("mtgrpo", derandomize=True, deadline=None)
hypothesis.settings.load_profile("mtgrpo")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell starts jobs in the background so, and they their children
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the user's own settings, with the key that signs runs."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside the project, as data and vLLM may, is not found by tests that do not name it."""
    monkeypatch.setattr("mtgrpo.runtime.files.PROJECT", Path("/nowhere"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets; a test that asks for it is skipped where there is none."""
    folder = (PROJECT / os.environ.get("MTGRPO_DATA", "../shared/data")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; MTGRPO_DATA names another folder")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test works in an empty folder of its own, and leaves logging as it was."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(mtgrpo.__file__).parent.parent))  # for the processes that tests start
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield folder
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Types a command in this process; gives exit code, stdout and stderr."""

    def typed(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert isinstance(left.value.code, int)
        return left.value.code, *capsys.readouterr()

    return typed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What stands in variations.txt is slow too: it takes longest; most of it differs from another test by a value.

    What it names and is not in its file is kept for a test, where files are collected whole.
    """
    slow = set(VARIATIONS.read_text().splitlines())
    whole = {item.path.name for item in items} if not any("::" in argument for argument in config.args) else set()
    named = {line for line in slow if Path(line.partition("::")[0]).name in whole}
    config.stash[GONE] = named - {item.nodeid for item in items}
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of a GPU compile for their own model alone, as a run does."""
    if "torch" in sys.modules and item.get_closest_marker("gpu"):
        sys.modules["torch"]._dynamo.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test fails where nothing may be missing."""
    return _required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A skipped test file fails where nothing may be missing."""
    return _required((yield))


def _required(report: Report) -> Report:
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and os.environ.get("MTGRPO_REQUIRE") == "all":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"MTGRPO_REQUIRE=all forbids skipping. {reason}"
    return report


@pytest.fixture
def network(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Two networks, each with an eth0 that leads to the other; the commands that enter them."""
    names = [f"mtgrpo-{os.getpid()}-{number}" for number in (1, 2)]
    steps = [f"ip netns add {name}" for name in names]
    steps.append(f"ip link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
    for number, name in enumerate(names, 1):
        inside = f"ip -n {name}"
        steps += [
            f"{inside} addr add 10.77.0.{number}/24 dev eth0",
            f"{inside} link set eth0 up",
            f"{inside} link set lo up",
        ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made here: {step}: {done.stderr.strip()}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
