"""The journal: what is read back is what was written, or less; conversations and batches go on where they were."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gzip
import random
import shutil
import subprocess
import tracemalloc
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtgrpo import journal
from mtgrpo.engines import Key
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.journal import Journal
from mtgrpo.model import tiny
from mtgrpo.rewards import Reward
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import RolloutSettings
from mtgrpo.rollout.stream import RolloutBatch, Stream
from mtgrpo.tasks import IndexedStream
from mtgrpo.types import (
    CallOutcome,
    CallRecord,
    Completion,
    Finish,
    Group,
    Message,
    Status,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from scripted import ScriptedEngine
from test_conversation import make_runner

STOP = tiny.load_tokenizer().eos_token_id
HELLO = Message("user", "hello\ud800")  # a lone surrogate
CALLED = Message("assistant", "so", "hm", (ToolCall("add", {"a": [1, {"b": None}], "c": 0.1}),), error="twice")


def group_of(task: Task) -> Group:
    """One with everything that a trajectory can have."""
    first = Turn([1, 2], [3, STOP], [-0.1 - 1e-17, -1e-300], [4, 5], Finish.STOP, CALLED)
    first.observations, first.paid, first.kept = (HELLO,), 0.5, [array("i", [3, 9]), array("i", [])]
    second = Turn([7], [8], [-1 / 3], [5], Finish.LENGTH, Message("assistant"), parent=0, auxiliary=True)
    third = Turn([1, 2, 3, STOP, 7, 8, 9], [6], [-2.0], [6], Finish.STOP, Message("assistant", "new segment"))
    turns = [first, second, third]
    whole = Trajectory(task, 1, turns, Status.TRUNCATED, "max_turns", 0.25, {"format": 1.0}, [0.0, 0.25, 0.5])
    whole.calls = (
        CallRecord("add", CallOutcome.outage, 2, 0.5, "the tool add failed"),
        CallRecord("", CallOutcome.refused),
    )
    whole.sample_s, whole.attempts = 1.5, 2
    return Group(task, [whole, Trajectory(task, 2, status=Status.FAILED, reason="TimeoutError")], 0.75)


def part(folder: Path, version: int = 0) -> Path:
    return folder / f"step_{version:06d}.jsonl.gz"


def resumed(folder: Path, version: int = 0, first: int = 0, passed: Sequence[int] = ()) -> Journal:
    found = Journal(folder)
    found.go_on(version, first, set(passed))
    return found


# --- the file


def append(own: Journal, version: int, *events: dict[str, Any], together: int = 1) -> None:
    """Write events, so many of them at once."""

    async def write() -> None:
        own.begin(version)
        for number, event in enumerate(events, 1):
            own.add(**event)
            if number % together == 0:
                own._write()
        own.close()

    asyncio.run(write())


def written(folder: Path, version: int = 0, groups: int = 3, together: int = 1) -> Path:
    """A part with the events of `groups` groups and of a batch."""
    events: list[dict[str, Any]] = []
    for number in range(groups):
        task, scope = Task(f"t{number}", ()), f"train/{version + 1}"
        events.append({"admitted": number, "version": version, "scope": scope, "task": task.id})
        group = group_of(task)
        for turn, said in enumerate(group.trajectories[0].turns):
            key = {"turn": turn, "scope": f"{scope}/attempt1", "task": task.id, "sample": 1}
            sampled = Completion(said.output, said.logprobs, said.versions, said.finish, said.kept)
            context = said.new_context[-2:] if turn < 2 else [9]
            events.append({**key, "extends": True, "context": context, "completion": sampled})
        events.append({"finished": number, "group": group})
    append(Journal(folder), version, *events, {"batch": version, "groups": list(range(groups))}, together=together)
    return part(folder, version)


def test_a_group_comes_back_as_it_was(tmp_path: Path) -> None:
    written(tmp_path)
    found = resumed(tmp_path)
    for number in range(3):
        task = Task(f"t{number}", (HELLO,), "7", {"more": 1})
        assert found.group(number, task) == group_of(task)
        assert found.group(number, task) is None
    assert found.batch(0) == [0, 1, 2] and found.batch(0) is None


def test_a_conversation_that_ended_earlier_the_second_time_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path, groups=1)
    group = group_of(Task("t0", ()))
    del group.trajectories[0].turns[1:]
    append(resumed(tmp_path), 0, {"finished": 0, "group": group})
    assert path.exists()
    found = resumed(tmp_path).group(0, Task("t0", ()))
    assert found is not None and found.trajectories[0].turns == group.trajectories[0].turns


def test_people_can_read_it(tmp_path: Path) -> None:
    path = written(tmp_path)
    events = list(journal.read(path))
    assert [next(iter(event)) for event in events] == ["admitted", "turn", "turn", "turn", "finished"] * 3 + ["batch"]
    if shutil.which("zcat") is None:
        pytest.skip("there is no zcat")
    shown = subprocess.run(["zcat", path], capture_output=True, check=True).stdout
    assert shown.count(b"\n") == 16 and shown.endswith(b'{"batch": 0, "groups": [0, 1, 2]}\n')


@pytest.mark.parametrize("together", [1, 5])
def test_whatever_a_kill_cuts_is_cut_off_and_written_on(together: int, tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", together=together).read_bytes()
    events = list(journal.read(part(tmp_path / "whole")))
    counts: list[int] = []
    for length in range(0, len(whole), 7):
        folder = tmp_path / str(length)
        folder.mkdir()
        part(folder).write_bytes(whole[:length])
        append(resumed(folder), 0, {"batch": 0, "groups": []})
        left = list(journal.read(part(folder)))
        assert left[:-1] == events[: len(left) - 1] and left[-1] == {"batch": 0, "groups": []}
        counts.append(len(left))
    assert counts == sorted(counts) and set(counts) == set(range(1, 17, together))


@pytest.mark.parametrize("together", [1, 3])
def test_damaged_journals_are_never_loaded_silently(together: int, tmp_path: Path) -> None:
    """Of 500 each: what is read is what was written up to some event; where anything is left out, that is said."""
    whole = written(tmp_path / "whole", together=together).read_bytes()
    events = list(journal.read(part(tmp_path / "whole")))
    draw = random.Random(0)
    for number in range(500):
        content = bytearray(whole)
        if number % 3:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content)) :]
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        part(folder).write_bytes(content)
        read = list(journal.read(part(folder)))
        assert read == events[: len(read)]
        found = resumed(folder)
        assert len(read) == len(events) or any("are cut or damaged" in note for note in found.notes) or not number % 3
        assert not part(folder).exists() or list(journal.read(part(folder))) == read


@pytest.mark.parametrize("text", [b" " * 2**26, b"[" * 2**26, b'{"skipped": 1}\n' * 2**22])
def test_what_unpacks_to_more_than_a_run_writes_is_refused_within_little_memory(text: bytes, tmp_path: Path) -> None:
    part(tmp_path).write_bytes(gzip.compress(text, 1))
    assert part(tmp_path).stat().st_size < 2**21
    tracemalloc.start()
    try:
        for read in (lambda: list(journal.read(part(tmp_path))), lambda: resumed(tmp_path)):
            with pytest.raises(ConfigError, match=r"step_000000.jsonl.gz unpacks to more than a run writes"):
                read()
        assert tracemalloc.get_traced_memory()[1] < 4 * journal._MOST
    finally:
        tracemalloc.stop()


def test_what_is_too_long_to_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MOST", 1000)
    own = Journal(tmp_path)
    append(own, 0, *({"skipped": number} for number in range(500)), together=500)
    assert [event["skipped"] for event in journal.read(part(tmp_path))] == list(range(500))
    append(own, 0, {"skipped": 7, "why": "x" * 1000})
    assert "an event has 1,0" in own.notes[0] and len(list(journal.read(part(tmp_path)))) == 500


NUMBERS: dict[str, Any] = {"admitted": 10**18, "version": 0, "scope": "train/1", "task": "t"}
STRANGE = [
    NUMBERS | {"admitted": "3"},
    NUMBERS | {"scope": 3},
    NUMBERS | {"task": ["t"]},
    {"skipped": {}},
    {"batch": 0, "groups": 3},
    {"batch": 0, "groups": [[1]]},
    {"batch": [0], "groups": [1]},
    {"finished": "x", "group": {}},
    {"turn": "0", "scope": "s", "task": "t", "sample": 0},
    {"turn": 0, "scope": ["s"], "task": "t", "sample": 0, "extends": True, "completion": {}},
    {"turn": 0},
]


@pytest.mark.parametrize("event", [NUMBERS, *STRANGE], ids=lambda event: str(event)[:40])
def test_events_of_any_shape_are_left_out_or_lead_nowhere(event: dict[str, Any], tmp_path: Path) -> None:
    append(Journal(tmp_path), 0, event)
    found = resumed(tmp_path)
    assert len(found.notes) == 1 and found.admitted(event.get("finished", 0)) is None


def test_what_follows_damage_is_removed(tmp_path: Path) -> None:
    for version in range(3):
        written(tmp_path, version)
    content = part(tmp_path, 1).read_bytes()
    part(tmp_path, 1).write_bytes(content[:200] + b"\0" * 10 + content[210:])
    found = resumed(tmp_path, 0)
    assert any("step_000001.jsonl.gz" in note and "cut or damaged" in note for note in found.notes)
    assert part(tmp_path, 0).exists() and not part(tmp_path, 2).exists()
    assert found.batch(0) == [0, 1, 2] and found.batch(1) is None


@pytest.mark.parametrize("lost", [0, 1])
def test_a_journal_that_does_not_lead_on_is_removed(lost: int, tmp_path: Path) -> None:
    for version in range(3):
        written(tmp_path, version)
    part(tmp_path, lost).unlink()
    found = resumed(tmp_path, 0)
    assert found.batch(1) is None and found.batch(2) is None
    assert not part(tmp_path, 2).exists()


def test_a_journal_without_the_groups_of_its_batches_says_whose_it_is(tmp_path: Path) -> None:
    append(
        Journal(tmp_path), 0, *({"admitted": n, "version": 0, "scope": "train/1", "task": f"t{n}"} for n in range(2))
    )
    append(Journal(tmp_path), 0, {"batch": 0, "groups": [0, 1]})
    (note,) = resumed(tmp_path).notes
    assert "2 groups that were trained are not in it; resume_mode=exact keeps none" in note
    assert not part(tmp_path).exists()


def test_events_of_another_shape_are_refused(tmp_path: Path) -> None:
    events = [{"admitted": 0, "version": 0, "scope": "train/1", "task": "t0"}]
    events.append({"finished": 0, "group": {"trajectories": [{"turns": 5}], "score_s": 0.0}})
    append(Journal(tmp_path), 0, *events, {"somebody": "wrote this"})
    found = resumed(tmp_path)
    assert any("cut or damaged" in note for note in found.notes)
    with pytest.raises(ConfigError, match=r"has no group 0 as runs write it; use resume_mode=exact"):
        found.group(0, Task("t0", ()))


async def test_what_is_added_is_written_soon_and_the_rest_at_the_end(tmp_path: Path) -> None:
    own = Journal(tmp_path)
    own.begin(0)
    own.add(batch=0, groups=[1])
    own.add(batch=0, groups=[2])
    assert not list(journal.read(part(tmp_path)))
    while not (found := list(journal.read(part(tmp_path)))):
        await asyncio.sleep(journal.TOGETHER_S / 10)
    assert [event["groups"] for event in found] == [[1], [2]]
    own.add(batch=0, groups=[3])
    own.begin(1)
    own.add(batch=1, groups=[4])
    own.close()
    assert [event["groups"] for number in (0, 1) for event in journal.read(part(tmp_path, number))] == [
        [1],
        [2],
        [3],
        [4],
    ]


def test_only_what_is_needed_stays(tmp_path: Path) -> None:
    for version in range(5):
        written(tmp_path, version)
    Journal(tmp_path).prune(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [part(tmp_path, v).name for v in (3, 4)]
    Journal(tmp_path).clear()
    assert not list(tmp_path.iterdir())


def test_what_json_cannot_hold_ends_the_journal_not_the_run(tmp_path: Path) -> None:
    own = Journal(tmp_path)
    append(own, 0, {"batch": 0, "groups": []}, {"batch": 0, "groups": {(1, 2): 3}}, {"batch": 0, "groups": []})
    assert len(own.notes) == 1 and "nothing more is written" in own.notes[0]
    assert list(journal.read(part(tmp_path))) == [{"batch": 0, "groups": []}]


def test_a_full_disk_ends_the_journal_not_the_run(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    own = Journal(tmp_path)
    part(tmp_path).symlink_to(full)
    append(own, 0, {"batch": 0, "groups": []})
    assert len(own.notes) == 1 and "No space left on device" in own.notes[0]
    append(own, 1, {"batch": 1, "groups": []})
    assert len(own.notes) == 1 and not part(tmp_path, 1).exists()


# --- conversations


@dataclasses.dataclass
class Countdown(Environment):
    """Answers with the number of turns that are left; `twist` changes what it answers at that turn."""

    turns: int = 4
    twist: int = -1
    side_effects: bool = False
    told: list[str] = dataclasses.field(default_factory=list[str])  # shared by all conversations

    @property
    def replayable(self) -> bool:
        return not self.side_effects

    async def start(self, task: Task) -> Opening:
        self._left = self.turns
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        self.told.append(message.content)
        self._left -= 1
        text = f"{self._left} left" + (", I say" if self._left == self.twist else "")
        return Reply((Message("user", text),), done=not self._left, reward=0.5)


class Length(Reward):
    """The number of sampled tokens."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(trajectory.sampled_tokens)


