"""Environments written for verifiers, which `make verifiers-env` installs: their rewards, our tokens."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import Run
from mtgrpo.errors import ConfigError
from mtgrpo.integrations.verifiers.agent import Verifiers, VerifiersTasks
from mtgrpo.integrations.verifiers.program import row
from mtgrpo.parts import RunContext
from mtgrpo.tasks import Split
from mtgrpo.tasks.rows import Columns, task_from_row
from mtgrpo.types import Status, Task, Trajectory
from scripted import ScriptedEngine
from test_agents import group_of
from test_conversation import said

PROJECT = Path(__file__).resolve().parent.parent
PYTHON = PROJECT / ".venv-verifiers" / "bin" / "python"
PAGE = (PROJECT / "docs" / "agents.md").read_text()
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 23"}}\n</tool_call>'
real = pytest.mark.real
needs_verifiers = pytest.mark.skipif(
    not list(PYTHON.parents[1].glob(".ready-*")),
    reason="there is no .venv-verifiers: make verifiers-env makes it",
)

ECHO = """
import asyncio
import verifiers.v1 as vf

class Words(vf.Task):
    @vf.reward(weight=0.5)
    async def short(self, trace):
        if "no score" in trace.last_reply:
            raise KeyError("no such word")
        return float(len(trace.last_reply) < 10)

    @vf.reward(weight=2.0)
    async def repeated(self, trace):
        if "wait" in trace.last_reply:
            await asyncio.sleep(60)
        return float(self.data.prompt[-4:] in trace.last_reply)

class Config(vf.TasksetConfig):
    endless: bool = False

class Taskset(vf.Taskset[Words, Config]):
    def __init__(self, config):
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self):
        print("what it prints is no answer")
        for word in ("four", "five", "nine", "zero"):
            yield Words(vf.TaskData(id=word, prompt=f"Say {word}"), self.config.task)

__all__ = ["Taskset"]
"""
TWO = """
import verifiers.v1 as vf
from words_env import Taskset

class TwoConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    two: vf.AgentConfig = vf.AgentConfig()

