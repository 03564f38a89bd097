"""Mistakes in one's own code: the message is one or two lines that name the file, the line and what was expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Run

HEAD = """\
from dataclasses import dataclass
from pathlib import Path
from mtgrpo.advantages import AdvantageEstimator, Assigned
from mtgrpo.algorithms import Algorithm, Baseline, PerToken
from mtgrpo.condensers import Condenser, messages_of
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.log import Sink
from mtgrpo.rewards import Reward
from mtgrpo.tasks import IndexedStream, TaskSource
from mtgrpo.tools import Tool
from mtgrpo.types import Message, Task, ToolCall


"""


def of_class(base: str, body: str) -> str:
    """A file of a user's own: a class `Own`, derived from `base`."""
    return f"{HEAD}@dataclass\nclass Own({base}):\n{body}"


def environment(start: str = "", step: str = "") -> str:
    """An environment with one mistake."""
    right_start = "    async def start(self, task):\n        return Opening(task.messages)\n"
    right_step = "    async def step(self, message):\n        return Reply((Message('user', 'go on'),))\n"
    return of_class("Environment", (start or right_start) + (step or right_step))


def algorithm(baseline: str = "", loss: str = "") -> str:
    """An algorithm with one mistake."""
    right_baseline = "    def baseline(self, returns, group):\n        return Baseline(returns * 0, returns * 0 + 1)\n"
    right_loss = "    def loss(self, tokens):\n        return PerToken(-tokens.logp, tokens.logp > 0)\n"
    return of_class("Algorithm", (baseline or right_baseline) + (loss or right_loss))


def sink(log: str) -> str:
    """A sink with a mistake in `log`."""
    rest = "    def stage(self, name, total): pass\n    def note(self, text): pass\n"
    return of_class("Sink", rest + log)


ENVIRONMENT, REWARD, ALGORITHM = "environment=own.py:Own", "reward=own.py:Own", "algorithm=own.py:Own"
CONDENSER = "condenser=own.py:Own condenser.when=every_turn environment=world.py:Own"
ADVANTAGE, TASK = "advantage=own.py:Own", "task=own.py:Own"
TOOL = "environment.tools=[own.py:tool]"
SAID = '{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]}\n'
STEP = "    def stream(self, split, seed, repeat=True):\n        "

CALLING = f"{TASK} {TOOL} sft.steps=1"


def calling(body: str, here: str = "") -> str:
    """A tool with one mistake, and a task whose demonstration calls it."""
    task = (
        f"{STEP}return IndexedStream(None, lambda i: Task(str(i), (Message('user', split.value),), '1'), seed)\n"
        "    def demonstration(self, task, seed):\n        call = ToolCall('tool', {'number': 1})\n"
        "        said = Message('assistant', tool_calls=(call,)), Message('tool', '1')\n"
        "        return *said, Message('assistant', '#### 1')\n"
    )
    return f"{of_class('TaskSource', task)}\n\ndef tool(number: int) -> str:{here}\n    'Says it.'\n{body}"


