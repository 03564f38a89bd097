"""What a training job of SageMaker runs on each of its machines: installs mtgrpo, trains, and leaves a model.

A program by itself, of the standard library alone: it is what installs the rest. A run is in /opt/ml/checkpoints/run,
which SageMaker keeps in S3, and always resumes what is there; so a job whose machines were taken back goes on.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ML = Path("/opt/ml")
CODE, CONFIG = ML / "input/data/code", ML / "input/config"
RUN, MODEL, FAILURE = ML / "checkpoints/run", ML / "model", ML / "output/failure"
VLLM_FOLDER = Path("/opt/mtgrpo-vllm")
PORT = 29500
MARK = "mtgrpo-metrics"  # begins the lines that SageMaker reads numbers from
METRICS = (
    *("reward/mean", "reward/success", "policy/loss", "policy/kl", "policy/entropy", "policy/clip_fraction"),
    *("policy/grad_norm", "rollout/failed", "perf/tokens_per_s", "sft/loss", "eval/success", "eval/greedy"),
)
OWN = ("words", "processes", "extras", "vllm")  # hyperparameters that are no options of the run
FAILURE_CHARS = 1024
KEPT_LINES = 20


class JobError(Exception):
    """The job cannot go on; the message is for its owner."""


@dataclass(frozen=True)
class Hosts:
    """The machines of the job, and which of them this is."""

    names: list[str]
    current: str
    interface: str  # of the network between them; "": not said

    @property
    def rank(self) -> int:
        """Of this machine; 0 is the one that has the run."""
        return self.names.index(self.current)


def read_json(path: Path) -> Any:
    """What is in a file of the job's configuration; {} where it is not there."""
    return json.loads(path.read_text()) if path.is_file() else {}


def read_hosts() -> Hosts:
    """The machines that resourceconfig.json names; this one alone where there is no such file."""
    config = read_json(CONFIG / "resourceconfig.json")
    current = config.get("current_host") or socket.gethostname()
    return Hosts(sorted(config.get("hosts") or [current]), current, config.get("network_interface_name") or "")


def variables(hosts: Hosts, hyperparameters: Mapping[str, str]) -> dict[str, str]:
    """Those that programs on SageMaker expect, for code of the user's own, where they are not set already."""
    found = {
        "SM_MODEL_DIR": str(MODEL),
        "SM_OUTPUT_DATA_DIR": str(ML / "output/data"),
        "SM_HOSTS": json.dumps(hosts.names),
        "SM_CURRENT_HOST": hosts.current,
        "SM_CURRENT_HOST_RANK": str(hosts.rank),
        "SM_HOST_COUNT": str(len(hosts.names)),
        "SM_MASTER_ADDR": hosts.names[0],
        "SM_MASTER_PORT": str(PORT),
        "SM_HPS": json.dumps(hyperparameters),
        "SM_NUM_GPUS": str(len(list(Path("/dev").glob("nvidia[0-9]*")))),
    }
    for channel in sorted(path for path in (ML / "input/data").glob("*") if path.is_dir()):
        found[f"SM_CHANNEL_{channel.name.upper()}"] = str(channel)
    if hosts.interface:
        found |= {"GLOO_SOCKET_IFNAME": hosts.interface, "NCCL_SOCKET_IFNAME": hosts.interface}
    return found | os.environ


def pip(python: str, *words: str) -> None:
    """Install packages for an interpreter. Raises JobError with the end of what pip said."""
    command = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise JobError(f"pip install {' '.join(words)} failed: {' '.join(done.stdout.split())[-700:]}")


def install(hyperparameters: Mapping[str, str]) -> None:
    """mtgrpo with its extras, beside the torch that the image has; where asked, vLLM in an environment of its own."""
    (wheel,) = CODE.glob("*.whl")
    constraints = Path("/tmp/mtgrpo-constraints.txt")
    try:
        torch = f"torch=={metadata.version('torch').partition('+')[0]}\n"
    except metadata.PackageNotFoundError:
        torch = ""
    constraints.write_text((CODE / "constraints.txt").read_text() + torch)
    extras = hyperparameters.get("extras", "")
    pip(sys.executable, "-c", str(constraints), f"{wheel}[{extras}]" if extras else str(wheel))
    if (version := hyperparameters.get("vllm")) and not (VLLM_FOLDER / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VLLM_FOLDER)], check=True)
        pip(str(VLLM_FOLDER / "bin/python"), f"vllm=={version}")


