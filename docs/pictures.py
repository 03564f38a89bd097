"""Writes docs/view_*.png: trains four small runs and photographs the screens of `mtgrpo view`: `make pictures`.

Needs Chromium. Runs stay in outputs/pictures and are made once, in minutes. Each screen is also there in dark and as
a phone shows it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp.test_utils import TestServer, unused_port
from openai import AsyncOpenAI
from PIL import Image

from mtgrpo.tools.calculator import Calculator
from mtgrpo.viewer.resources import Runs
from mtgrpo.viewer.server import application

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS.parent / "outputs/pictures"
SHORT = ["seed=1", "eval.tasks=60"]
RUNS = {
    "demo": ["train", "trainer.steps=30", *SHORT],
    "condensed": ["train", "recipe=ledger_tiny", "condenser=summarize", "sft.steps=300", "trainer.steps=4", *SHORT],
    "agent": ["train", "agent=python", f"agent.function={__file__}:solve", "trainer.steps=4", *SHORT],
    "ahead": [
        *("train", "rollout.max_staleness=2", "rollout.max_concurrent=64", "rollout.prompts_per_step=8"),
        *(f"environment.tools=[{DOCS.parent}/benchmarks/slow_tool.py:calculator]", "trainer.steps=8", *SHORT),
    ],
}
WIDE, DARK, PHONE = (1200, 750, False), (1200, 750, True), (390, 844, False)
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
POINTED = """(() => {
  const token = document.querySelectorAll(".tok")[2], at = token.getBoundingClientRect();
  token.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, clientX: at.left, clientY: at.top}));
})()"""
BEGUN_ANEW = """(() => {
  const contexts = document.querySelectorAll(".fresh");
  (contexts[1] ?? contexts[0]).scrollIntoView();
  scrollBy(0, -320);
})()"""
BEFORE = {"conversation": POINTED, "condensed": BEGUN_ANEW, "agent": BEGUN_ANEW}  # a picture, by its name
FUNCTION = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": PARAMETERS}


# ---------------------------------------------------------------- the agent of a run


async def solve(task: Any, address: Any) -> None:
    """Two drafts, each with an answer of the calculator; the conversation goes on from the second."""
    opening = [{"role": message.role, "content": message.content} for message in task.messages]
    async with AsyncOpenAI(base_url=address.openai_url, api_key=address.key) as client:
        _, draft = [await more(client, address.model, opening) for _ in range(2)]
        while draft[-1]["role"] == "tool" and len(draft) < 12:
            draft = await more(client, address.model, draft)


async def more(client: AsyncOpenAI, model: str, messages: list[Any]) -> list[Any]:
    """The conversation with one more reply, and with what the calculator said to its calls."""
    tools: Any = [{"type": "function", "function": FUNCTION}]
    answer = await client.chat.completions.create(model=model, messages=messages, tools=tools)
    said = answer.choices[0].message.model_dump(exclude_none=True)
    told = [
        {"role": "tool", "tool_call_id": call["id"], "content": calculated(call)} for call in said.get("tool_calls", ())
    ]
    return [*messages, said, *told]


def calculated(call: Any) -> str:
    """What the calculator says to a call."""
    try:
        return str(Calculator()(json.loads(call["function"]["arguments"])["expression"]))
    except Exception as error:
        return f"error: {error}"


# ---------------------------------------------------------------- the pictures


def telling(runs: Runs, run: int, file: str) -> dict[str, Any]:
    """Of the conversations with tokens, one of the widest rewards in its group, and of most contexts and turns."""
    rows = [row for row in runs.read(f"{run}/{file}/list")["rows"] if row.get("recorded")]
    rewards: dict[int, list[float]] = {}
    for row in rows:
        rewards.setdefault(row["group"], []).append(row["reward"] or 0.0)
    spread = {group: max(of) - min(of) for group, of in rewards.items()}
    return max(rows, key=lambda row: (spread[row["group"]], row["contexts"], row["turns"]))


def learned(runs: Runs, run: int) -> str:
    """The held-out task whose mean reward rose most over training."""
    index, gain = runs.read(f"{run}/index"), dict[int, float]()
    for file in index["files"]:
        sign = {"evaluation_before": -1, "evaluation_after": 1}.get(file["name"], 0)
        for task, reward in zip(file["tasks"], file["rewards"], strict=True):
            gain[task] = gain.get(task, 0.0) + sign * (reward or 0.0)
    return index["tasks"][max(gain, key=gain.__getitem__)]


def screens(runs: Runs) -> dict[str, str]:
    """The name of each picture and the address of its screen."""
    demo, condensed, agent, ahead = range(4)
    row, place = telling(runs, demo, "step_000010"), f"/r/{demo}/step_000010"
    found = {"runs": "/", "curves": f"/curves/{demo},{ahead}", "step": place, "forest": f"{place}/forest"}
    found |= {"group": f"{place}/g/{row['group']}", "conversation": f"{place}/c/{row['line']}"}
    for name, run in {"condensed": condensed, "agent": agent}.items():
        found[name] = f"/r/{run}/step_000003/c/{telling(runs, run, 'step_000003')['line']}"
    found["task"] = f"/r/{demo}/task/{quote(learned(runs, demo), safe='')}"
    return found | {"timeline": f"/r/{ahead}/step_000006/timeline"}


async def photograph(runs: Runs) -> None:
    """All screens, wide for the page of the docs."""
    port = unused_port()
    server = TestServer(application(runs, frozenset([f"127.0.0.1:{port}"]), ""), port=port)
    with tempfile.TemporaryDirectory() as profile:
        async with server, chromium(Path(profile)) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            for kind, size in {"wide": WIDE, "dark": DARK, "phone": PHONE}.items():
                await page.size(*size)
                for name, screen in screens(runs).items():
                    await page.screen(screen)
                    await page.value(BEFORE.get(name, "0"))
                    path = FOLDER / kind / f"{name}.png"
                    path.parent.mkdir(exist_ok=True)
                    await page.picture(path)
                    if kind == "wide":
                        small = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
                        small.save(DOCS / f"view_{name}.png", optimize=True)


def main() -> None:
    """Train what is not there yet, and take all pictures."""
    for name, words in RUNS.items():
        finish_run(words, FOLDER / name)
    asyncio.run(photograph(Runs([FOLDER / name for name in RUNS])))


if __name__ == "__main__":
    sys.path += [str(DOCS.parent / "tests"), str(DOCS.parent / "benchmarks")]
    from runs import finish_run

    from chromium import chromium

    main()