def runner(engine: ScriptedEngine, environment: Environment, own: Journal) -> RolloutRunner:
    made = make_runner(engine, environment, retries=0, max_new_tokens=20)
    recorded = own.recording(made.open_conversation, environment.replayable)
    return dataclasses.replace(made, reward=Length(), open_conversation=recorded)


def script(key: Key, turn: int) -> list[int]:
    """Other tokens in every turn of every conversation."""
    return [300 + (hash((key.sample_index, turn)) % 500), STOP]


def cut_off(folder: Path, environment: Environment, turns: int) -> None:
    """Two siblings, of which the process dies when the engine is asked for its turn number `turns`, from 0."""
    asked = 0

    def dying(key: Key, turn: int) -> list[int]:
        nonlocal asked
        asked += 1
        if asked > turns:
            raise EngineError("the process is gone")
        return script(key, turn)

    own = Journal(folder)
    append(own, 0, {"admitted": 0, "version": 0, "scope": "train/1", "task": "t"})
    own.begin(0)
    group = asyncio.run(runner(ScriptedEngine(dying), environment, own).run_group(Task("t", (HELLO,)), 2))
    assert any(trajectory.status is Status.FAILED for trajectory in group.trajectories)
    own.close()


def tokens_of(group: Group) -> list[list[tuple[list[int], list[int]]]]:
    return [[(turn.new_context, turn.output) for turn in t.turns] for t in group.trajectories]


