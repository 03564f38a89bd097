"""Foreign agents: what they are answered is what is trained, as if the environment had asked for it."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.types import RunMode

import mtgrpo
from mtgrpo import cli
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.agents import Address, Agent
from mtgrpo.agents import python as python_agents
from mtgrpo.agents.command import Command
from mtgrpo.agents.none import NoAgent
from mtgrpo.agents.python import Isolation, Python
from mtgrpo.batch.forest import build_batch
from mtgrpo.condensers.none import Whole
from mtgrpo.config.compose import ExperimentLoader, compose, parse
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.environments import Environment
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import DType
from mtgrpo.parts import RunContext
from mtgrpo.policy.step import at_once
from mtgrpo.policy.updater import PolicyUpdater
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.stages.metrics import describe, describe_tools
from mtgrpo.stages.policy_trainer import update_config
from mtgrpo.types import Group, Limits, Message, Sampling, Status, Task, Trajectory
from mtgrpo.weights.source import ModelWeights
from scripted import ScriptedEngine
from test_conversation import ANSWER, CALL, WIDE, Talk, calculator, chat, said
from test_policy import Watched, make_model

for package in ("openai", "anthropic"):
    pytest.importorskip(package)
from openai import OpenAI  # noqa: E402

AGENTS = Path(__file__).with_name("calculating_agents.py")
SDKS = [f"with_{sdk}{stream}" for sdk in ("openai", "responses", "anthropic") for stream in ("", "_stream")]
TASK = Task("task/1", (Message("system", "Be brief."), Message("user", "What is 17 * 23?")), answer="391")
SUM = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 + 23"}}\n</tool_call>'
TURNS = 4  # at most
SCRIPTS = [
    [CALL, ANSWER],
    ["#### 400"],
    [f"{SUM}\n{CALL}", ANSWER],  # two at once
    [f"Let me see.\n{SUM}", f"And now.\n{CALL}", "  It is 391.\n#### 391 "],
    [f"<think>\nhard\n</think>\n\n{CALL}", f"<think>\neasy\n</think>\n\n{ANSWER}"],
    [CALL] * 9,  # until it is cut
    [CALL, "9" * 500],  # cut by max_new_tokens
    ["<tool_call>\n{broken\n</tool_call>", ANSWER],  # only OpenAI's chat completions can say so
]


def group_of(
    engine: Any,
    tmp_path: Path,
    agent: Agent | None = None,
    environment: Environment | None = None,
    size: int = 1,
    task: Task = TASK,
    **changed: Any,
) -> Group:
    """The siblings of a task, one after the other, by the environment or by an agent."""
    named: dict[str, Any] = {
        "environment": environment or calculator(max_turns=TURNS),
        "chat": chat(),
        "reward": Numeric(),
        "sampling": Sampling(max_new_tokens=200),
        "limits": WIDE,
        "condenser": Whole(),
        "retries": 0,
        "timeout_s": 60.0,
        "open_conversation": lambda scope, task, sample: engine.conversation(Key(5, scope, task, sample)),
        "attend": None,
        "slots": asyncio.Semaphore(1),
    }

    async def run() -> Group:
        async with (agent or NoAgent()).open(RunContext(tmp_path, print, {})) as running:
            return await RolloutRunner(**named | changed, agent=running).run_group(task, size)

    return asyncio.run(run())


def scripted(scripts: Sequence[Sequence[str]] = SCRIPTS) -> ScriptedEngine:
    return ScriptedEngine(lambda key, turn: said(scripts[key.sample_index][turn]))


def python(name: str, **settings: Any) -> Python:
    return Python(function=f"{AGENTS}:{name}", max_requests=TURNS, **settings)


def gradient(group: Group) -> dict[str, torch.Tensor]:
    """Of a training step on the group, by the default algorithm."""
    experiment = mtgrpo.preset("jsonl", "model.name=tiny", "rollout.group_size=4")
    policy = Watched(make_model())
    batch = build_batch(group.trajectories)
    rewards = rewards_of([group], experiment.algorithm, batch.trajectory, batch.turn)
    at_once(PolicyUpdater(policy, replace(update_config(experiment), exact=False)).training(batch, rewards, 0, 0))
    return policy.descent.gradients[0]


def assert_equal(group: Group, other: Group) -> None:
    """Tokens, rows, rewards and gradient, to the bit."""
    for one, two in zip(group.trajectories, other.trajectories, strict=True):
        assert (one.status, one.reward) == (two.status, two.reward)
        for turn, twin in zip(one.turns, two.turns, strict=True):
            for name in ("new_context", "output", "logprobs", "versions", "finish", "message", "parent", "auxiliary"):
                assert getattr(turn, name) == getattr(twin, name), name
        assert [turn.observations for turn in one.turns[:-1]] == [turn.observations for turn in two.turns[:-1]]
    found, expected = gradient(group), gradient(other)
    assert any(tensor.any() for tensor in expected.values())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", SDKS)
def test_the_calculator_loop_of_any_sdk_is_that_of_the_environment(name: str, tmp_path: Path) -> None:
    scripts = SCRIPTS if name.startswith("with_openai") else SCRIPTS[:-1]
    expected = group_of(scripted(scripts), tmp_path, size=len(scripts))
    found = group_of(scripted(scripts), tmp_path, python(name), size=len(scripts))
    assert [t.status.value for t in found.trajectories][:7] == ["completed"] * 5 + ["truncated"] * 2
    assert [t.reason for t in found.trajectories][5:7] == ["max_requests", "max_new_tokens"]
    assert_equal(found, expected)


def test_a_model_that_is_sampled_from_gives_the_same(tmp_path: Path) -> None:
    """Of the local engine: the same random numbers in the same contexts."""
    model = make_model(DType.float32)
    sampling = Sampling(max_new_tokens=40, stop_ids=list(range(3, 1024, 9)))

    def played(agent: Agent | None) -> Group:
        engine = Local().start(ModelWeights(model), False, 2048)
        limits = Limits(2048, 2048, 2048)
        talk = Talk(length=3, max_turns=9)
        return group_of(engine, tmp_path, agent, talk, size=4, sampling=sampling, limits=limits, reward=Odd())

    found, expected = played(python("echo")), played(None)
    assert all(len(t.turns) == 3 for t in expected.trajectories)
    for trajectory in found.trajectories:
        assert trajectory.output == trajectory.turns[-1].message.content
    assert_equal(found, expected)


@pytest.mark.parametrize("name", SDKS)
def test_every_sdk_gets_what_a_model_samples_for_the_environment(name: str, tmp_path: Path) -> None:
    """Of the local engine; with this seed none of the turns is an unreadable call, of which not every SDK is told."""
    model = make_model(DType.float32)
    sampling = Sampling(max_new_tokens=12, stop_ids=list(range(3, 1024, 9)))

    def played(agent: Agent | None) -> Group:
        engine = Local().start(ModelWeights(model), False, 2048)

        def opened(scope: str, task: str, sample: int) -> Any:
            return engine.conversation(Key(6, scope, task, sample))

        return group_of(engine, tmp_path, agent, size=4, sampling=sampling, reward=Odd(), open_conversation=opened)

    found, expected = played(python(name)), played(None)
    assert len({tuple(t.turns[0].output) for t in expected.trajectories}) == 4
    assert_equal(found, expected)


class Odd(Numeric):
    """Something that differs between siblings."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(trajectory.sample_index % 2)