# What is wrong: the options, the file (the line that is meant ends with `# here`), and what the message says.
BROKEN: dict[str, tuple[str, str, str]] = {
    "a syntax error": (REWARD, "def reward(:  # here\n", "SyntaxError"),
    "an import that fails": (REWARD, "import nowhere_at_all  # here\n", "No module named 'nowhere_at_all'"),
    "a tool without types": (TOOL, "def tool(number):  # here\n    '''Says it.'''\n    return number\n", "annotat"),
    "an environment whose start is not async": (
        ENVIRONMENT,
        environment(start="    def start(self, task):  # here\n        return Opening(task.messages)\n"),
        "async def start",
    ),
    "an environment that opens with messages": (
        ENVIRONMENT,
        environment(start="    async def start(self, task):  # here\n        return task.messages\n"),
        "give an Opening",
    ),
    "an environment that fails to start": (
        ENVIRONMENT,
        environment(start="    async def start(self, task):\n        return self.pages[0]  # here\n"),
        "has no attribute 'pages'",
    ),
    "an environment whose step is not async": (
        ENVIRONMENT,
        environment(step="    def step(self, message):  # here\n        return Reply(done=True)\n"),
        "async def step",
    ),
    "an environment that replies nothing": (
        ENVIRONMENT,
        environment(step="    async def step(self, message):  # here\n        self.seen = message\n"),
        "gave None; give a Reply",
    ),
    "an environment that replies a message": (
        ENVIRONMENT,
        environment(step="    async def step(self, message):  # here\n        return Message('user', 'well')\n"),
        "give a Reply",
    ),
    "an environment that replies a message in no tuple": (
        ENVIRONMENT,
        environment(step="    async def step(self, message):\n        return Reply(Message('user', 'well'))  # here\n"),
        "messages must be a tuple such as (Message('user', 'text'),)",
    ),
    "an environment that pays in words": (
        ENVIRONMENT,
        environment(step="    async def step(self, message):  # here\n        return Reply(done=True, reward='1')\n"),
        "give a Reply with a finite reward",
    ),
    "an environment that fails": (
        ENVIRONMENT,
        environment(step="    async def step(self, message):\n        return {}[message.content]  # here\n"),
        "KeyError",
    ),
    "an environment that exits": (
        ENVIRONMENT,
        environment(step="    async def step(self, message):\n        raise SystemExit('no key')  # here\n"),
        "SystemExit: no key",
    ),
    "a tool that exits where it starts": (
        "sft.steps=0 environment.tools=[own.py:Own]",
        of_class(
            "Tool",
            "    async def start(self, task):\n        raise SystemExit  # here\n\n"
            '    def __call__(self) -> str:\n        """What there is."""\n        return ""\n',
        ),
        "SystemExit (",
    ),
    "a task that exits": (
        TASK,
        of_class(
            "TaskSource",
            STEP + "raise SystemExit('no key')  # here\n",
        ),
        "SystemExit: no key",
    ),
    "a reward that fails": (
        REWARD,
        of_class("Reward", "    def reward(self, trajectory):\n        return 1 / 0  # here\n"),
        "ZeroDivisionError: division by zero",
    ),
    "a reward of nothing": (
        REWARD,
        of_class("Reward", "    def reward(self, trajectory):  # here\n        trajectory.final.strip()\n"),
        "gave None; give a finite number",
    ),
    "a reward that is NaN": (
        REWARD,
        of_class("Reward", "    def reward(self, trajectory):  # here\n        return float('nan')\n"),
        "gave nan; give a finite number",
    ),
    "rewards that are too few": (
        REWARD,
        of_class("Reward", "    async def rewards(self, siblings):  # here\n        return [1.0]\n"),
        "give one for each",
    ),
    "a condenser that drops the opening": (
        CONDENSER,
        of_class(
            "Condenser",
            "    async def condense(self, conversation):  # here\n        return list(conversation.steps[-1])\n",
        ),
        "must begin with the opening",
    ),
    "a condenser that is not async": (
        CONDENSER,
        of_class(
            "Condenser", "    def condense(self, conversation):  # here\n        return list(conversation.opening)\n"
        ),
        "async def condense",
    ),
    "a condenser that gives nothing": (
        CONDENSER,
        of_class("Condenser", "    async def condense(self, conversation):  # here\n        conversation.opening\n"),
        "give a list of messages",
    ),
    "a condenser that fails": (
        "condenser=own.py:Own",
        of_class(
            "Condenser",
            "    async def condense(self, conversation):\n        return list(conversation.messages)  # here\n",
        ),
        "condenser Own fails: AttributeError",
    ),
    "an algorithm whose loss fails": (
        ALGORITHM,
        algorithm(loss="    def loss(self, tokens):\n        return PerToken(tokens.logits, None)  # here\n"),
        "has no attribute 'logits'",
    ),
    "an algorithm whose loss is one number": (
        ALGORITHM,
        algorithm(loss="    def loss(self, tokens):  # here\n        return -tokens.logp.mean()\n"),
        "give a PerToken",
    ),
    "an algorithm whose baseline is a number": (
        ALGORITHM,
        algorithm(baseline="    def baseline(self, returns, group):  # here\n        return returns.mean()\n"),
        "give a Baseline",
    ),
    "an advantage that fails": (
        ADVANTAGE,
        of_class(
            "AdvantageEstimator",
            "    def assign(self, rewards, algorithm, values=None):\n"
            "        return Assigned(rewards.outcome.view(3, 5)[rewards.turn])  # here\n",
        ),
        "RuntimeError",
    ),
    "an advantage of trajectories": (
        ADVANTAGE,
        of_class(
            "AdvantageEstimator",
            "    def assign(self, rewards, algorithm, values=None):  # here\n        return rewards.outcome\n",
        ),
        "give an Assigned",
    ),
    "a sink that fails": (
        "log=[console,own.py:Own]",
        sink("    def log(self, metrics, step):\n        print(metrics['reward'])  # here\n"),
        "KeyError",
    ),
    "tasks that are mappings": (
        TASK,
        of_class("TaskSource", STEP + "return IndexedStream(None, lambda i: {'prompt': '1 + 1'}, seed)  # here\n"),
        "give a Task",
    ),
    "tasks that cannot be made": (
        TASK,
        of_class("TaskSource", STEP + "return IndexedStream(None, lambda i: Task(i, rows[i]), seed)  # here\n"),
        "name 'rows' is not defined",
    ),
    "tasks in a list": (
        TASK,
        of_class(
            "TaskSource",
            "    def stream(self, split, seed, repeat=True):  # here\n        return []\n",
        ),
        "give a TaskStream, such as IndexedStream",
    ),
    "held-out tasks that are not given": (
        TASK,
        of_class(
            "TaskSource",
            "    def stream(self, split, seed, repeat=True):  # here\n"
            "        task = Task('a', (Message('user', '1 + 1'),), '2')\n"
            "        return IndexedStream(1, lambda i: task, seed, repeat) if split.value == 'train' else None\n",
        ),
        "for Split.eval too give a TaskStream, such as IndexedStream",
    ),
    "a grader of demonstrations that divides by zero": (
        REWARD,
        of_class(
            "Reward",
            "    def reward(self, trajectory):\n" + "        return 1 / (trajectory.final.count('#') - 4)  # here\n",
        ),
        "fails for the demonstration of task calculator/",
    ),
    "a tool that cannot begin what is demonstrated": (
        "sft.demonstrations=said.jsonl sft.steps=1 environment.tools=[own.py:Own]",
        of_class(
            "Tool",
            "    async def start(self, task):\n        self.stock = {'calculator': 1}[task.id[:10]]  # here\n\n"
            '    def __call__(self) -> str:\n        """What there is."""\n        return self.stock\n',
        ),
        "the demonstration of task said/",
    ),
    "a tool whose specs are dicts": (
        "sft.steps=0 environment.tools=[own.py:Own]",
        of_class(
            "Tool",
            "    def specs(self):  # here\n        return [{'name': 'get'}]\n\n"
            "    async def call(self, name, arguments):\n        return ''\n",
        ),
        "give a list of ToolSpec(name, description, parameters)",
    ),
    "a tool whose specs are one": (
        "sft.steps=0 environment.tools=[own.py:Own]",
        of_class(
            "Tool",
            "    def specs(self):  # here\n        return {'name': 'get'}\n\n"
            "    async def call(self, name, arguments):\n        return ''\n",
        ),
        "give a list of ToolSpec(name, description, parameters)",
    ),
    "a tool whose stop is not async": (
        "sft.steps=0 environment.tools=[own.py:Own]",
        of_class(
            "Tool",
            "    def stop(self):  # here\n        pass\n\n"
            '    def __call__(self) -> str:\n        """What there is."""\n        return ""\n',
        ),
        "write it as `async def stop`",
    ),
    "a task whose prompt is a text": (
        TASK,
        of_class("TaskSource", STEP + "return IndexedStream(None, lambda i: Task('a', '1?'), seed)  # here\n"),
        "messages must be a tuple such as (Message('user', 'text'),), got '1?'",
    ),
    "a task whose answer is a number": (
        TASK,
        of_class(
            "TaskSource",
            STEP + "return IndexedStream(None, lambda i: Task('a', (Message('user', '1'),), 1), seed)  # here\n",
        ),
        "the answer of task a must be a text, got 1",
    ),
    "a demonstration that is a text": (
        f"{TASK} sft.steps=1",
        of_class(
            "TaskSource",
            STEP
            + "return IndexedStream(None, lambda i: Task(str(i), (Message('user', '1'),), '1'), seed)\n"
            + "    def demonstration(self, task, seed):  # here\n        return '#### 1'\n",
        ),
        "give messages, such as (Message('assistant', 'text'),), or None",
    ),
    "a loss without a gradient": (
        ALGORITHM,
        algorithm(loss="    def loss(self, t):  # here\n        return PerToken(t.advantage, t.advantage > 0)\n"),
        "its loss must have a gradient by `logp`",
    ),
    "a tool whose start takes no task": (
        "sft.demonstrations=said.jsonl sft.steps=1 environment.tools=[own.py:Own]",
        of_class(
            "Tool",
            "    async def start(self):  # here\n        self.stock = '1'\n\n"
            '    def __call__(self) -> str:\n        """What there is."""\n        return self.stock\n',
        ),
        "the tool Own: start(self) must be start(self, task)",
    ),
    "a reward of nothing for a wrong answer": (
        f"{REWARD} sft.steps=0",
        of_class(
            "Reward",
            "    def reward(self, trajectory):  # here\n"
            "        if trajectory.final.endswith(trajectory.task.answer):\n            return 1.0\n",
        ),
        "gave None; give a finite number",
    ),
    "a reward that misreads calls": (
        f"{REWARD} sft.steps=1",
        of_class(
            "Reward",
            "    def reward(self, trajectory):\n        calls = trajectory.calls\n"
            "        return float(any(call.arguments for call in calls))  # here\n",
        ),
        "fails for the demonstration of task calculator/",
    ),
    "a tool that fails at every call": (
        CALLING,
        calling("    return number['x']  # here\n"),
        "the tool tool failed: TypeError: 'int' object is not subscriptable",
    ),
    "a tool that gives nothing": (
        CALLING,
        calling("    str(number)\n", here="  # here"),
        "tool gave None; give what the model reads",
    ),
    "a baseline of one return": (
        ALGORITHM,
        algorithm(baseline="    def baseline(self, returns, group):  # here\n        return Baseline(returns[:1])\n"),
        "give a Baseline",
    ),
    "a demonstration that is one message": (
        f"{TASK} sft.steps=1",
        of_class(
            "TaskSource",
            STEP
            + "return IndexedStream(None, lambda i: Task(str(i), (Message('user', '1'),), '1'), seed)\n"
            + "    def demonstration(self, task, seed):  # here\n        return (Message('assistant', '#### 1'))\n",
        ),
        "give messages, such as",
    ),
    "a demonstration whose call stands alone": (
        f"{TASK} sft.steps=1",
        of_class(
            "TaskSource",
            STEP
            + "return IndexedStream(None, lambda i: Task(str(i), (Message('user', '1'),), '1'), seed)\n"
            + "    def demonstration(self, task, seed):\n"
            + "        return (Message('assistant', tool_calls=ToolCall('tool', {})),)  # here\n",
        ),
        "tool_calls must be a tuple such as",
    ),
    "a demonstration whose calls are dicts": (
        f"{TASK} sft.steps=1",
        of_class(
            "TaskSource",
            STEP
            + "return IndexedStream(None, lambda i: Task(str(i), (Message('user', '1'),), '1'), seed)\n"
            + "    def demonstration(self, task, seed):\n"
            + "        return (Message('assistant', tool_calls=({'name': 'tool'},)),)  # here\n",
        ),
        "tool_calls must be a tuple such as",
    ),
    "a demonstration that begins with the question": (
        f"{TASK} sft.steps=1",
        of_class(
            "TaskSource",
            STEP
            + "return IndexedStream(None, lambda i: Task(str(i), (Message('user', '1'),), '1'), seed)\n"
            + "    def demonstration(self, task, seed):  # here\n"
            + "        return *task.messages, Message('assistant', '#### 1')\n",
        ),
        "give what follows the task's own messages",
    ),
    "a condenser that gives dicts": (
        "condenser=own.py:Own",
        of_class(
            "Condenser",
            "    async def condense(self, conversation):  # here\n        return [{'role': 'user'}]\n",
        ),
        "give a list of messages",
    ),
    "a reward that takes what another library gives": (
        REWARD,
        of_class("Reward", "    def reward(self, prompts, completions):  # here\n        return 1.0\n"),
        "own.py:Own: reward(self, prompts, completions) must be reward(self, trajectory)",
    ),
    "a tool that cannot begin a training task": (
        "task=jsonl task.path=rows.jsonl task.val_files=[stock.jsonl] environment.tools=[own.py:Own] reward=length",
        of_class(
            "Tool",
            "    async def start(self, task):\n        self.stock = task.metadata['stock']  # here\n\n"
            '    def __call__(self) -> str:\n        """What there is."""\n        return self.stock\n',
        ),
        "task rows/",
    ),
    "demonstrations that fail": (
        f"{TASK} sft.steps=1",
        of_class(
            "TaskSource",
            STEP
            + "return IndexedStream(None, lambda i: Task(str(i), (Message('user', '1'),), '1'), seed)\n"
            + "    def demonstration(self, task, seed):\n"
            + "        return (Message('assistant', task.metadata['worked']),)  # here\n",
        ),
        "KeyError: 'worked'",
    ),
}
SMALL = [
    *("trainer.steps=1", "sft.steps=0", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.tasks=1"),
    *("sampling.max_new_tokens=64", "eval.samples=1", "environment.max_turns=3", "log=[jsonl]", "rollout.retries=0"),
    "model.name=tiny",
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
]


# What shows only while a run goes on takes a second each; the others are refused before a model is loaded.
RUNNING = ("an environment", "rewards", "a sink", "demonstrations")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.real] if name.startswith(RUNNING) else []) for name in BROKEN]
)
def test_it_names_the_file_and_the_line(name: str, run: Run, place: Path) -> None:
    words, source, said = BROKEN[name]
    Path("own.py").write_text(source)
    Path("world.py").write_text(environment())
    Path("said.jsonl").write_text(SAID * 40)
    Path("rows.jsonl").write_text('{"prompt": "1?"}\n' * 40)
    Path("stock.jsonl").write_text('{"prompt": "1?", "stock": "1"}\n')
    (line,) = [number for number, text in enumerate(source.splitlines(), 1) if text.endswith("# here")]
    code, out, err = run("train", *SMALL, *words.split(), "hydra.run.dir=run")
    told = err if code else out  # a sink that fails is left out
    assert code == (0 if "sink" in name else 2 if not name.startswith(RUNNING) else code or 1)
    assert said in told
    assert f"{Path.cwd()}/own.py" in told and f"line {line}" in told
    assert len(err.splitlines()) <= 2
    if code == 1:
        assert "own.py" in Path("run/traceback.txt").read_text()


