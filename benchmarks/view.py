"""How quick the page of a run of 10,240 conversations is, and what its server takes: a real step, kept forty times.

    python benchmarks/view.py

Each screen is opened once, of a step that nothing else has opened: from the change of the address until it is drawn.
Needs Chromium. Prints one JSON line; nothing is compared, so nothing is kept.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from runs import finish_run

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from chromium import chromium

FOLDER = Path("outputs/benchmarks/view")
STEPS = 40  # of 256 conversations
SCREENS = {
    "runs": "/", "curves": "/curves/0", "step": "/r/0/step_000011", "group": "/r/0/step_000012/g/0",
    "conversation": "/r/0/step_000013/c/0", "forest": "/r/0/step_000014/forest",
    "timeline": "/r/0/step_000015/timeline", "task": "/r/0/task/TASK",
}  # fmt: skip
DRAWN_MS = """new Promise((drawn) => {
  const began = performance.now();
  const look = () => (document.querySelector("#page").dataset.path === PATH && !document.querySelector(".busy")
    ? requestAnimationFrame(() => drawn(performance.now() - began)) : setTimeout(look, 1));
  location.hash = PATH;
  look();
})"""


def made() -> tuple[Path, str]:
    """The folder of the run, and one of its tasks."""
    small, large = FOLDER / "small", FOLDER / "large"
    finish_run(["train", "trainer.steps=2", "eval.tasks=50"], small)
    if not large.exists():
        shutil.copytree(small, large)
        row = json.loads((small / "metrics.jsonl").read_text().splitlines()[-2])
        rows = [json.dumps(row | {"stage": "reinforcement learning", "step": step}) for step in range(1, STEPS + 1)]
        (large / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        for step in range(3, STEPS + 1):
            for name in ("trajectories/step_{:06d}.jsonl", "tokens/step_{:06d}.npz"):
                shutil.copy(small / name.format(2), large / name.format(step))
    first = (small / "trajectories/step_000002.jsonl").open().readline()
    return large, json.loads(first)["task"]


async def measure(run: Path, task: str) -> dict[str, float]:
    """Seconds until each screen is drawn, and the most bytes of memory that the server held."""
    words = [sys.executable, "-m", "mtgrpo", "view", str(run), "--port", "8799"]
    server = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        address = (await server.stdout.readline()).decode().split()[1]
        with tempfile.TemporaryDirectory() as profile:
            async with chromium(Path(profile)) as page:
                began = time.perf_counter()
                await page.open(address)
                found = {"first_page_s": time.perf_counter() - began}
                for name, screen in list(SCREENS.items())[1:]:
                    path = json.dumps(screen.replace("TASK", task.replace("/", "%2F")))
                    found[f"{name}_s"] = await page.value(DRAWN_MS.replace("PATH", path)) / 1000
                    assert await page.value("document.querySelector('.error, .empty') === null"), screen
        status = Path(f"/proc/{server.pid}/status").read_text()
        return {name: round(value, 3) for name, value in found.items()} | {
            "server_mb": round(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        }
    finally:
        server.terminate()
        await server.wait()


def main() -> None:
    """Make the run, measure and print."""
    run, task = made()
    rows = sum(len(path.read_text().splitlines()) for path in (run / "trajectories").glob("step_*.jsonl"))
    print(json.dumps({"conversations": rows, **asyncio.run(measure(run, task))}))


if __name__ == "__main__":
    main()