def gone_on(folder: Path, environment: Environment) -> tuple[Group, ScriptedEngine, Journal]:
    own, engine = resumed(folder), ScriptedEngine(lambda key, turn: script(key, turn))
    own.begin(0)
    group = asyncio.run(runner(engine, environment, own).run_group(Task("t", (HELLO,)), 2))
    own.close()
    return group, engine, own


@pytest.mark.parametrize("turns", [1, 3, 5, 7])
def test_a_conversation_goes_on_at_its_last_turn(turns: int, tmp_path: Path) -> None:
    cut_off(tmp_path, Countdown(), turns)
    known = {(e["sample"], e["turn"]): e["completion"]["tokens"] for e in journal.read(part(tmp_path)) if "turn" in e}
    assert len(known) == turns
    environment = Countdown()
    group, engine, _ = gone_on(tmp_path, environment)
    assert len(engine.asked) == 8 - turns
    assert len(environment.told) == 8, "the environment is told everything again"
    for trajectory in group.trajectories:
        assert trajectory.status is Status.COMPLETED and trajectory.turn_rewards == [0.5] * 4
        for number, turn in enumerate(trajectory.turns):
            if tokens := known.get((trajectory.sample_index, number)):
                assert turn.output == tokens
    scopes = {key.scope for key, _ in engine.asked if any(key.sample_index == sample for sample, _ in known)}
    assert all("/turn" in scope for scope in scopes), "with random numbers of its own"
    everything = Counter((e["sample"], e["turn"]) for e in journal.read(part(tmp_path)) if "turn" in e)
    assert set(everything.values()) == {1} and len(everything) == 8, "nothing is sampled twice, or written down twice"