SENSIBLE = {
    "a condenser that reads what it asked for": (
        "condenser=own.py:Own",
        of_class(
            "Condenser",
            "    async def condense(self, conversation):\n        import json\n"
            "        said = json.loads((await conversation.ask(Message('user', '?'))).content)\n"
            "        return [*conversation.opening, Message('user', said)]\n",
        ),
    ),
    "a condenser that opens what it asks": (
        "condenser=own.py:Own",
        of_class(
            "Condenser",
            "    def open(self, context):\n        raise NotImplementedError\n\n"
            "    async def condense(self, conversation):\n        return self.client.shorter(conversation)\n",
        ),
    ),
    "a condenser that adds a word": (
        "condenser=own.py:Own condenser.max_condensed_tokens=64",
        of_class(
            "Condenser",
            "    async def condense(self, conversation):\n"
            "        return [*conversation.opening, Message('user', 'What was before is left out. ' * 9)]\n",
        ),
    ),
    "a tool that may give None": (CALLING, calling("    return None\n").replace("-> str", "-> str | None")),
    "a tool that is called once": (
        CALLING,
        calling("    return number['x']\n\n\ntool.idempotent = False\n"),
    ),
    "a tool that reads what is no number": (CALLING, calling("    return str(int('one'))\n")),
    "a tool that is out of reach": (CALLING, calling("    raise ConnectionError('not from here')\n")),
}