def command(hyperparameters: Mapping[str, str], hosts: Hosts) -> list[str]:
    """What trains: one process, which starts its own ranks, or torchrun on each of several machines."""
    words = [str(word) for word in json.loads(hyperparameters.get("words") or "[]")]
    words += [f"{name}={value}" for name, value in hyperparameters.items() if name not in OWN and name[0] != "_"]
    if hyperparameters.get("vllm"):
        words.append(f"engine.python={VLLM_FOLDER}/bin/python")
    start = [sys.executable, "-m"]
    if len(hosts.names) > 1:
        start += ["torch.distributed.run", "--nnodes", str(len(hosts.names)), "--node-rank", str(hosts.rank)]
        start += ["--nproc-per-node", hyperparameters.get("processes") or "1"]
        start += ["--master-addr", hosts.names[0], "--master-port", str(PORT), "-m"]
    return [*start, "mtgrpo", "train", *words, f"hydra.run.dir={RUN}", "resume=true"]


def follow(path: Path, over: threading.Event) -> Iterator[str]:
    """The lines that are added to a file from now on, until it is `over`."""
    place = path.stat().st_size if path.exists() else 0
    last = False
    while not last:
        last = over.wait(1.0)
        if path.exists():
            place = min(place, path.stat().st_size)  # a run that goes on takes back what came after its checkpoint
            with path.open("rb") as file:
                file.seek(place)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    place += len(line)
                    yield line.decode()


def tell(over: threading.Event) -> None:
    """Print the numbers of each row of metrics for SageMaker."""
    for line in follow(RUN / "metrics.jsonl", over):
        row = json.loads(line)
        if numbers := [f"{name}={row[name]:.6g}" for name in METRICS if isinstance(row.get(name), int | float)]:
            print(MARK, f"step={row.get('step')}", *numbers, flush=True)


def train(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bool, list[str]]:
    """The exit code, whether the job was told to end, and the last lines that were printed; all are passed on."""
    folder = CODE / "files" if (CODE / "files").is_dir() else CODE
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(words, env=dict(environment), cwd=folder, start_new_session=True, **pipe)
    told: list[int] = []

    def end(number: int, _: object) -> None:
        told.append(number)
        with suppress(ProcessLookupError):  # it has ended, and its model is published
            os.killpg(process.pid, signal.SIGTERM)  # the run saves before it ends

    signal.signal(signal.SIGTERM, end)
    assert process.stdout is not None
    lines = deque[str](maxlen=KEPT_LINES)
    with process.stdout as said:
        for line in said:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return process.wait(), bool(told), list(lines)


def publish() -> None:
    """The last checkpoint as a model in /opt/ml/model: all weights, or the adapter."""
    saved = max((RUN / "checkpoints").glob("step_*"), key=lambda path: (path.stem, not path.suffix), default=None)
    if saved is None:  # a crash leaves step_N.replaced, and perhaps step_N too
        return
    to = "peft" if (saved / "adapter_config.json").exists() else "hf"
    out = MODEL / ".exported"
    shutil.rmtree(out, ignore_errors=True)
    words = ["-m", "mtgrpo", "export", str(saved), "--to", to, "--out", str(out)]
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise JobError(f"the model could not be exported: {done.stdout.strip()}")
    for path in out.iterdir():
        shutil.move(path, MODEL / path.name)
    out.rmdir()
    print(f"the model of {saved.name} is in {MODEL}", flush=True)


def work() -> int:
    """Do all of it; the exit code. Raises JobError."""
    hosts, hyperparameters = read_hosts(), read_json(CONFIG / "hyperparameters.json")
    for folder in (RUN / "ranks" if hosts.rank else RUN.parent, MODEL, ML / "output/data"):
        folder.mkdir(parents=True, exist_ok=True)
    install(hyperparameters)
    over = threading.Event()
    teller = threading.Thread(target=tell, args=(over,), daemon=True)
    if not hosts.rank:
        teller.start()
    code, told, lines = train(command(hyperparameters, hosts), variables(hosts, hyperparameters))
    over.set()
    if not hosts.rank:
        teller.join(5)
        if not code or told:
            publish()
    if code and not told:
        said = [line for line in lines if line.startswith("mtgrpo: ")] or lines[-5:]
        raise JobError("\n".join(said) or f"the run ended with exit code {code} and said nothing")
    return code


def main() -> int:
    """As `work`; what went wrong is in /opt/ml/output/failure, which SageMaker shows."""
    try:
        return work()
    except Exception as error:
        said = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        print(f"mtgrpo: {said}", file=sys.stderr)
        FAILURE.parent.mkdir(parents=True, exist_ok=True)
        FAILURE.write_text(said[-FAILURE_CHARS:])
        return 1


if __name__ == "__main__":
    sys.exit(main())
