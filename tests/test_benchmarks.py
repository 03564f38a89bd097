"""What the benchmarks share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtgrpo.compose import compose, parse
from mtgrpo.extension import load_file
from mtgrpo.tasks import Split
from mtgrpo.types import Group, Status, Task, Trajectory

RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "record.py"


def test_the_machine_is_described_on_any_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = load_file(RECORD)
    monkeypatch.setattr(record.platform, "processor", lambda: "arm")
    monkeypatch.setattr(record, "CPUINFO", tmp_path / "absent")
    assert record.machine().startswith(f"arm, {os.cpu_count()} cores")
    monkeypatch.setattr(record, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast 3000\n")
    assert record.machine().startswith("Fast 3000, ")


def test_all_sides_of_the_forest_benchmark_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    forest = load_file(RECORD.parent / "forest.py")
    forest.check("2m")  # one gradient
    scenario = forest.Scenario(2, 3, 40, (10, 10), 3, observed=10)
    sides = forest.Sides("2m", scenario, forest.TOKEN_BUDGET)
    found = {side: sides.work(side) for side in forest.SIDES}
    assert found["per_turn_packed"].tokens == 6 * (49 + 69 + 89)
    assert found["per_turn_padded"].tokens == 18 * 90
    assert found["merged_padded"].tokens == 6 * 90
    assert found["forest"].tokens == 2 * 40 + 6 * 49
    assert found["forest"].flops < found["merged_padded"].flops < found["per_turn_packed"].flops


def test_the_condensation_benchmark_counts_the_tokens_of_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    condensation = load_file(RECORD.parent / "condensation.py")
    assert len(condensation.CASES) == 8
    for name in ("g1_0.5", "g1_4", "g8_4"):
        case = condensation.CASES[name]
        turns = case.siblings * case.turns
        sides = condensation.Sides("2m", case, condensation.TOKEN_BUDGET)
        # the last token of every turn is predicted, but never computed
        rows, ours = (sides.work(side).tokens + turns for side in condensation.SIDES)
        assert (rows, ours) == (turns * (case.prompt + 256), case.prompt + turns * 256)
        assert rows / ours == condensation.token_ratio(case)


def test_the_condensation_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    condensation = load_file(RECORD.parent / "condensation.py")
    small = condensation.Scenario(1, 2, 40, (10, 10), 3, observed=10, summary=5)
    found = condensation.measure("small", small, 2)  # which compares the gradients
    assert 1 < found["ideal"] < found["tokens"] and found["fraction"] > 0
    assert all(len(times) == 2 for times in found["ms"].values())
    assert "small" in capsys.readouterr().out


def test_the_head_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    head = load_file(RECORD.parent / "logprobs.py")
    table = head.times((64, 300, 8), ["full", "chunked"], 1)
    assert table["chunked"]["ratio"] > 0
    assert "chunked" in capsys.readouterr().out


def test_the_learning_benchmark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    assert "grpo" in load_file(RECORD.parent / "learning.py").ARMS


def test_the_ways_to_compute_forest_attention_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    attention = load_file(RECORD.parent / "attention.py")
    forest = attention.forests()["prompt 256, 8 x 30-250"]
    assert set(attention.measure(forest, 2, 16, 1)) == {"runs", "leaves", "mask"}  # which compares the gradients


def test_the_sampling_benchmark_plays_the_same_conversations_on_all_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    rollout = load_file(RECORD.parent / "rollout.py")
    whole = rollout.workloads(2048, quick=False)
    assert whole == rollout.workloads(2048, quick=False)
    assert len({tuple(c.prompt) for c in whole["multi_turn"]}) == 4 and len(whole["multi_turn"]) == 32
    assert len({tuple(c.prompt[:256]) for c in whole["single_turn"]}) == 1 and len(whole["single_turn"]) == 64

    shape = rollout.tiny.SHAPES["tiny"]
    rival, other = rollout.build_rival(shape), rollout.tiny.build_model(shape, 1).eval()
    ours = rollout.Ours(rollout.tiny.build_model(shape, 0).eval())
    prompt = list(range(100, 120))
    turns = [[(3, [7, 8]), (2, [9])], [(4, [5])]]
    conversations = [rollout.Conversation(0, prompt, wanted) for wanted in turns]
    for play in (
        ours.play,
        lambda given: rollout.generate(rival, given),
        lambda given: rollout.continuous_batching(rival, given),
    ):
        _, played = play(conversations)
        rollout.check(conversations, played)
        assert rollout.deviation(rival, conversations, played) < 1e-4
        assert rollout.deviation(other, conversations, played) > 1e-2
    ours.close()
    played[1][0][0].pop()
    with pytest.raises(AssertionError, match="3 tokens where 4"):
        rollout.check(conversations, played)


def test_the_benchmark_of_failing_tools_describes_what_would_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    outages = load_file(RECORD.parent / "outages.py")
    task = Task("1", ())
    right = Trajectory(task, reward=1.0, tool_calls=2, tool_retries=3)
    wrong, failed = Trajectory(task), Trajectory(task, status=Status.FAILED)
    found = outages.describe([Group(task, [right, wrong]), Group(task, [wrong, failed])] * 200)
    assert (found["failed"], found["retries"]) == (0.25, 0.75)
    mean, low, high = found["tool_rate"]
    assert mean == pytest.approx(1 / 3, abs=1e-4)
    # of the standard error of a ratio: the residuals of a pair are 1/3, of a single one -1/3, of 400 groups with 1.5
    assert (high - low) / 2 == pytest.approx(1.96 * (1 / 3) / 1.5 / 400**0.5, rel=0.1)
    assert found["push"] == [0.25, 0.25, 0.25]  # 1 - 1/2 of each pair; nothing is compared with a single one


@pytest.mark.parametrize("name", ["BENCHMARKS.md", "README.md"])
def test_the_tables_are_those_of_the_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    report = load_file(RECORD.parent / "report.py")
    text = (RECORD.parent.parent / name).read_text()
    assert report.filled(text) == text, "run `make bench-report`"
    assert report.filled(text.replace("1", "0")) != text.replace("1", "0")


def test_every_row_of_the_benchmark_against_trl_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    versus, report = load_file(RECORD.parent / "versus_trl.py"), load_file(RECORD.parent / "report.py")
    assert list(versus.CASES) == list(report.CASES)
    for case in versus.CASES.values():
        task = next(compose(parse(case.words())).experiment.task.open(Split.train, 0))
        system, _ = task.messages
        assert 0 <= len(versus.load_tokenizer().encode(system.content)) - case.system_prompt < 40