@pytest.mark.parametrize("name", SENSIBLE)
def test_what_is_no_mistake_is_left_to_the_run(name: str, run: Run, place: Path) -> None:
    words, source = SENSIBLE[name]
    Path("own.py").write_text(source)
    code, out, err = run("train", *SMALL, *words.split(), "--dry-run")
    differs = "mtgrpo: the demonstration of task 0 has '1' where the tool tool answers 'None'\n"
    fails = "mtgrpo: the demonstration of task 0: the tool tool failed: ValueError: invalid literal for int()"
    assert code == 0 and out.startswith("no fault found")
    assert err.startswith(fails) if "number" in name else err == (differs if "None" in name else "")
    assert ("nor your own tools tried" in out) is ("once" in name)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("trajectory.final == '#### 1'", ""),
        (
            "trajectory.final == trajectory.task.answer",
            "pays the first 20 demonstrations at most 0, and success takes reward.success_at=1: what imitates",
        ),
        ("1", "pays an empty answer 1, which is a success"),
    ],
)
def test_what_a_reward_pays_demonstrations_is_looked_at(reward: str, said: str, run: Run, place: Path) -> None:
    source = calling("    return '1'\n") + "\n\n@dataclass\nclass Paid(Reward):\n"
    Path("own.py").write_text(f"{source}    def reward(self, trajectory):\n        return float({reward})\n")
    code, out, err = run("train", *SMALL, *CALLING.split(), "reward=own.py:Paid", "--dry-run")
    assert code == 0 and out.startswith("no fault found") and (said in err if said else err == "")