def test_where_the_environment_answers_otherwise_the_rest_is_sampled_anew(tmp_path: Path) -> None:
    cut_off(tmp_path, Countdown(), 7)
    group, engine, own = gone_on(tmp_path, Countdown(twist=2))  # the second answer
    assert len(engine.asked) == 8 - 4  # two turns of each are as before
    assert sum("answers otherwise than before" in note for note in own.notes) == 2
    for trajectory in group.trajectories:
        assert "I say" in trajectory.turns[1].observations[0].content and len(trajectory.turns) == 4
    again, engine, _ = gone_on(tmp_path, Countdown(twist=2))
    assert not engine.asked and tokens_of(again) == tokens_of(group), "what was sampled anew is what counts"


def test_what_cannot_be_replayed_starts_again_and_is_told(tmp_path: Path) -> None:
    cut_off(tmp_path, Countdown(side_effects=True), 5)
    group, engine, own = gone_on(tmp_path, Countdown(side_effects=True))
    assert len(engine.asked) == 8 and all(t.status is Status.COMPLETED for t in group.trajectories)
    assert sum("cannot be replayed: it starts again" in note for note in own.notes) == 2


def test_tools_say_whether_a_call_may_be_made_again(tmp_path: Path) -> None:
    lines = ('"""Does it."""', "return what")
    for name in ("look", "buy"):
        (tmp_path / f"{name}.py").write_text("\n    ".join([f"def {name}(what: str) -> str:", *lines]) + "\n")
    with (tmp_path / "buy.py").open("a") as file:
        file.write("buy.idempotent = False\n")
    assert ToolUse(tools=[f"{tmp_path}/look.py:look"]).replayable
    assert not ToolUse(tools=[f"{tmp_path}/look.py:look", f"{tmp_path}/buy.py:buy"]).replayable
    assert ToolUse(tools={"python": {"stateful": True}}).replayable  # a new interpreter is given the same code


