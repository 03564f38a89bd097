"""What a training job of SageMaker runs, in sandboxes that have its /opt/ml, from what an AWS of moto was given."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest

from conftest import Run
from mtgrpo.launch import sagemaker_entry
from ranks import furthest_of_runs, train_by_command
from test_resume import digits, rows
from test_sagemaker import SECRETS, TOKEN, WHERE, aws

__all__ = ["aws"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SITE = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
FEW = ["trainer.steps=4", "eval.tasks=4", "eval.samples=1", "checkpoint.every_steps=2", "rollout.prompts_per_step=2"]
FEW += ["rollout.group_size=4", "reward=own.py:Long", "task.system_prompt=file:prompt.txt"]
LONG = """
import os
from dataclasses import dataclass
from mtgrpo.rewards import Reward

@dataclass
class Long(Reward):
    '''By the tokens that were sampled.'''
    def reward(self, trajectory):
        assert os.environ["SM_CHANNEL_CODE"] == "/opt/ml/input/data/code"
        return float(sum(token % 7 for turn in trajectory.turns for token in turn.output))
"""


@dataclass
class Host:
    """A machine of a job: its /opt/ml, and a sandbox with an environment in which mtgrpo is not installed yet."""

    folder: Path
    name: str = "algo-1"
    namespace: list[str] = field(default_factory=list[str])  # the command that enters its network
    names: Path | None = None  # /etc/hosts

    @property
    def ml(self) -> Path:
        return self.folder / "ml"

    def furnish(self, job: Mapping[str, Any], hosts: list[str], interface: str) -> None:
        """What SageMaker puts there before a job begins."""
        s3: Any = boto3.client("s3")
        uri = job["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        for entry in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
            path = self.ml / "input/data/code" / entry["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, entry["Key"], str(path))
        config = self.ml / "input/config"
        config.mkdir(parents=True, exist_ok=True)
        (config / "hyperparameters.json").write_text(json.dumps(job["HyperParameters"]))
        resources = {"current_host": self.name, "hosts": hosts, "network_interface_name": interface}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        for name in ("checkpoints", "model", "output/data"):
            (self.ml / name).mkdir(parents=True, exist_ok=True)

    def start(self, job: Mapping[str, Any]) -> subprocess.Popen[str]:
        """The container, by its own entry point; without a network unless it has a namespace."""
        image = environment_of_the_image(self.folder / "image")
        sandbox = [
            "bwrap",
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--tmpfs",
            "/tmp",
            "--tmpfs",
            "/opt",
        ]
        for place in (image, self.folder / "home"):
            place.mkdir(exist_ok=True)
            sandbox += ["--bind", str(place), str(place)]
        sandbox += ["--bind", str(self.ml), "/opt/ml", "--unshare-pid", "--unshare-uts", "--hostname", self.name]
        sandbox += ["--die-with-parent", *([] if self.namespace else ["--unshare-net"])]
        sandbox += ["--ro-bind", str(self.names), "/etc/hosts"] if self.names else []
        secrets = {**SECRETS, "HF_TOKEN": TOKEN}
        variables = {"PATH": f"{image}/bin:/usr/bin:/bin", "HOME": str(self.folder / "home"), "PIP_NO_INDEX": "1"}
        variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRAINING_JOB_NAME": "job-1", **secrets}
        command = [*self.namespace, *sandbox, *job["AlgorithmSpecification"]["ContainerEntrypoint"]]
        pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=variables, **pipe)

    def ran(self, job: Mapping[str, Any]) -> str:
        """All that a job printed that must end well."""
        process = self.start(job)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        return said


def environment_of_the_image(folder: Path) -> Path:
    """A Python environment that has all but mtgrpo, as an image has torch; what is installed there stays there."""
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        site = folder / SITE.relative_to(sys.prefix)
        for path in SITE.iterdir():
            if "mtgrpo" not in path.name.lower() and not path.name.endswith(".pth"):
                (site / path.name).symlink_to(path)
    return folder


def furnished(folder: Path, run: Run, *words: str, hosts: int = 1) -> tuple[dict[str, Any], list[Host]]:
    """A job that was launched in the working folder, and its machines."""
    Path("own.py").write_text(LONG)
    Path("prompt.txt").write_text("Add.")
    code, _, err = run(*WHERE, *FEW, *words, f"count={hosts}")
    assert code == 0, err
    sagemaker: Any = boto3.client("sagemaker")
    job = sagemaker.describe_training_job(TrainingJobName="job-1")
    made = [Host(folder / f"algo-{number + 1}", f"algo-{number + 1}") for number in range(hosts)]
    for host in made:
        host.folder.mkdir(parents=True)
        host.furnish(job, [each.name for each in made], "eth0" if hosts > 1 else "lo")
    return job, made


def training_rows(folder: Path) -> list[dict[str, Any]]:
    return [digits(row) for row in rows(folder)]


@pytest.fixture(autouse=True)
def sandboxed() -> None:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")


def test_a_job_leaves_a_model_and_one_that_is_interrupted_has_the_same_digits(
    run: Run, aws: str, place: Path, tmp_path: Path
) -> None:
    job, (whole,) = furnished(tmp_path / "whole", run)
    said = whole.ran(job)
    checked(said, whole)
    assert any(f"{sagemaker_entry.MARK} step=" in line and "reward/mean=" in line for line in said.splitlines())

    broken = Host(tmp_path / "broken")
    shutil.copytree(whole.ml / "input", broken.ml / "input")
    (broken.ml / "checkpoints").mkdir()
    process = broken.start(job)
    ends, log = time.monotonic() + 300, broken.ml / "checkpoints/run/metrics.jsonl"
    while not (log.exists() and sum("policy/loss" in row for row in rows(log.parent)) >= 3):
        assert time.monotonic() < ends and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)  # the machine is gone, and with it all but what was in S3
    process.communicate()
    for other in ("image", "home", "ml/model", "ml/output"):
        shutil.rmtree(broken.folder / other, ignore_errors=True)
    assert "policy/loss" not in json.dumps(rows(log.parent)[0]) and not (broken.ml / "model").exists()
    checked(broken.ran(job), broken)
    assert training_rows(broken.ml / "checkpoints/run") == training_rows(whole.ml / "checkpoints/run")
    for name in ("model.safetensors", "config.json"):
        assert (broken.ml / "model" / name).read_bytes() == (whole.ml / "model" / name).read_bytes()

    measured = ["eval", f"model.name={whole.ml / 'model'}", "recipe=calculator", "eval.tasks=4", "eval.samples=1"]
    code, out, err = run(*measured, "log=[jsonl]", f"hydra.run.dir={tmp_path}/measured")
    assert code == 0, (out, err)
    (row,) = rows(tmp_path / "measured")
    assert "eval/success" in row


@pytest.mark.slow
def test_two_hosts_that_share_no_disk_train_as_one_process_does(
    run: Run, aws: str, place: Path, tmp_path: Path, network: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    precise = ["model.dtype=float64", "engine.memory_fraction=0.1"]
    job, hosts = furnished(tmp_path, run, *precise, hosts=2)
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n10.77.0.1 algo-1\n10.77.0.2 algo-2\n")
    for host, namespace in zip(hosts, network, strict=True):
        host.namespace, host.names = namespace, names
    processes = [host.start(job) for host in reversed(hosts)]
    for process, host in zip(processes, reversed(hosts), strict=True):
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert ("is in /opt/ml/model" in said) == (host.name == "algo-1")
    first, second = (host.ml / "checkpoints/run" for host in hosts)
    assert [path.name for path in second.rglob("*.log")] == ["rank_1.log"]
    assert not list((hosts[1].ml / "model").iterdir())

    monkeypatch.setenv("SM_CHANNEL_CODE", "/opt/ml/input/data/code")
    alone = train_by_command(tmp_path / "alone", "recipe=calculator", *FEW, *precise)
    apart, where = furthest_of_runs(alone, first)
    assert apart < 1e-12, where


def test_what_ends_a_job_is_in_its_failure_file(run: Run, aws: str, place: Path, tmp_path: Path) -> None:
    job, (host,) = furnished(tmp_path, run)
    parameters = job["HyperParameters"] | {"optimizer.lr": "-1", "_tuning_objective_metric": "reward/mean"}
    (host.ml / "input/config/hyperparameters.json").write_text(json.dumps(parameters))
    process = host.start(job)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert (host.ml / "output/failure").read_text() == "mtgrpo: optimizer.lr must be > 0 and <= 1, got -1.0"
    assert not any(secret in said for secret in (*SECRETS.values(), TOKEN))
    assert not list((host.ml / "model").iterdir())


def test_a_job_that_is_stopped_saves_and_leaves_its_model(run: Run, aws: str, place: Path, tmp_path: Path) -> None:
    job, (host,) = furnished(tmp_path, run, "checkpoint.every_steps=1000")
    parameters = job["HyperParameters"] | {"trainer.steps": "4000"}
    (host.ml / "input/config/hyperparameters.json").write_text(json.dumps(parameters))
    process = host.start(job)
    ends, log = time.monotonic() + 300, host.ml / "checkpoints/run/metrics.jsonl"
    while not (log.exists() and sum("policy/loss" in row for row in rows(log.parent)) >= 2):
        assert time.monotonic() < ends and process.poll() is None
        time.sleep(0.05)
    (entry,) = [int(path.name) for path in Path("/proc").iterdir() if is_entry(path, host)]
    os.kill(entry, signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    checked(said, host)
    assert "saved in" in said and list((log.parent / "checkpoints").glob("step_*"))
    assert (host.ml / "model/model.safetensors").is_file()


def is_entry(process: Path, host: Host) -> bool:
    """Whether a process is the entry point of this machine."""
    try:
        words, variables = ((process / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
    except OSError:
        return False
    return words[1:2] == [str(Path("/opt/ml/input/data/code/sagemaker_entry.py")).encode()] and (
        f"HOME={host.folder / 'home'}".encode() in variables
    )


def checked(said: str, host: Host) -> None:
    """The job ended as it should, and nobody's keys are in what it left and printed."""
    assert "is in /opt/ml/model" in said
    assert not (host.ml / "output/failure").exists()
    for path in (host.ml / name for name in ("checkpoints", "model", "output")):
        for file in (file for file in path.rglob("*") if file.is_file()):
            content = file.read_bytes()
            assert not any(secret.encode() in content for secret in (*SECRETS.values(), TOKEN)), file
    assert not any(secret in said for secret in (*SECRETS.values(), TOKEN))