def test_held_out_tasks_of_ones_own_that_are_trained_are_noted(run: Run, place: Path) -> None:
    Path("own.py").write_text(calling("    return '1'\n").replace("split.value", "'1?'"))
    code, _, err = run("train", *SMALL, *CALLING.split(), "--dry-run")
    assert code == 0 and "1 of 1 held-out tasks are training tasks too, such as 0" in err


def test_a_task_that_is_another_each_time_is_noted(run: Run, place: Path) -> None:
    drawn = calling("    return '1'\n").replace("split.value", "str(__import__('random').random())")
    Path("own.py").write_text(drawn)
    code, _, err = run("train", *SMALL, *CALLING.split(), "--dry-run")
    assert code == 0 and "task 0 is another each time it is made, so no two runs measure the same: draw from" in err


@pytest.mark.parametrize(
    ("asked", "left_out", "said"),
    [
        ("1?", None, ""),
        (
            "1?",
            3,
            "the demonstration of task said/1 ends with a message of role tool: the policy does not see how to go on",
        ),
        (
            "1?",
            2,
            "the demonstration of task said/1 makes 1 calls and has 0 answers: a message of role tool belongs after",
        ),
        ("1?", 1, "the demonstration of task said/1 makes 0 calls and has 1 answers: a message of role tool belongs"),
        ("1?", -2, "the demonstration of task said/1 has a message of role user between a call and its answer"),
        (
            "what? " * 2000,
            None,
            "tokens or more, of which none is learned from: raise batch.token_budget or environment.m",
        ),
    ],
)
def test_what_a_demonstration_lacks_is_noted(
    asked: str, left_out: int | None, said: str, run: Run, place: Path
) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "tool", "arguments": {"number": 1}}]}
    answers = [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "#### 1"}]
    messages = [{"role": "user", "content": asked}, call, *answers]
    shown = [message for number, message in enumerate(messages) if number != left_out]
    if left_out == -2:
        shown.insert(2, {"role": "user", "content": "Go on."})
    Path("said.jsonl").write_text(json.dumps({"messages": shown}) + "\n")
    Path("own.py").write_text("def tool(number: int) -> str:\n    'Says it.'\n    return '1'\n")
    words = "sft.steps=1 sft.demonstrations=said.jsonl environment.tools=[own.py:tool]"
    code, out, err = run("train", *SMALL, *words.split(), "--dry-run")
    assert code == 0 and out.startswith("no fault found") and (said in err if said else not err)


