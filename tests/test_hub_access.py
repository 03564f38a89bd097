"""The hub that does not answer: one line within seconds, and a dry run that does not ask it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conftest import Run

ASK = """
import os, sys, time
del os.environ["HF_HUB_OFFLINE"]
from mtgrpo import cli
from mtgrpo.model import load
import mtgrpo.tasks.hub
began = time.monotonic()
try:
    cli.main(sys.argv[1:])
finally:
    print(time.monotonic() - began)
"""


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def asked(words: str, address: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[int, str, float]:
    """Exit code, what was said and the seconds it took after all imports."""
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    monkeypatch.delenv("MTGRPO_DATA", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", ASK, *words.split()], capture_output=True, text=True, check=False, timeout=280
    )
    return done.returncode, done.stderr, float(done.stdout.splitlines()[-1])


@pytest.mark.real
@pytest.mark.parametrize("what", ["model.name=Some/Model", "task=hub task.path=some/data sft.steps=0"])
def test_a_hub_that_does_not_answer_is_told_in_a_line(
    what: str, silent: str, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    code, said, seconds = asked(f"train {what} hydra.run.dir=run", silent, monkeypatch, place)
    assert code == 2
    assert "is not on this machine, and http://127.0.0.1" in said and len(said.splitlines()) == 1
    assert seconds < 30  # the libraries alone try for a minute and more
    assert not (place / "run").exists()


class Gated(BaseHTTPRequestHandler):
    """The hub, where everything asks for rights."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/" else 403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.real
@pytest.mark.parametrize("token", ["", "hf_mine"])
@pytest.mark.parametrize("what", ["model.name=Some/Model", "task=hub task.path=some/data sft.steps=0"])
def test_what_is_gated_is_explained(what: str, token: str, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with ThreadingHTTPServer(("127.0.0.1", 0), Gated) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        code, said, _ = asked(f"train {what} hydra.run.dir=run", address, monkeypatch, place)
        server.shutdown()
    assert code == 2 and len(said.splitlines()) == 1, said
    page = "Some/Model" if "model" in what else "datasets/some/data"
    whose = "HF_TOKEN is set: its account" if token else "set HF_TOKEN to a token whose account"
    assert f"if it is gated or private, {whose} must have been given access at {address}/{page}" in said


@pytest.mark.parametrize("what", ["model.name=Some/Model", "task=hub task.path=some/data sft.steps=0"])
def test_a_dry_run_does_not_ask_a_hub(what: str, run: Run, place: Path) -> None:
    code, out, err = run("train", *what.split(), "--dry-run")
    assert code == 0 and "task=" in out
    assert err.splitlines()[-1].startswith("mtgrpo: not checked: ") and err.endswith("with --online the hub is asked\n")
    assert run("train", *what.split(), "--dry-run", "--online")[0] == 2


def test_what_the_folder_of_data_lacks_is_said(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "data").mkdir()
    monkeypatch.setenv("MTGRPO_DATA", "data")
    code, _, err = run("train", "recipe=gsm8k_tiny")
    assert code == 2
    assert "(data has no gsm8k/train.jsonl)" in err
