"""How old a result is: commits since then to the code that it measures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN = "advantages algorithms batch chat engines environments model policy rewards rollout stages tasks tools weights"
FORWARD, SAMPLING = "batch model", "chat engines model weights"
ROOMS = {  # of src/mtgrpo, by benchmark; what is not here measures a whole run
    "agents": f"{FORWARD} agents chat endpoint",
    "attention": FORWARD,
    "condensation": FORWARD,
    "decode_step": SAMPLING,
    "forest": FORWARD,
    "forgeries": "tools runtime",
    "logprobs": FORWARD,
    "memory": f"{FORWARD} engines policy memory.py",
    "overlap": SAMPLING,
    "parallel": f"{RUN} cluster parallel",
    "refusals": "cli.py commands config parts stages",
    "rollout": SAMPLING,
    "server": SAMPLING,
    "trust": "config parts stages",
}
SCRIPTS = dict.fromkeys(("advantages", "kl", "stale"), "algorithms.py") | {
    "gpu_first": "gpu/first.py",
    "gpu_learn": "gpu/learn.py",
}


def head() -> str:
    """The commit that is measured, with `-dirty` where files but results differ; "" outside of a repository."""
    differ = git("diff", "--name-only", "HEAD", "--", ":/", ":(top,exclude)benchmarks/results")
    return git("describe", "--always", "--exclude=*") + "-dirty" * bool(differ)


def code(benchmark: str) -> list[str]:
    """Files and folders that a benchmark measures, itself among them, from the root of the repository."""
    rooms = [f"src/mtgrpo/{room}" for room in ROOMS.get(benchmark, RUN).split()]
    return ["src/mtgrpo/runtime/resources.py", f"benchmarks/{SCRIPTS.get(benchmark, f'{benchmark}.py')}", *rooms]


def measured_at(result: Path) -> str:
    """The commit of a result; where history has no such commit, or it says none, that which brought the file."""
    commit = json.loads(result.read_text()).get("commit", "")
    known = commit and git("rev-parse", "--quiet", "--verify", f"{commit.partition('-')[0]}^{{commit}}")
    ours = known and git("merge-base", known, "HEAD") == known
    return commit if ours else git("log", "-1", "--format=%h", "--", str(result))


def age(result: Path) -> str:
    """Where its code has changed since a result was measured, when that was; else "", as outside of a repository."""
    found, commit = json.loads(result.read_text()), measured_at(result)
    if not commit or set(found["ratios"].values()) == {None}:  # of a machine that could not measure it
        return ""
    since = git("rev-list", "--count", f"{commit.partition('-')[0]}..HEAD", "--", *code(found["benchmark"]))
    return "" if since == "0" else f"measured at {commit}, {since} commits of its code ago"


def git(*words: str) -> str:
    """What git prints, "" where it fails."""
    command = ["git", "-C", str(HERE.parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git
        return ""