@pytest.mark.parametrize("seed", range(3))
def test_the_calls_of_demonstrations_are_looked_at_though_most_guess(run: Run, place: Path, seed: int) -> None:
    asked = {"role": "user", "content": "What is 1 + 1?"}
    guess = [asked, {"role": "assistant", "content": "#### 5"}]
    call = {"function": {"name": "calculater", "arguments": {"expression": "1 + 1"}}}
    wrong = [asked, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}, *guess[1:]]
    rows = [{"messages": wrong if number == 40 else guess} for number in range(64)]
    Path("said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run("train", *SMALL, f"seed={seed}", "sft.steps=1", "sft.demonstrations=said.jsonl", "--dry-run")
    assert code == 2 and "calls calculater(expression): there is no such tool; did you mean calculator?" in err


@pytest.mark.parametrize("seed", range(4))
def test_one_row_of_a_file_that_cannot_be_laid_out_is_left_out_whatever_the_seed(
    run: Run, place: Path, seed: int
) -> None:
    twice = [json.loads(SAID)["messages"][i] for i in (0, 1, 1)]
    Path("said.jsonl").write_text(SAID * 3 + json.dumps({"messages": twice}) + "\n")
    words = (*SMALL, f"seed={seed}", "sft.steps=1", "sft.demonstrations=said.jsonl", "environment=single_turn")
    code, _, err = run("train", *words, "--dry-run")
    assert code == 0, err
    Path("said.jsonl").write_text((json.dumps({"messages": twice}) + "\n") * 4)
    code, _, err = run("train", *words, "--dry-run")
    assert code == 2 and "two messages of the assistant in a row" in err


def test_a_demonstration_longer_than_what_may_be_sampled_is_noted(run: Run, place: Path) -> None:
    Path("said.jsonl").write_text(SAID.replace('"1"}]', f'"{"well " * 99}"}}]') + SAID)
    code, out, err = run("train", *SMALL, "sft.steps=1", "sft.demonstrations=said.jsonl", "--dry-run")
    told = "of 2 demonstrations 1 have turns longer than sampling.max_new_tokens=64, as said/1: what imitates them"
    assert code == 0 and told in err and ", which is no success; set it to " in err
    assert out.startswith("no fault found that stops a run (see the notes above), and nothing was run")


def test_a_demonstration_of_more_turns_than_may_be_is_noted(run: Run, place: Path) -> None:
    words = (*SMALL, "sft.steps=1", "environment.max_turns=1", "--dry-run")
    code, _, err = run("train", *words)
    told = "have more turns than environment.max_turns=1, as calculator/"
    assert code == 0 and told in err and ": what imitates them is cut, which is no success; set it to " in err
    assert "max_turns" not in run("train", *words, "environment.max_turns=8")[2]


@pytest.mark.parametrize(
    ("answer", "reward", "said"),
    [
        ("1", "numeric", "none of 1 demonstration has an answer where it is looked for: reward=numeric reads"),
        ("#### 1", "numeric", ""),
        ("11", "em", "reward EM pays the first 1 demonstration at most 0, and success takes reward.success_at=1"),
        ("1", "em", ""),
    ],
)
def test_demonstrations_that_their_reward_does_not_pay_are_noted(
    answer: str, reward: str, said: str, run: Run, place: Path
) -> None:
    row = {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": answer}], "answer": "1"}
    Path("said.jsonl").write_text(f"{json.dumps(row)}\n")
    words = ["sft.steps=1", "sft.demonstrations=said.jsonl", f"reward={reward}", "--dry-run"]
    code, _, err = run("train", *SMALL, *words)
    assert code == 0 and (said in err if said else err == "")


@pytest.mark.parametrize(("answer", "said"), [("The number is 1", "at most -0.02, and success takes"), ("#### 1", "")])
@pytest.mark.parametrize("known", [True, False])
def test_demonstrations_that_a_reward_of_ones_own_does_not_pay_are_noted(
    answer: str, said: str, known: bool, run: Run, place: Path
) -> None:
    messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": answer}]
    row = {"messages": messages} | ({"answer": "1"} if known else {})
    Path("said.jsonl").write_text(f"{json.dumps(row)}\n")
    reward = "float(trajectory.final == f'#### {trajectory.task.answer}') - 0.02"
    source = calling("    return '1'\n") + "\n\n@dataclass\nclass Paid(Reward):\n    success_at: float = 0.5\n"
    Path("own.py").write_text(f"{source}    def reward(self, trajectory):\n        return {reward}\n")
    words = ["sft.steps=1", "sft.demonstrations=said.jsonl", "reward=own.py:Paid", "--dry-run"]
    code, _, err = run("train", *SMALL, *words)
    assert code == 0 and (said in err if said and known else err == "")  # without an answer it cannot say


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ("any(call['name'] == 'tool' for call in trajectory.calls)", "TypeError: 'CallRecord' object is not subscr"),
        ("any(call.name == 'tool' for call in trajectory.calls)", ""),
        ("trajectory.task.answer or trajectory.task.metadata['only in tasks']", ""),
    ],
)
def test_a_reward_that_fails_for_calls_of_demonstrations_is_noted(looks: str, said: str, run: Run, place: Path) -> None:
    guess = {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "#### 1"}]}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "tool", "arguments": {"number": 1}}]}
    answer = {"role": "tool", "name": "tool", "content": "1"}
    calls = {"messages": [guess["messages"][0], call, answer, guess["messages"][1]]}
    Path("said.jsonl").write_text(f"{json.dumps(guess)}\n" * 6 + json.dumps(calls) + "\n")
    source = calling("    return '1'\n") + "\n\n@dataclass\nclass Paid(Reward):\n"
    lacks = "        if not (trajectory.task.answer or trajectory.calls):\n            raise TaskError('no row')\n"
    source = f"from mtgrpo.errors import TaskError\n{source}    def reward(self, trajectory):\n{lacks}"
    Path("own.py").write_text(f"{source}        return float({looks})\n")
    for name in ("tasks.jsonl", "held.jsonl"):
        Path(name).write_text("".join(f'{{"prompt": "{name} {n}?", "answer": "{n}"}}\n' for n in range(4)))
    files = ["task=jsonl", "task.path=tasks.jsonl", "task.val_files=[held.jsonl]", "sft.demonstrations=said.jsonl"]
    code, _, err = run("train", *SMALL, *files, TOOL, "sft.steps=1", "reward=own.py:Paid", "--dry-run")
    assert code == 0, err
    assert (f"reward Paid fails for 1 of 1 demonstration tried: said/7: {said}" in err) is bool(said)
    assert said or "fails" not in err