# --- batches


class Playing:
    """In the place of a runner: a group of task t takes `seconds[t]`, and fails at `fails` for the first time."""

    def __init__(self, seconds: Sequence[float], started: list[str]) -> None:
        self.seconds, self.started = seconds, started

    def at(self, scope: str) -> Playing:
        own = copy.copy(self)
        own.scope = scope
        return own

    async def run_group(self, task: Task, size: int, extra: int) -> Group:
        self.started.append(task.id)
        await asyncio.sleep(self.seconds[int(task.id) % len(self.seconds)])
        return Group(task, [Trajectory(task, reason=f"{self.scope} of {len(self.started)}")])


def outcome(batch: RolloutBatch) -> list[tuple[str, str, int]]:
    """Tasks, when they ran, and when they were admitted."""
    reasons = [(group.task.id, group.trajectories[0].reason) for group in batch.groups]
    return [(*reason, admitted) for reason, admitted in zip(reasons, batch.admitted, strict=True)]


@asynccontextmanager
async def streaming(folder: Path, seconds: Sequence[float], batch: int, staleness: int) -> AsyncGenerator[Any]:
    started: list[str] = []
    tasks = IndexedStream(None, lambda index: Task(str(index), ()), seed=0)
    rollout = RolloutSettings(prompts_per_step=batch, max_staleness=staleness)
    stream = Stream(Playing(seconds, started), tasks, rollout, journal=Journal(folder))  # pyright: ignore
    try:
        yield stream, started
    finally:
        await stream.close()


@given(st.data(), st.lists(st.floats(0.0, 0.004), min_size=1, max_size=9), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=25)
def test_batches_come_again_as_they_were_and_groups_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seconds: list[float], batch: int, staleness: int
) -> None:
    """A trainer that is killed at any version and goes on from a checkpoint before it, again and again."""
    folder = tmp_path_factory.mktemp("journal")

    async def live(state: dict[str, Any] | None, version: int, until: int, save_at: int) -> Any:
        async with streaming(folder, seconds, batch, staleness) as (stream, _):
            if state is not None:
                stream.load_state_dict(state)
                stream.go_on(version)
            found: dict[int, Any] = {}
            for now in range(version, until):
                if now == save_at:
                    saved = stream.state_dict()
                found[now] = outcome(await stream.batch(now))
                await asyncio.sleep(0.001)
            return found, saved

    first: dict[int, Any] = {}
    state, version, until = None, 0, 0
    for _ in range(4):
        until += data.draw(st.integers(1, 4))
        save_at = data.draw(st.integers(version, until - 1))
        found, saved = asyncio.run(live(state, version, until, save_at))
        for now, batched in found.items():
            assert first.setdefault(now, batched) == batched, "trained again as it was"
            assert all(0 <= now - admitted <= staleness for _, _, admitted in batched)
        state, version = saved, save_at
    tasks = Counter(task for batched in first.values() for task, _, _ in batched)
    assert set(tasks.values()) == {1}
    due = {str(number) for number in range((until - staleness) * batch)}
    assert due <= tasks.keys()


def test_other_data_is_refused(tmp_path: Path) -> None:
    async def run(name: str, resume: bool) -> None:
        tasks = IndexedStream(None, lambda index: Task(f"{name}{index}", ()), seed=0)
        rollout = RolloutSettings(prompts_per_step=1)
        stream = Stream(Playing([0.0], []), tasks, rollout, journal=Journal(tmp_path))  # pyright: ignore
        try:
            if resume:
                stream.go_on(0)
            await stream.batch(0)
        finally:
            await stream.close()

    asyncio.run(run("1", False))
    with pytest.raises(ConfigError, match="the run had task 10 where the data has 20 now"):
        asyncio.run(run("2", True))
