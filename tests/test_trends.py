"""Warnings name the setting to change, after some steps in a row, once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mtgrpo import preset
from mtgrpo.errors import RunError
from mtgrpo.evaluation.findings import TRAINED
from mtgrpo.runtime import resources
from mtgrpo.stages import trends
from mtgrpo.stages.trends import PATIENCE, WITHOUT_VARIANCE, Trends, foreseen, in_vain

FINE = {
    "reward/success": 0.4,
    "reward/groups_with_variance": 0.5,
    "rollout/truncated": 0.1,
    "rollout/tool_rate": 0.6,
    "policy/entropy": 1.0,
}


@pytest.mark.parametrize(
    ("bad", "setting"),
    [
        ({"policy/entropy": 0.05}, "algorithm.entropy_coef"),
        ({"reward/groups_with_variance": 0.0}, "rollout.group_size"),
        (
            {"reward/groups_with_variance": 0.0, "reward/success": 0.0},
            "was 0.4 once: set a third of optimizer.lr",
        ),
        ({"rollout/tool_rate": 0.05}, "in 5.0% of the conversations, once in 60%, while tasks are not solved"),
        ({"rollout/truncated": 0.8, "rollout/truncated/max_turns": 0.8}, "by a limit (max_turns): set it higher"),
    ],
)
def test_what_stays_bad_is_said_once(bad: dict[str, float], setting: str) -> None:
    watched = Trends()
    said = [watched.warnings({**FINE, **change}) for change in [{}, *[bad] * (2 * PATIENCE), {}, *[bad] * PATIENCE]]
    assert [len(texts) for texts in said] == [0] * PATIENCE + [1] + [0] * (PATIENCE + 1) + [0] * (PATIENCE - 1) + [1]
    assert setting in said[PATIENCE][0]


def test_a_policy_that_needs_no_tools_or_never_had_any_is_left_alone() -> None:
    for change in ({"reward/success": 0.9, "rollout/tool_rate": 0.0}, {"rollout/tool_rate": 0.07}):
        watched = Trends()
        assert not any(watched.warnings({**FINE, **one}) for one in [{}, *[change] * PATIENCE])
    watched = Trends()
    assert not any(watched.warnings({**FINE, "rollout/tool_rate": 0.0}) for _ in range(2 * PATIENCE))


def test_what_no_limit_cuts_wants_no_higher_limit() -> None:
    cut = {"rollout/truncated": 0.61, "rollout/truncated/policy_error": 0.6, "rollout/truncated/max_turns": 0.01}
    watched = Trends()
    assert not any(watched.warnings({**FINE, **cut}) for _ in range(2 * PATIENCE))


def test_conversations_that_wait_for_the_tools_of_others_are_said() -> None:
    for each_s, said in ((4.0, [0, 0, 1, 0]), (2.0, [0, 0, 0, 0])):  # of 9 s of a step's rollouts
        watched = Trends()
        rows = [{"time/rollout_s": 9.0, "perf/lockstep_s": waited_s} for waited_s in (0.0, *[each_s] * 3)]
        texts = [watched.warnings({**FINE, **row}) for row in rows]
        assert [len(of_step) for of_step in texts] == said
        assert each_s == 2 or "for 4.0 s all conversations waited" in texts[2][0]
        assert each_s == 2 or "trainer.deterministic=false" in texts[2][0]


def test_a_sudden_collapse_is_said_at_once() -> None:
    """Of success and entropy together: each alone falls in sound runs."""
    fallen = {"reward/success": 0.1, "policy/entropy": 0.05}
    for gone in ({}, {"policy/entropy": math.nan}):  # a step without an update has no entropy
        watched = Trends()
        said = [watched.warnings({**FINE, **change}) for change in ({}, {}, gone, fallen)]
        assert said[:-1] == [[], [], []]
        assert "the policy has collapsed: within 2 steps its success fell from 0.4 to 0.1" in said[-1][0]
    for change in ({"reward/success": 0.1}, {"policy/entropy": 0.05}):
        watched = Trends()
        assert not any(watched.warnings({**FINE, **one}) for one in ({}, {}, change))
    slow = Trends()
    falls = [{"reward/success": 0.4 * 0.8**n, "policy/entropy": 0.4**n} for n in range(PATIENCE)]
    assert not any("collapsed" in text for one in falls for text in slow.warnings({**FINE, **one}))


@pytest.mark.parametrize(("proven", "said"), [(True, [0, 0, 0, 1, 0, 0]), (False, [0] * 6)])
def test_servers_that_answer_with_other_weights_are_said(proven: bool, said: list[int]) -> None:
    watched = Trends()
    apart = (0.02, 0.03, math.nan, 0.5, 0.02, 0.04)  # in 16 bits; a step without an update has none
    engine = {"engine/proof_nats": 0.01} if proven else {}
    texts = [watched.warnings({**FINE, **engine, "policy/mismatch/worst_trajectory": nats}) for nats in apart]
    assert [len(found) for found in texts] == said
    assert not proven or "by 0.5 nats, in the steps before by at most 0.03" in texts[3][0]


def test_a_run_in_which_nothing_differed_says_so_at_its_end() -> None:
    said = in_vain({"train/steps": 3.0, WITHOUT_VARIANCE: 3.0})
    assert said.startswith("nothing was learned: in no step, of 3,") and "rollout.group_size higher" in said
    assert "choose easier tasks, more worked examples (task.examples)" in said and "harder" not in said
    solved = in_vain({"train/steps": 3.0, WITHOUT_VARIANCE: 3.0, TRAINED: 1.0})
    assert "choose harder tasks, a reward" in solved and "easier" not in solved
    assert "whether the reward pays" in said and "whether the reward pays" not in solved
    assert not in_vain({"train/steps": 3.0, WITHOUT_VARIANCE: 2.0}) and not in_vain({"train/steps": 0.0})


@pytest.mark.parametrize(
    ("share", "success", "said"),
    [(0.2, 0.1, ""), (0.0, 0.0, "task.examples=4"), (0.1, 0.0, "10.0% had"), (0.0, 1.0, "harder tasks")],
)
def test_that_hardly_a_group_will_differ_is_foreseen(share: float, success: float, said: str) -> None:
    measured = {"eval/groups_with_variance/before": share, "eval/success/before": success}
    found = foreseen(measured, preset("calculator", "rollout.prompts_per_step=8"))
    assert said in found and bool(found) is bool(said)
    assert not foreseen({"eval/success/before": 0.0}, preset("calculator"))  # of one sample each


@pytest.mark.parametrize(("success", "said"), [(0.0, "choose easier tasks, more worked"), (1.0, "choose harder tasks")])
def test_rewards_that_do_not_differ_want_easier_or_harder_tasks(success: float, said: str) -> None:
    watched, flat = Trends(), {**FINE, "reward/groups_with_variance": 0.0, "reward/success": success}
    (warning,) = [text for _ in range(PATIENCE) for text in watched.warnings(flat)]
    assert said in warning and ("harder" in warning) == (success == 1)


def test_a_task_without_demonstrations_is_not_told_to_show_them() -> None:
    measured = {"eval/groups_with_variance/before": 0.0, "eval/success/before": 0.0}
    said = foreseen(measured, preset("calculator", "task=jsonl", "sft.steps=0"))
    assert "messages of your own as task.examples" in said and "task.examples=4" not in said


def test_more_worked_examples_are_asked_for_than_there_are() -> None:
    measured = {"eval/groups_with_variance/before": 0.0, "eval/success/before": 0.0}
    assert "task.examples=6" in foreseen(measured, preset("calculator", "task.examples=3"))


def test_a_policy_that_solves_its_tasks_may_be_sure_of_itself() -> None:
    watched = Trends()
    watched.warnings(FINE)
    sure = {**FINE, "policy/entropy": 0.01, "reward/success": 0.95}
    assert not any(watched.warnings(sure) for _ in range(2 * PATIENCE))


def test_scarce_memory_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trends, "memory_left", lambda: (2**30, 2**34))
    (said,) = Trends().warnings(FINE)
    assert said.startswith("1.0 of 16.0 GiB of memory are left") and "batch.token_budget" in said


def test_what_is_left_of_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, total = resources.memory_left()
    assert 0 < left < total and resources.resident_bytes() > 2**20
    resources.check_disk(tmp_path, 1)
    with pytest.raises(RunError, match=r"for a checkpoint and its disk has .* left; make room"):
        resources.check_disk(tmp_path, 2**60)
    for name, text in (
        ("max", f"{2**30}\n"),
        ("current", f"{2**30 - 2**20}"),
        ("stat", "anon 5\ninactive_file 1024\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    assert resources.memory_left() == (2**20 + 1024, 2**30)
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.memory_left()[1] == total