def test_calls_under_another_name_are_refused(run: Run, place: Path) -> None:
    call = {"role": "assistant", "content": "", "function_call": {"name": "tool", "arguments": "{}"}}
    Path("said.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1?"}, call]}) + "\n")
    code, _, err = run("train", *SMALL, "sft.steps=1", "sft.demonstrations=said.jsonl", "--dry-run")
    assert code == 2 and "line 1, message 2: function_call is not read; here it is tool_calls, a list of calls" in err


def test_a_demonstration_that_would_end_within_is_refused(run: Run, place: Path) -> None:
    said = [{"role": "assistant", "content": "Let me see."}, {"role": "assistant", "content": "#### 1"}]
    Path("said.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1?"}, *said]}) + "\n")
    code, _, err = run("train", *SMALL, "sft.steps=1", "sft.demonstrations=said.jsonl", "--dry-run")
    assert code == 2 and "of task said/1 has two messages of the assistant in a row, of which" in err


def test_a_demonstration_without_its_return_is_refused(run: Run, place: Path) -> None:
    Path("own.py").write_text(calling("    return '1'\n").replace("return *said, Message(", "*said, Message("))
    code, _, err = run("train", *SMALL, *CALLING.split(), "--dry-run")
    assert code == 2 and "in a row; let Own.demonstration return messages, or set sft.steps=0" in err