# --- what becomes of an agent


def one(agent: Agent, tmp_path: Path, scripts: Sequence[str] = (ANSWER,) * 9, **changed: Any) -> Trajectory:
    (trajectory,) = group_of(scripted([scripts]), tmp_path, agent, **changed).trajectories
    return trajectory


def written(tmp_path: Path, code: str) -> str:
    """A file with the agent `solve`."""
    path = tmp_path / "own_agent.py"
    path.write_text(
        f"import asyncio, json, sys, time, urllib.request\nfrom mtgrpo.agents import Outcome\n{ASK}\n{code}"
    )
    return f"{path}:solve"


ASK = """
def ask(address, text="hi", **more):
    body = {"messages": [{"role": "user", "content": text}], **more}
    headers = {"authorization": f"Bearer {address.key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{address.openai_url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        raise
"""


def test_what_an_agent_gives_is_its_reward_or_its_answer(tmp_path: Path) -> None:
    cases = {
        "return 0.25": (0.25, "#### 391"),
        "return 'so: #### 391'": (1.0, "so: #### 391"),
        "return None": (1.0, "#### 391"),
        "return Outcome(reward=2, output='x', data={'a': 1})": (2.0, "x"),
    }
    for number, (code, (reward, final)) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        agent = Python(function=written(folder, f"def solve(task, address):\n    ask(address)\n    {code}\n"))
        trajectory = one(agent, tmp_path)
        assert (trajectory.status, trajectory.reward, trajectory.final) == (Status.COMPLETED, reward, final)


