"""Which tasks are run again, by the success that the run has measured of them."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtgrpo.errors import ConfigError
from mtgrpo.journal import Journal
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import Curriculum, Difficulty, RolloutSettings
from mtgrpo.rollout.stream import RolloutBatch, Stream
from mtgrpo.tasks import IndexedStream, hashed
from mtgrpo.types import Group, Status, Task, Trajectory

SIZE = 8


class Policy:
    """In the place of a runner: sibling n of task t succeeds with the chance `skill[t]`."""

    scope = ""

    def __init__(self, skill: Sequence[float]) -> None:
        self.skill = skill

    def at(self, scope: str) -> Policy:
        own = Policy(self.skill)
        own.scope = scope
        return own

    async def run_group(self, task: Task, size: int, extra: int) -> Group:
        await asyncio.sleep(0)
        drawn = [hashed(f"{self.scope}/{task.id}/{n}") / 2**64 for n in range(size)]
        rewards = [float(one < self.skill[int(task.id)]) for one in drawn]
        return Group(task, [Trajectory(task, n, reward=reward) for n, reward in enumerate(rewards)])


def make_stream(
    skill: Sequence[float], curriculum: Curriculum, staleness: int = 0, folder: Path | None = None
) -> Stream:
    tasks = IndexedStream(len(skill), lambda index: Task(str(index), ()), seed=3)
    rollout = RolloutSettings(prompts_per_step=4, group_size=SIZE, max_staleness=staleness)
    runner = cast(RolloutRunner, Policy(skill))
    return Stream(runner, tasks, rollout, journal=Journal(folder), difficulty=Difficulty(curriculum, 1.0, seed=5))


def played(stream: Stream, versions: range, saves: Callable[[int, Any], None] | None = None) -> list[RolloutBatch]:
    async def play() -> list[RolloutBatch]:
        found: list[RolloutBatch] = []
        for version in versions:
            if saves:
                saves(version, stream.state_dict())
            found.append(await stream.batch(version))
        await stream.close()
        return found

    return asyncio.run(play())


def keep(states: dict[int, str], version: int, state: Any) -> None:
    states[version] = json.dumps(state)


def rewards(batch: RolloutBatch) -> list[tuple[str, list[float]]]:
    return [(group.task.id, [t.reward for t in group.trajectories]) for group in batch.groups]


def test_the_chance_is_greatest_at_a_half() -> None:
    curriculum = Curriculum(easy=0.1, hard=0.4)
    assert [curriculum.chance(share) for share in (0.0, 0.5, 1.0)] == [0.4, 1.0, pytest.approx(0.1)]
    assert curriculum.chance(0.25) == pytest.approx(0.4 + 0.6 * 0.75)
    assert curriculum.chance(0.75) == pytest.approx(0.1 + 0.9 * 0.75)
    assert all(Curriculum().chance(share / 8) == 1.0 for share in range(9))


@pytest.mark.parametrize("wrong", [{"easy": 0.0}, {"hard": 1.5}, {"easy": float("nan")}])
def test_chances_are_no_others_than_chances(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be > 0 and <= 1 \(1 = always run\)"):
        Curriculum(**wrong)


def test_without_a_curriculum_nothing_is_measured_or_skipped() -> None:
    stream = make_stream([1.0] * 6, Curriculum())
    assert [batch.skipped for batch in played(stream, range(9))] == [0] * 9
    assert stream.state_dict()["success"] == {}


def test_more_groups_have_something_to_compare() -> None:
    """Of 60 tasks 20 are always solved, 20 never, and 20 half the time."""
    skill = [1.0, 0.0, 0.5] * 20
    plain = played(make_stream(skill, Curriculum()), range(150))
    chosen = played(make_stream(skill, Curriculum(easy=0.1, hard=0.2)), range(150))

    def share(batches: Sequence[RolloutBatch]) -> float:
        differ = [len(set(given)) > 1 for batch in batches for _, given in rewards(batch)]
        return sum(differ) / len(differ)

    assert share(plain) == pytest.approx(1 / 3, abs=0.02)
    assert share(chosen[15:]) == pytest.approx(1 / (1 + 0.1 + 0.2), abs=0.06)  # once all tasks have been measured
    assert {name for batch in chosen[:15] for name, _ in rewards(batch)} == {str(n) for n in range(60)}
    often = Counter(name for batch in chosen[15:] for name, _ in rewards(batch))
    easy, hard = (sum(often[str(n)] for n in range(of, 60, 3)) for of in (0, 1))
    assert 0 < easy < hard, "and neither is given up"
    assert sum(batch.skipped for batch in chosen) > 0


def test_what_was_measured_last_counts() -> None:
    difficulty = Difficulty(Curriculum(easy=1e-9), 1.0, 0)
    task = Task("7", ())

    def group(*given: float, status: Status = Status.COMPLETED) -> Group:
        return Group(task, [Trajectory(task, n, reward=r, status=status) for n, r in enumerate(given)])

    assert not difficulty.skips(task, 0)  # new
    difficulty.measure([group(1.0, 1.0)])
    assert difficulty.skips(task, 1) and not difficulty.skips(Task("8", ()), 1)
    difficulty.measure([group(0.0, 0.0, status=Status.FAILED)])  # which says nothing
    assert difficulty.skips(task, 1)
    difficulty.measure([group(1.0, 0.0)])
    assert difficulty.success == {"7": 0.5} and not difficulty.skips(task, 1)
    difficulty.measure([group(1.0, 1.0, status=Status.TRUNCATED)])  # no success, whatever it is worth
    assert difficulty.success == {"7": 0.0}


SKILLS = st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=3, max_size=12)


@given(SKILLS, st.sampled_from([0.05, 0.3]), st.integers(0, 11))
@settings(max_examples=30)
def test_a_run_that_was_saved_goes_on_with_the_same_tasks(skill: list[float], least: float, at: int) -> None:
    curriculum, states = Curriculum(easy=least, hard=least), dict[int, str]()
    whole = played(
        make_stream(skill, curriculum), range(12), lambda now, saved: states.update({now: json.dumps(saved)})
    )
    resumed = make_stream(skill, curriculum)
    resumed.load_state_dict(json.loads(states[at]))
    after = played(resumed, range(at, 12))
    assert [rewards(batch) for batch in after] == [rewards(batch) for batch in whole[at:]]
    assert [batch.skipped for batch in after] == [batch.skipped for batch in whole[at:]]
    assert resumed.state_dict()["success"]


@given(SKILLS, st.data(), st.integers(0, 2))
@settings(max_examples=20)
def test_a_run_that_was_killed_trains_the_same_batches_again(
    tmp_path_factory: pytest.TempPathFactory, skill: list[float], data: st.DataObject, staleness: int
) -> None:
    """Killed at any version, it goes on from a checkpoint before it, with the journal, again and again."""
    folder, curriculum = tmp_path_factory.mktemp("journal"), Curriculum(easy=0.1, hard=0.3)
    known: dict[int, Any] = {}
    state, version, until = None, 0, 0
    for _ in range(4):
        until += data.draw(st.integers(1, 4))
        stream, states = make_stream(skill, curriculum, staleness, folder), dict[int, str]()
        if state:
            stream.load_state_dict(json.loads(state))
            stream.go_on(version)
        run = range(version, until)
        batches = played(stream, run, functools.partial(keep, states))
        for now, batch in zip(run, batches, strict=True):
            found = [(*one, admitted) for one, admitted in zip(rewards(batch), batch.admitted, strict=True)]
            assert known.setdefault(now, found) == found, "trained again as it was"
            assert all(0 <= now - admitted <= staleness for admitted in batch.admitted)
        version = data.draw(st.integers(version, until - 1))
        state = states[version]


async def test_groups_under_way_are_not_judged_again() -> None:
    """What had been admitted when the run was saved is run, whatever was measured of its task since."""
    curriculum = Curriculum(easy=0.001)
    stream = make_stream([1.0] * 20, curriculum, staleness=3)
    await stream.batch(0)  # more than a batch was admitted: tasks are new
    state = stream.state_dict()
    await stream.close()
    due = set(range(state["first"], state["drawn"])) - set(state["trained"])
    assert due
    resumed = make_stream([1.0] * 20, curriculum, staleness=3)
    resumed.load_state_dict(state | {"success": {str(number): 1.0 for number in range(20)}})
    resumed._admit(1, again=False)
    assert due <= {pending.number for pending in resumed._pending}
    assert resumed._skipped > 0, "what came after them is judged"
    await resumed.close()


def test_endless_problems_are_refused(run: Callable[..., tuple[int, str, str]], place: Path) -> None:
    code, _, said = run("train", "curriculum.easy=0.2", "--dry-run")
    assert code == 2 and "makes endless problems, of which none comes up again" in said