def test_rows_that_cannot_be_graded_are_noted(run: Run, place: Path) -> None:
    rows = ({"prompt": f"{n}?", "answer": "many" if n > 29 else str(n)} for n in range(39))
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("held.jsonl").write_text('{"prompt": "77?", "answer": "77"}\n')
    words = ["task=jsonl", "task.path=rows.jsonl", "task.val_files=[held.jsonl]"]
    code, _, err = run("train", *SMALL, *words, "--dry-run")
    assert code == 0 and "9 of the first 40 tasks cannot be graded, correct them or leave them out: task rows/3" in err


def test_what_a_row_of_demonstrations_lacks_for_calls_is_noted(run: Run, place: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "Own", "arguments": {}}]}
    said = [{"role": "user", "content": "1?"}, call, {"role": "tool", "content": "1"}]
    Path("said.jsonl").write_text(json.dumps({"messages": [*said, {"role": "assistant", "content": "1"}]}) + "\n")
    tool = "    async def start(self, task):\n        self.row = task.metadata\n\n"
    tool += "    def __call__(self) -> str:\n        'What there is.'\n        return self.row['stock']\n"
    Path("own.py").write_text(of_class("Tool", tool))
    words = ["sft.demonstrations=said.jsonl", "sft.steps=1", "environment.tools=[own.py:Own]", "--dry-run"]
    code, _, err = run("train", *SMALL, *words)
    assert code == 0 and "the tool Own failed: KeyError: 'stock'" in err
    assert "its row has nothing beside `messages`: give it the columns of its task" in err


def test_a_condenser_is_tried_in_three_turns(run: Run, place: Path) -> None:
    body = "    async def condense(self, conversation):\n        print('steps', len(conversation.steps))\n"
    Path("own.py").write_text(
        of_class("Condenser", f"{body}        return messages_of(conversation.opening, conversation.steps)\n")
    )
    out = run("train", *SMALL, "condenser=own.py:Own", "--dry-run")[1]
    assert out.startswith("steps 1\nsteps 2\nsteps 3\nno fault found")