def test_rewards_of_replies_are_those_of_their_turns(tmp_path: Path) -> None:
    code = """
def solve(task, address):
    first, second = ask(address)["id"], ask(address, "more")["id"]
    return {second: 0.5}
"""
    trajectory = one(Python(function=written(tmp_path, code)), tmp_path)
    assert (trajectory.reward, trajectory.turn_rewards) == (1.0, [0.0, 0.5])


def test_a_reward_for_what_says_that_the_budget_is_used_up_has_no_effect(tmp_path: Path) -> None:
    code = "def solve(task, address):\n    return {ask(address, str(turn))['id']: 0.5 for turn in range(4)}\n"
    trajectory = one(Python(function=written(tmp_path, code), max_requests=2), tmp_path)
    assert (trajectory.status, trajectory.reason) == (Status.TRUNCATED, "max_requests")
    assert trajectory.turn_rewards == [0.5, 0.5]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{'chatcmpl-9-9': 1.0}", "'chatcmpl-9-9', which this conversation has not"),
        ("Outcome(reward=1.0, components={'passed': None})", "components={'passed': None}"),
        ("Outcome(reward=1.0, components={'passed': 'all'})", "give a finite number, or a Score of finite numbers"),
        ("float('nan')", "solve gave nan; give None, a finite number, a text, an Outcome or rewards by reply id ("),
        ("Outcome(reward=float('inf'))", "solve gave Outcome(reward=inf"),
        ("{ask(address)['id']: float('nan')}", "nan}; give None"),
        ("Outcome(turn_rewards={ask(address)['id']: float('inf')})", "inf}"),
        ("Outcome(reward=__import__('numpy').float32('nan'))", "give None, a finite number"),
        ("['#### 5']", "solve gave ['#### 5']; give None"),
    ],
)
def test_rewards_that_are_none_fail_the_conversation(given: str, why: str, tmp_path: Path) -> None:
    code = f"def solve(task, address):\n    ask(address)\n    return {given}\n"
    trajectory = one(Python(function=written(tmp_path, code)), tmp_path)
    assert (trajectory.status, why in trajectory.reason) == (Status.FAILED, True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("silent", "the agent ended without a request: it must send them to http://127.0.0.1:"),
        ("raises", "KeyError: 'no such page'"),
    ],
)
def test_an_agent_that_fails_is_run_again_and_never_trained(name: str, why: str, tmp_path: Path) -> None:
    trajectory = one(python(name), tmp_path, retries=2)
    assert (trajectory.status, trajectory.attempts, trajectory.turns) == (Status.FAILED, 3, [])
    assert why in trajectory.reason