class Two(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        await agents.one.run(task)
        await agents.two.run(task)

__all__ = ["Taskset", "Two"]
"""


@pytest.fixture
def environments(place: Path) -> Path:
    """A folder with the environments, the one of the documentation among them."""
    (block,) = re.findall(r"^```python\n# sums_env.py\n(.*?)^```$", PAGE, flags=re.M | re.S)
    for name, text in {"sums_env": block, "words_env": ECHO, "two_env": TWO}.items():
        (place / f"{name}.py").write_text(text)
    (place / ".venv-verifiers").symlink_to(PYTHON.parents[1])
    return place


def tasks(folder: Path, environment: str, **settings: Any) -> list[Task]:
    """The tasks of an environment, those held out and the others."""

    async def read() -> list[Task]:
        source = VerifiersTasks(environment=environment, python=str(PYTHON), eval_fraction=0.5, **settings)
        async with source.open(RunContext(folder, print, {})) as running:
            return [task for split in Split for task in running.stream(split, 0, repeat=False)]

    return asyncio.run(read())


def played(folder: Path, environment: str, task: Task, *scripts: list[str], **changed: Any) -> list[Trajectory]:
    """The siblings of a task, each with a policy that says its script."""
    engine = ScriptedEngine(lambda key, turn: said(scripts[key.sample_index][turn]))
    settings = {name: changed.pop(name) for name in ("settings", "timeout_s") if name in changed}
    agent = Verifiers(environment=environment, python=str(PYTHON), **settings)
    return group_of(engine, folder, agent, size=len(scripts), task=task, **changed).trajectories


def processes_in(folder: Path) -> list[str]:
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if "verifiers/program.py" in line or str(folder) in line]


# --- without verifiers


async def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        async with Verifiers(**settings).open(RunContext(folder, print, {})):
            pass
    assert "\n" not in str(error.value)
    return str(error.value)


async def test_an_interpreter_that_is_of_no_use_is_told_in_a_line(place: Path) -> None:
    assert "agent.environment is not set" in await refused(place)
    said = await refused(place, environment="sums_env", python="nowhere/python")
    assert said.startswith(
        "agent.python=nowhere/python: there is no such interpreter; give that of an environment that"
    )
    said = await refused(place, environment="sums_env", python=sys.executable)
    assert f"{sys.executable} has no package verifiers: pip install 'verifiers>=0.4,<0.5' uv" in said
    (place / "verifiers-0.5.1.dist-info").mkdir()
    (place / "verifiers-0.5.1.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.5.1\n")
    said = await refused(place, environment="sums_env", python=sys.executable)
    assert f"{sys.executable} has verifiers 0.5.1: pip install 'verifiers>=0.4,<0.5'" in said


def test_the_recipe_names_the_environment_once(run: Run) -> None:
    words = ["train", "recipe=verifiers", "model.name=tiny", "agent.environment=sums_env", "agent.settings={agent: {}}"]
    code, out, err = run(*words, "agent.python=there/python", "--cfg", "job", "--resolve")
    assert code == 0, err
    assert out.count("environment: sums_env") == 2 and out.count("python: there/python") == 2
    code, _, err = run(*words, "task.system_prompt=Be brief.", "--dry-run")
    assert code == 2 and "the harness of the environment writes the prompt" in err


# --- with verifiers


@real
@needs_verifiers
def test_its_tasks_are_read_and_some_held_out(environments: Path) -> None:
    found = tasks(environments, "words_env")
    assert sorted(task.id for task in found) == ["five", "four", "nine", "zero"]
    assert {task.metadata["verifiers"]["prompt"] for task in found} == {task.messages[0].content for task in found}
    found = tasks(environments, "sums_env", select={"limit": 8, "skip": 2})
    assert {task.id for task in found} == {f"sums_env/{line}" for line in range(1, 9)}
    assert sorted(int(task.answer) for task in found) == [23 * left for left in range(4, 12)]
    assert [message.role for message in found[0].messages] == ["system", "user"]
    with pytest.raises(ConfigError, match=r"words_env: ValueError: it has no end: task.select=\{limit: 1000\}"):
        tasks(environments, "words_env", settings={"taskset": {"endless": True}})


@real
@needs_verifiers
def test_one_turn_is_scored_by_its_rewards(environments: Path) -> None:
    task = Task("four", (), metadata={"verifiers": {"id": "four", "prompt": "Say four"}})
    found = played(environments, "words_env", task, ["four"], ["well, not five but four"], ["no score"], ["five"])
    assert [t.reward for t in found] == [2.5, 2.0, 0.0, 0.5]
    assert [t.components for t in found[:2]] == [{"short": 0.5, "repeated": 2.0}, {"short": 0.0, "repeated": 2.0}]
    assert [len(t.turns) for t in found] == [1, 1, 0, 1]
    assert (found[2].status, "KeyError" in found[2].reason) == (Status.FAILED, True)
    assert found[0].turns[0].output == said("four") and found[0].output == "four"
    assert not processes_in(environments)


@real
@needs_verifiers
def test_its_tools_answer_and_every_turn_continues_the_last(environments: Path) -> None:
    (task,) = (task for task in tasks(environments, "sums_env") if task.answer == "391")
    found = played(environments, "sums_env", task, [CALL, f"Once more.\n{CALL}", "#### 391"], ["#### 400"])
    assert [[turn.parent for turn in t.turns] for t in found] == [[-1, 0, 1], [-1]]
    assert [t.components for t in found] == [{"calls": 2.0, "right": 1.0}, {"calls": 0.0, "right": 0.0}]
    assert [message.content for turn in found[0].turns[:2] for message in turn.observations] == ["391", "391"]
    assert (found[0].counts["exact"], found[0].reward, found[1].reward) == (2, 1.0, 0.0)


@real
@needs_verifiers
def test_what_takes_too_long_is_cancelled_there_too(environments: Path) -> None:
    task = Task("four", (), metadata={"verifiers": {"id": "four", "prompt": "Say four"}})
    slow, quick = played(environments, "words_env", task, ["wait"], ["four"], timeout_s=20.0)
    assert (slow.status, "agent.timeout_s=20.0" in slow.reason) == (Status.FAILED, True)
    assert quick.reward == 2.5
    assert not processes_in(environments)


@real
@needs_verifiers
async def test_what_verifiers_refuses_is_told_before_a_model_is_loaded(environments: Path) -> None:
    settings: dict[str, Any] = {"python": str(PYTHON)}
    assert "taskset 'nowhere' not found" in await refused(environments, environment="nowhere", **settings)
    harness = {"agent": {"harness": {"id": "nul"}}}
    wrong = await refused(environments, environment="words_env", settings=harness, **settings)
    assert "harness 'nul' not found" in wrong


@real
@needs_verifiers
def test_a_policy_that_plays_twice_in_an_episode_has_no_one_reward(environments: Path) -> None:
    task = Task("four", (), metadata={"verifiers": {"id": "four", "prompt": "Say four"}})
    (found,) = played(environments, "two_env", task, ["four", "four"])
    assert found.status is Status.FAILED
    assert "the policy played ['one', 'two']: an episode has one reward only where it plays once" in found.reason


@pytest.mark.parametrize(
    "data, said",
    [
        ({"system_prompt": "Play."}, ["Play.", "(The environment begins.)"]),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url"}]}]},
            ["hi\n[image_url]"],
        ),
    ],
)
def test_tasks_without_a_prompt_or_of_parts_can_be_used(data: dict[str, Any], said: list[str]) -> None:
    task = SimpleNamespace(data=SimpleNamespace(model_dump=lambda **_: data))
    before = copy.deepcopy(data)
    found = task_from_row(row(task), Columns(), "line 1", "id")
    assert [message.content for message in found.messages] == said
    assert found.metadata["verifiers"] == before


@real
@needs_verifiers
@pytest.mark.parametrize("number", range(2))
def test_the_documented_commands_train(number: int, environments: Path, run: Run) -> None:
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.M | re.S)
    few = ["trainer.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.tasks=1", "eval.samples=1"]
    few += ["model.name=tiny", "model.dtype=float32", "eval.every_steps=0", "sampling.max_new_tokens=20"]
    words = shlex.split(block.splitlines()[number])[1:]
    code, _, err = run(*words, *few, "log=[jsonl]", "hydra.run.dir=run")
    assert code == 0, err
    summary = json.loads((environments / "run" / "summary.json").read_text())
    assert ("eval/large/success/after" in summary) == bool(number)
    steps = [json.loads(line) for line in (environments / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = (step for step in steps if "reward/right/mean" in step)
    assert step["agent/requests"] >= 1 and "rollout/tool_error_rate" not in step
    assert not processes_in(environments)