def test_an_agent_that_asks_elsewhere_is_told_where_to(tmp_path: Path) -> None:
    code = "def solve(task, address):\n    raise ConnectionRefusedError('111')\n"
    told = one(Python(function=written(tmp_path, code)), tmp_path).reason
    assert "ConnectionRefusedError: 111" in told and "; no request came: it must send them to http://127.0.0.1:" in told
    (tmp_path / "b").mkdir()
    asks = Python(function=written(tmp_path / "b", code.replace("    raise", "    ask(address)\n    raise")))
    reason = one(asks, tmp_path).reason
    assert "ConnectionRefusedError: 111" in reason and "no request came" not in reason


def test_an_agent_that_gives_up_at_a_limit_is_truncated(tmp_path: Path) -> None:
    code = """
def solve(task, address):
    for _ in range(5):
        assert "USED UP" not in ask(address)["choices"][0]["message"]["content"].upper()
"""
    trajectory = one(Python(function=written(tmp_path, code), max_requests=3), tmp_path)
    assert (trajectory.status, trajectory.reason, len(trajectory.turns)) == (Status.TRUNCATED, "max_requests", 3)
    code = "def solve(task, address):\n    ask(address, 'word ' * 5000)\n"
    (tmp_path / "b").mkdir()
    agent = Python(function=written(tmp_path / "b", code))
    trajectory = one(agent, tmp_path)
    assert (trajectory.status, trajectory.turns) == (
        Status.TRUNCATED,
        [],
    )  # as where the environment's task is too long
    code = "def solve(task, address):\n    ask(address)\n    ask(address, 'word ' * 5000)\n"
    (tmp_path / "c").mkdir()
    trajectory = one(Python(function=written(tmp_path / "c", code)), tmp_path)
    assert (trajectory.status, trajectory.reason, len(trajectory.turns)) == (
        Status.TRUNCATED,
        "max_context_length",
        1,
    )
    assert trajectory.counts["overflow"] == 1
    code = "def solve(task, address):\n    ask(address)\n    raise mtgrpo.errors.PolicyError('no move')\n"
    (tmp_path / "d").mkdir()
    trajectory = one(Python(function=written(tmp_path / "d", f"import mtgrpo.errors\n{code}")), tmp_path)
    assert (trajectory.status, trajectory.reason, len(trajectory.turns)) == (Status.TRUNCATED, "policy_error", 1)


def test_what_an_agent_does_to_the_metadata_is_its_own(tmp_path: Path) -> None:
    code = "def solve(task, address):\n    ask(address)\n    task.metadata['seen'] = 1\n    return len(task.metadata)\n"
    agent = Python(function=written(tmp_path, code))
    for _ in range(2):
        trajectory = one(agent, tmp_path)
        assert (trajectory.reward, trajectory.task) == (1, TASK)
    assert not TASK.metadata


@pytest.mark.parametrize("wait", ["await asyncio.sleep(60)", "time.sleep(60)"])
def test_an_agent_that_hangs_fails_and_is_left(wait: str, tmp_path: Path) -> None:
    head = "async def" if "await" in wait else "def"
    code = f"{head} solve(task, address):\n    ask(address)\n    {wait}\n"
    agent = Python(function=written(tmp_path, code), timeout_s=0.5)
    if "await" not in wait:  # which only a process of its own can stop
        agent = Python(function=agent.function, timeout_s=3.0, isolation=Isolation.process)
    before = threading.active_count()
    trajectory = one(agent, tmp_path)
    assert (trajectory.status, trajectory.reason) == (
        Status.FAILED,
        f"TimeoutError: the agent took longer than agent.timeout_s={agent.timeout_s}",
    )
    assert threading.active_count() == before


def test_async_functions_share_an_event_loop_that_one_of_them_may_end_or_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_agents, "BLOCKED_S", 0.3)
    code = "async def solve(task, act):\n    return act()\n"
    begun, go = threading.Event(), threading.Event()

    def thread() -> float:
        return float(threading.get_ident())

    def block() -> float:
        begun.set()
        assert go.wait(20)
        return thread()

    async def run() -> None:
        async with Python(function=written(tmp_path, code)).open(RunContext(tmp_path, print, {})) as agent:

            async def given(act: Any) -> float | None:
                return (await agent.run(TASK, act)).reward

            with pytest.raises(RuntimeError, match="SystemExit: 3"):
                await given(lambda: sys.exit(3))
            first, again = await given(thread), await given(thread)
            blocked = asyncio.create_task(given(block))
            await asyncio.to_thread(begun.wait, 20)
            other, third = await asyncio.gather(given(thread), given(thread))
            go.set()
            assert first == again == await blocked
            assert other == third != first

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() == before


def test_a_function_in_a_process_finds_the_policy_by_its_variables(tmp_path: Path) -> None:
    code = """
import os
def solve(task, address):
    assert os.environ["OPENAI_API_KEY"] == address.key and os.environ["MORE"] == "1"
    ask(address)
    return Outcome(output=task.answer + task.messages[1].content, data={"pid": os.getpid()})
"""
    agent = Python(function=written(tmp_path, code), isolation=Isolation.process, environment={"MORE": "1"})
    trajectory = one(agent, tmp_path)
    assert (trajectory.status, trajectory.reason) == (Status.COMPLETED, "")
    assert trajectory.final == "391What is 17 * 23?"


PROGRAM = """
import json, os, sys, urllib.request
body = {"messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 9}
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(), headers)
reply = json.load(urllib.request.urlopen(request))
assert os.environ.get("SECRET") is None and open("given.txt").read() == "task/1"
json.dump({reply["id"]: 0.5}, open("reward.json", "w"))
print("done", os.getcwd())
"""


def test_a_command_has_a_folder_of_its_own_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "agent.py").write_text(PROGRAM)
    agent = Command(
        argv=[sys.executable, "agent.py", "{prompt} {braces}"],
        directory=str(tmp_path / "kit"),
        files={"given.txt": "{task}"},
        reward_file="reward.json",
    )
    trajectory = one(agent, tmp_path)
    assert (trajectory.status, trajectory.reason, trajectory.turn_rewards) == (Status.COMPLETED, "", [0.5])
    assert trajectory.data["output"].startswith("done ")
    assert "What is 17 * 23? {braces}" in str(chat().decode(trajectory.turns[0].new_context))
    assert not Path(trajectory.data["output"].split()[1]).exists()


@pytest.mark.parametrize(
    ("posts", "key", "reward"), [(False, "OPENAI_API_KEY", 0.0), (True, "MTGRPO_REWARDS_KEY", 0.75)]
)
def test_only_a_program_that_has_the_key_of_rewards_pays(posts: bool, key: str, reward: float, tmp_path: Path) -> None:
    code = f"""
import os, pathlib
def solve(task, address):
    ask(address)
    assert not pathlib.Path(".asked").exists()
    assert ("MTGRPO_REWARDS_KEY" in os.environ) == {posts} == bool(address.rewards_key)
    for key in ("OPENAI_API_KEY", "{key}"):
        headers = {{"authorization": f"Bearer {{os.environ[key]}}"}}
        request = urllib.request.Request(f"{{address.openai_url}}/rewards", b'{{"reward": 0.75}}', headers)
        try:
            urllib.request.urlopen(request).close()
        except urllib.error.HTTPError as error:
            error.close()
            assert error.code == 401
"""
    agent = Python(function=written(tmp_path, code), isolation=Isolation.process, posts_rewards=posts)
    trajectory = one(agent, tmp_path, ["#### 1"])
    assert (trajectory.status, trajectory.reason, trajectory.reward) == (Status.COMPLETED, "", reward)


async def test_a_process_gets_metadata_that_json_lacks_as_text(tmp_path: Path) -> None:
    code = "def solve(task, address):\n    return task.metadata['made']\n"
    agent = Python(function=written(tmp_path, code), isolation=Isolation.process)
    made = datetime(2024, 1, 2)
    assert (await agent.run(replace(TASK, metadata={"made": made}), Address("http://x", "k"))).output == str(made)


async def test_a_prompt_that_is_too_long_for_an_argument_is_said_to_be() -> None:
    task = replace(TASK, messages=(Message("user", "x" * 140_000),))
    with pytest.raises(ValueError, match=r"has 131072 bytes or more: give \{prompt\} in agent\.files"):
        await Command(argv=["true", "{prompt}"]).run(task, Address("http://x", "k"))


def test_a_command_that_fails_says_how(tmp_path: Path) -> None:
    trajectory = one(Command(argv=[sys.executable, "-c", "print('no key'); raise SystemExit(3)"]), tmp_path)
    assert trajectory.status is Status.FAILED
    assert trajectory.reason.endswith("ended with exit code 3: no key")


@pytest.mark.parametrize("environment", [{}, {"PATH": "/nowhere"}])
def test_a_command_that_is_not_there_is_said_when_it_is_opened(environment: dict[str, str], tmp_path: Path) -> None:
    agent = Command(argv=["sh" if environment else "absent-agent", "{prompt}"], environment=environment)
    with pytest.raises(ConfigError, match=r"agent.argv: there is no program (sh|absent-agent); install it"):
        one(agent, tmp_path)


def test_an_agent_that_is_killed_is_run_again_and_never_trained(tmp_path: Path) -> None:
    code = "import os\ndef solve(task, address):\n    ask(address)\n    os.kill(os.getpid(), 9)\n"
    agent = Python(function=written(tmp_path, code), isolation=Isolation.process)
    trajectory = one(agent, tmp_path, retries=1)
    assert (trajectory.status, trajectory.attempts, trajectory.turns) == (Status.FAILED, 2, [])
    assert "ended with exit code -9" in trajectory.reason


def test_nothing_is_said_of_what_an_agents_own_tools_answered(tmp_path: Path) -> None:
    (found, ours) = (group_of(scripted([[CALL, ANSWER]]), tmp_path, by) for by in (python("with_openai"), None))
    of_results = {"tool_error_rate", "tool_timeouts", "tool_retries", "tool_outages"}
    assert describe([ours], 1.0, 1).keys() - describe([found], 1.0, 1).keys() == of_results
    assert describe([found], 1.0, 1)["tool_rate"] == 1.0
    assert describe_tools(found.trajectories, 1.0) == {
        "tool/calculator/calls": 1.0,
        "tool/calculator/success_with": 1.0,
    }


def test_names_that_a_model_makes_up_are_no_metrics(tmp_path: Path) -> None:
    made_up = CALL.replace("calculator", "calculator_2")
    found = group_of(scripted([[made_up, ANSWER]]), tmp_path, python("with_openai"))
    assert found.trajectories[0].tool_calls == 1 and describe_tools(found.trajectories, 1.0) == {}


# --- which turns are trained


def test_what_helpers_say_is_trained_unless_only_the_main_conversation_is(tmp_path: Path) -> None:
    code = """
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
def solve(task, address):
    ask(address, "one", tools=[TOOL])
    ask(address, "title?")
    ask(address, "two", tools=[TOOL])
def first(trajectory):
    return [number == 0 for number in range(len(trajectory.turns))]
"""
    function = written(tmp_path, code)
    scripts = ["#### 1", "#### 2", "#### 391"]
    chosen = {"all": [0, 1, 2], "main": [0, 2], f"{function.rpartition(':')[0]}:first": [0]}
    for train, expected in chosen.items():
        left = iter(scripts)
        engine = ScriptedEngine(lambda key, turn, left=left: said(next(left)))
        (trajectory,) = group_of(engine, tmp_path, Python(function=function, train=train)).trajectories
        texts = [turn.message.content for turn in trajectory.turns]
        assert texts == [scripts[number] for number in expected]
        assert len(trajectory.turns) + len(trajectory.untrained) == 3
        assert trajectory.counts["auxiliary"] == 1
        assert (trajectory.reward, trajectory.final) == (1.0, "#### 391")  # the last of the main conversation


# --- settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("agent=python", r"agent.function= names no function: give agent.function=path/to/file.py:name"),
        ("agent=command", r"agent.argv is empty"),
        ("agent.max_requests=9", "agent.max_requests=9 has no effect: choose an agent, such as agent=python"),
        (f"agent=python agent.function={AGENTS}:nothing", "has no 'nothing'"),
        (f"agent=python agent.function={AGENTS}:echo agent.train=some", "agent.train=some is none of all, main"),
        (
            f"agent=python agent.function={AGENTS}:echo trainer.deterministic=true",
            "whether agent Python will",
        ),
        (f"agent=python agent.function={AGENTS}:echo condenser=drop_oldest", "set condenser=none"),
        (f"agent=python agent.function={AGENTS}:echo agent.max_requests=0", "agent.max_requests must be >= 1"),
        (
            f"agent=python agent.function={AGENTS}:echo agent.posts_rewards=true",
            "of reward Numeric; set reward=environ",
        ),
        ("agent.posts_rewards=true", "agent.posts_rewards=true has no effect"),
        ("agent=verifiers agent.posts_rewards=true", "agent.posts_rewards=true has no effect"),
        (f"agent=python agent.function={AGENTS}:echo agent.environment={{A:b}}", "has no effect in a thread"),
    ],
)
def test_settings_that_make_no_sense_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(parse(words.split()))


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["environment.tools=[calculator]"], True),
        (["environment.tools=[]"], False),
        ([], False),  # the recipe's
        (["environment.tools=[calculator]", "sft.steps=50"], False),  # the warm start shows calls of them
    ],
)
def test_tools_beside_an_agent_are_noted(words: list[str], noted: bool) -> None:
    agent = ["agent=python", f"agent.function={AGENTS}:echo"]
    for chosen, says in ((agent, noted), ([], False)):
        loader = ExperimentLoader()
        loader.load_configuration("base", ["recipe=calculator", *chosen, *words], RunMode.RUN)
        assert any("environment.tools has no effect on training" in note for note in loader.notes) is says


def test_rewards_that_are_posted_take_the_place_of_the_environments() -> None:
    words = ["agent=python", f"agent.function={AGENTS}:echo", "agent.posts_rewards=true", "reward=environment"]
    assert compose(parse(words)).experiment.agent.posts_rewards


def test_an_agent_is_not_deterministic() -> None:
    experiment = compose(parse(["agent=python", f"agent.function={AGENTS}:echo"])).experiment
    assert not experiment.deterministic
    assert compose(parse([])).experiment.deterministic


@pytest.mark.real
def test_a_checkpoint_is_served(tmp_path: Path) -> None:
    words = ["sft.steps=1", "trainer.steps=1", "rollout.prompts_per_step=1", "eval.tasks=1", "eval.samples=1"]
    words += ["rollout.group_size=2", "sampling.max_new_tokens=8", "log=[jsonl]"]
    with pytest.raises(SystemExit) as done:
        cli.main(["train", *words, f"hydra.run.dir={tmp_path}/run"])
    assert done.value.code == 0
    command = [sys.executable, "-m", "mtgrpo", "serve", f"checkpoint={tmp_path}/run/checkpoints/step_000001"]
    command += ["log=[console]", f"hydra.run.dir={tmp_path}/served"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as serving:
        assert serving.stdout is not None
        told: dict[str, str] = {}
        while "MTGRPO_MODEL" not in told:
            line = serving.stdout.readline()
            assert line, "it ended"
            told.update(re.findall(r"export (\w+)=(\S+)", line))
        with OpenAI(base_url=told["OPENAI_BASE_URL"], api_key=told["OPENAI_API_KEY"]) as client:
            asked = [{"role": "user", "content": "hi"}]
            replies = [client.chat.completions.create(model="any", messages=asked, max_tokens=5) for _ in range(2)]
        assert all(reply.usage.completion_tokens >= 1 for reply in replies)
        serving.send_signal(signal.SIGINT)
        serving.stdout.read()
    assert serving.returncode in (0, 130)
