"""What the benchmarks share."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mtgrpo.config.compose import compose, parse
from mtgrpo.engines.local import paged_attention
from mtgrpo.model import tiny
from mtgrpo.model.skeleton import Skeleton
from mtgrpo.parts.extension import load_file
from mtgrpo.runtime.resources import THREADS_SET, WAITING_SET
from mtgrpo.tasks import Split
from mtgrpo.types import CallRecord, Finish, Group, Message, Status, Task, Trajectory, Turn

EXAMPLES = ("[]", "[{role: user, content: one and two}, {role: assistant, content: it is a sum of three}]")
RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "record.py"


def test_the_machine_is_described_on_any_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    record = load_file(RECORD)
    monkeypatch.setattr(record.platform, "processor", lambda: "arm")
    monkeypatch.setattr(record, "CPUINFO", tmp_path / "absent")
    assert record.machine().startswith(f"arm, {os.cpu_count()} cores")
    monkeypatch.setattr(record, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast 3000\n")
    assert record.machine().startswith("Fast 3000, ")


def test_our_sides_begin_as_the_command_does_and_those_of_others_do_not(tmp_path: Path) -> None:
    script = tmp_path / "side.py"
    script.write_text("import json, record\nprint(json.dumps(record.OPENMP))")
    environment = {name: value for name, value in os.environ.items() if name not in THREADS_SET | WAITING_SET}
    environment["PYTHONPATH"] = os.pathsep.join((str(RECORD.parent), os.environ.get("PYTHONPATH", "")))

    def chosen(*command: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, *command], check=True, env=environment, stdout=subprocess.PIPE, text=True
        )
        return json.loads(done.stdout)

    ours = chosen(str(script))
    assert ours.keys() & THREADS_SET and ours.keys() & WAITING_SET
    assert chosen(str(RECORD.parent / "rival.py"), str(script)) == {}


def test_benchmarks_import_torch_after_the_choice_of_threads() -> None:
    begun = {"gate", "rival", "trl_side", "rollout_vllm"}  # by the command, and those of others
    for path in sorted(set(RECORD.parent.glob("*.py")) - {RECORD.parent / f"{name}.py" for name in begun}):
        found: list[str] = []
        for node in ast.parse(path.read_text()).body:
            found += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        computing = [name.partition(".")[0] in ("torch", "transformers", "trl") for name in found]
        assert True not in computing or "record" in found[: computing.index(True)], path.name


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
    right = Trajectory(task, reward=1.0, calls=[CallRecord("calculator", retries=3), CallRecord("calculator")])
    wrong, failed = Trajectory(task), Trajectory(task, status=Status.FAILED)
    found = outages.describe([Group(task, [right, wrong]), Group(task, [wrong, failed])] * 200)
    assert (found["failed"], found["retries"]) == (0.25, 0.75)
    mean, low, high = found["tool_rate"]
    assert mean == pytest.approx(1 / 3, abs=1e-4)
    # of the standard error of a ratio: the residuals of a pair are 1/3, of a single one -1/3, of 400 groups with 1.5
    assert (high - low) / 2 == pytest.approx(1.96 * (1 / 3) / 1.5 / 400**0.5, rel=0.1)
    assert found["push"] == [0.25, 0.25, 0.25]  # 1 - 1/2 of each pair; nothing is compared with a single one


def test_the_memory_benchmark_has_the_shapes_of_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    memory = load_file(RECORD.parent / "memory.py")
    for config, size in ((memory.QWEN3_1_7B, 1.72e9), (memory.QWEN3_8B, 8.19e9)):
        run = memory.experiment(config, str(tmp_path))
        weights = Skeleton(run.model, "cuda").trained
        assert sum(weight.numel() for weight in weights) == pytest.approx(size, rel=0.01)


def test_the_memory_benchmark_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    memory = load_file(RECORD.parent / "memory.py")
    run = memory.experiment("tiny", "", "batch.token_budget=512")
    memory.update_twice(run)
    found = memory.describe(memory.estimate(run, 10**9, "cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["token_budget"] == 512 and set(found["peak_gb"]) == {"sampling", "training", "update"}


def test_an_older_commit_is_compared_by_its_least_and_its_median_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    against = load_file(RECORD.parent / "against.py")
    old = [{"seconds": seconds, "tokens": 30, "threads": 2} for seconds in (3.0, 9.0, 6.0)]
    here = [{"seconds": seconds, "tokens": 40, "threads": 1} for seconds in (2.0, 5.0, 2.5)]
    assert " ".join(against.row("forest.A", old, here).split()) == "forest.A 3.000 2.000 1.50 6.000 2.500 2.40 0.75 2/1"


@pytest.mark.real
@pytest.mark.slow
def test_a_commit_against_itself_trains_the_same_tokens(tmp_path: Path) -> None:
    command = [sys.executable, str(RECORD.parent / "against.py"), "HEAD", "versus_trl.2m_280", "--repeats=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True).stdout
    name, *_, tokens, threads = said.splitlines()[-1].split()
    assert (name, tokens, threads) == ("versus_trl.2m_280", "1.00", "1/1")


@pytest.mark.real
def test_the_benchmark_of_a_decoding_step_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    monkeypatch.setattr(paged_attention, "FEW", paged_attention.FEW)
    decode_step = load_file(RECORD.parent / "decode_step.py")
    monkeypatch.setattr(sys, "argv", ["decode_step.py", "--quick"])
    decode_step.main()
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"]
    assert ratios["decode.kernels_per_layer"] == ratios["decode.kernels_per_layer_lora"]  # adapters are merged
    assert 20 < ratios["decode.kernels_per_layer"] <= 59


def test_runs_are_as_far_apart_as_the_worst_of_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    parallel = load_file(RECORD.parent / "parallel.py")

    def write(name: str, weight: float, *rows: dict[str, float]) -> Path:
        saved = tmp_path / name / "checkpoints" / "step_000001"
        saved.mkdir(parents=True)
        save_file({"weight": torch.tensor([1.0, weight], dtype=torch.float64)}, saved / "model.safetensors")
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    one = write("one", 2.0, {"sft/loss": 8.0}, {"policy/loss": 0.0, "policy/grad_norm": 0.5, "time/train_s": 1.0})
    other = write("other", 2.5, {"sft/loss": 9.0}, {"policy/loss": 0.25, "policy/grad_norm": 0.4, "time/train_s": 9.0})
    assert parallel.apart(one, other) == {"weights": 0.5, "loss": 0.25, "grad_norm": pytest.approx(0.2)}
    with pytest.raises(AssertionError, match="have trained"):
        parallel.apart(write("still", 2.0, {"sft/loss": 8.0}), write("still_too", 2.0, {"sft/loss": 8.0}))


def test_the_shares_of_ranks_are_those_of_the_worst_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    parallel = load_file(RECORD.parent / "parallel.py")
    shapes = ["one task", "deep chains beyond the budget"]
    (both,), first, second = (list(parallel.shares(part, [2]).values()) for part in (shapes, shapes[:1], shapes[1:]))
    assert both == {name: max(ratio, second[0][name]) for name, ratio in first[0].items()}
    assert all(1 <= ratio < 1.3 for ratio in both.values())


def test_what_ranks_send_is_counted_by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    sent = load_file(RECORD.parent / "parallel.py").sent
    assert sent("one_2_threads", 1, 900, 3, 3) == 0
    assert [sent(side, 3, 900, 4, 3) for side in ("ddp", "fsdp2_whole", "fsdp2_resharded")] == [1200, 1200, 6000]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_of_ranks_runs() -> None:
    command = [sys.executable, str(RECORD.parent / "parallel.py"), "--quick"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert found["ratios"]["parallel.apart"] <= 1e-12
    updates = found["detail"]["updates"]
    assert list(updates) == ["one", "one_2_threads", "ddp", "fsdp2_whole", "fsdp2_resharded"]
    assert all(side["wall_s"] > 0 and side["processor_s"] > 0 for side in updates.values())


def test_the_first_benchmark_of_a_gpu_runs_at_toy_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    first = load_file(RECORD.parent / "gpu" / "first.py")
    monkeypatch.setattr(sys, "argv", ["first.py", "--size=toy"])
    first.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("missing: ")
    line = json.loads(lines[-1])
    assert not [name for name, found in line["detail"].items() if isinstance(found, dict) and "failed" in found]
    measured = (
        "gpu.mfu",
        "gpu.mfu_checkpointed",
        "gpu.decode_of_bandwidth",
        "gpu.decode_vs_generate",
        "gpu.forest_eta",
        "gpu.forest_eta_agent",
    )
    assert all(line["ratios"][name] > 0 for name in measured)


@pytest.mark.parametrize("name", ["first", "learn"])
def test_without_a_gpu_its_benchmarks_say_so_and_find_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    module = load_file(RECORD.parent / "gpu" / f"{name}.py")
    monkeypatch.setattr(sys.modules["record"], "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    module.main(*([[]] if name == "learn" else []))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("missing: a GPU")
    found = json.loads(last)
    assert found["detail"] == {"reason": "no GPU was to be had"} and set(found["ratios"].values()) == {None}
    assert json.loads((tmp_path / f"gpu_{name}.json").read_text()) == found
    committed = json.loads((RECORD.parent / "results" / f"gpu_{name}.json").read_text())
    assert committed["ratios"].keys() == found["ratios"].keys()


@pytest.mark.slow
def test_the_learning_benchmark_of_a_gpu_runs_at_toy_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    learn = load_file(RECORD.parent / "gpu" / "learn.py")
    small = ("trainer.steps=1", "rollout.prompts_per_step=1", "rollout.group_size=2", "eval.tasks=1", "eval.samples=1")
    learn.main(["model.name=tiny", *small, "sampling.max_new_tokens=4", "task.examples=[]"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["ratios"].keys() == {"gpu.learn_gain", "gpu.learn_seconds"} and len(line["detail"]["success"]) == 1


@pytest.mark.parametrize("name", ["BENCHMARKS.md", "README.md"])
def test_the_tables_are_those_of_the_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    report = load_file(RECORD.parent / "report.py")
    text = (RECORD.parent.parent / name).read_text()
    assert report.filled(text) == text, "run `make bench-report`"
    assert report.filled(text.replace("1", "0")) != text.replace("1", "0")


def test_a_result_is_as_old_as_the_commits_to_its_code(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(RECORD.parent / "age.py", tmp_path / "benchmarks")
    age, result = load_file(tmp_path / "benchmarks" / "age.py"), tmp_path / "benchmarks" / "results" / "forest.json"
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")

    def commit(file: str, text: str) -> str:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for words in (("add", "."), (*identity, "commit", "--quiet", "--message", file)):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        return age.head()

    found = {"benchmark": "forest", "ratios": {"forest.A": 8.0}}
    result.write_text(json.dumps(found))
    assert age.age(result) == ""  # no repository
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    measured = commit("src/mtgrpo/batch/forest.py", "1")
    for commit_of_result in ({"commit": ""}, {"commit": measured}, {"commit": "abcdef1"}):  # the last was rebased away
        brought = commit("benchmarks/results/forest.json", json.dumps(found | commit_of_result))
        commit("src/mtgrpo/tools/search.py", brought)  # which forest.py does not measure
        assert age.age(result) == ""
    commit("src/mtgrpo/batch/forest.py", "2")
    commit("benchmarks/forest.py", "3")
    assert age.age(result) == f"measured at {brought}, 2 commits of its code ago"
    brought = commit("benchmarks/results/forest.json", json.dumps(found | {"commit": measured}))
    assert age.age(result) == f"measured at {measured}, 2 commits of its code ago"
    result.write_text(json.dumps(found))
    assert age.head() == brought
    (tmp_path / "benchmarks" / "forest.py").write_text("4")
    assert age.head() == f"{brought}-dirty"


def test_every_row_of_the_benchmark_against_trl_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    versus, report = load_file(RECORD.parent / "versus_trl.py"), load_file(RECORD.parent / "report.py")
    assert list(versus.CASES) == list(report.CASES)
    for case in versus.CASES.values():
        task = next(compose(parse(case.words())).experiment.task.stream(Split.train, 0))
        system, _ = task.messages
        assert 0 <= len(versus.load_tokenizer().encode(system.content)) - case.system_prompt < 40


def test_an_interval_of_success_is_wilsons_over_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    interval = load_file(RECORD.parent / "smollm2.py").interval
    alone = interval([1.0] * 8 + [0.0] * 2, samples=1)
    assert alone == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson's for 8 of 10, from a table
    assert interval([1.0] * 8 + [0.0] * 2, samples=4) == alone  # samples that are all alike add nothing
    independent = interval([0.0] * 5 + [0.5] * 10 + [1.0] * 5, samples=2)
    assert independent == pytest.approx(interval([0.0] * 20 + [1.0] * 20, samples=1))  # independent ones count in full
    assert interval([0.0] * 10, samples=4) == pytest.approx((0, 0.2775), abs=1e-4)
    assert interval([1.0] * 10, samples=4) == pytest.approx((0.7225, 1), abs=1e-4)


def test_a_gain_has_newcombes_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    smollm2 = load_file(RECORD.parent / "smollm2.py")

    def success(right: int, of: int) -> dict[str, Any]:
        return {"success": right / of, "interval": smollm2.interval([1.0] * right + [0.0] * (of - right), 1)}

    found = smollm2.gain(success(48, 80), success(56, 70))
    assert found["points"] == pytest.approx(20)
    assert found["interval"] == pytest.approx((5.24, 33.39), abs=0.01)  # Newcombe 1998, example (a), method 10


def test_the_ratios_of_a_real_model_are_of_its_worst_gain_and_best_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    smollm2 = load_file(RECORD.parent / "smollm2.py")

    def arm(points: float) -> dict[str, Any]:
        return {"gain": {"points": points}}

    recipes = {
        "one": {10: {"before": {}, "grpo": arm(44), "shuffled": arm(-3), "lora": arm(5)}, 11: {"grpo": arm(38.256)}},
        "other": {10: {"grpo": arm(60), "shuffled": arm(2)}},
    }
    assert smollm2.ratios_of(recipes) == {"smollm2.gain_min": 38.26, "smollm2.control_max": 2}
    assert smollm2.ratios_of({"one": {10: {}}}) == {"smollm2.gain_min": None, "smollm2.control_max": None}


def test_arms_of_other_settings_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    smollm2 = load_file(RECORD.parent / "smollm2.py")
    start = smollm2.begin("calculator", 10, tmp_path / "seed_10", ["trainer.steps=3"])
    assert start == smollm2.begin("calculator", 10, tmp_path / "seed_10", ["trainer.steps=3"])
    assert start.steps == 3
    with pytest.raises(SystemExit, match="other settings than now"):
        smollm2.begin("calculator", 10, tmp_path / "seed_10", ["trainer.steps=4"])


def test_a_run_that_was_interrupted_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    runs, folder = load_file(RECORD.parent / "runs.py"), tmp_path / "grpo"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("half a run")
    small = ["sft.steps=0", "rollout.prompts_per_step=1", "rollout.group_size=2", "eval.tasks=1", "eval.samples=1"]
    words = ["train", "recipe=calculator", "trainer.steps=1", "sampling.max_new_tokens=4", *small]
    found = runs.finish_run(words, folder, threads=1)
    assert found == runs.finish_run(words, folder)  # to the last second that it took: nothing was run again
    assert found["time/rl_s"] > 0 and len(runs.steps_of(folder)) == 1
    assert runs.last_checkpoint(folder).name == "step_000001"


def test_what_is_imitated_is_what_an_evaluation_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    succeeded = load_file(RECORD.parent / "learning.py").succeeded
    experiment = compose(parse([])).experiment
    ways = {
        (status, reward): Trajectory(Task("", ()), status=status, reward=reward)
        for status in Status
        for reward in (0.0, 1.0)
    }
    assert [way for way, trajectory in ways.items() if succeeded(trajectory, experiment)] == [(Status.COMPLETED, 1.0)]


def test_siblings_that_say_the_same_are_rewarded_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = load_file(RECORD.parent / "spread.py").Spread()
    turn = Turn([], [], [], [], Finish.STOP, Message("assistant", "#### 7"))
    rewards = [spread.reward(Trajectory(Task("", ()), sample_index, [turn])) for sample_index in range(8)]
    assert len(set(rewards)) == 8 and all(0 <= reward < 1 for reward in rewards)


def test_a_table_without_results_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    report = load_file(RECORD.parent / "report.py")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    marked = "<!-- smollm2 -->\n<!-- end -->\n"
    assert "Not measured yet." in report.filled(marked)
    before = {"success": 0.16, "interval": [0.12, 0.21]}
    trained = {"success": 0.6, "interval": [0.55, 0.65], "gain": {"points": 44.0}, "steps": 30, "seconds": 317.0}
    recipes = {"smollm2": {"10": {"before": before, "grpo": trained, "shuffled": before, "own": trained}}}
    (tmp_path / "smollm2.json").write_text(json.dumps({"ratios": {}, "detail": {"recipes": recipes}}))
    assert (
        "| `smollm2` | 10 | 0.160 (0.12-0.21) | 0.600 (0.55-0.65) | +44 | 30 steps, 5 min | 0.160 (0.12-0.21) "
        "| 0.600 (0.55-0.65) |  |\n"
    ) in report.filled(marked)
    side = {"rollout_s": 8.0, "train_s": 9.0, "peak_bytes": 5 * 2**30, "every_step_s": [17.0]}
    detail = {"rows": 8, "prompt_tokens": 139.5, "ours": side | {"seconds": 17.0}} | dict.fromkeys(
        ("trl", "trl_best"), side | {"seconds": 340.0}
    )
    measured = {
        "ratios": {"versus_trl.135m": 19.9, "versus_trl.135m_best": 9.9},
        "detail": {"135m": detail, "threads": 2},
    }
    (tmp_path / "versus_trl_135m.json").write_text(json.dumps(measured))
    assert "| 140 | TRL | 340.0 s | 8.0 s | 9.0 s | 19.9 | 5.0 GiB | 1 |\n" in report.versus_trl_135m()


def test_unseen_seeds_are_added_and_the_worst_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    report, unseen = load_file(RECORD.parent / "report.py"), load_file(RECORD.parent / "unseen.py")
    for module in (report, unseen, sys.modules["record"]):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    for seed, after in ((31, 0.95), (32, 0.7)):
        folder = tmp_path / "calculator" / str(seed)
        folder.mkdir(parents=True)
        measured = {"eval/success/before": 0.25, "eval/success/after": after, "eval/greedy/after": 1.0}
        (folder / "summary.json").write_text(json.dumps(measured))
        words = ["--arms", "calculator", "--seeds", "31", str(seed), "--folder", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["unseen.py", *words])
        unseen.main()
        (folder / "summary.json").unlink()  # what was measured before is not asked again
    assert "| 0.25 -> 0.95, 0.25 -> 0.70 | 0.90 | 1 of 2 | 0.700 (seed 32) |" in report.unseen()


def test_a_step_that_trains_less_than_it_sampled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    versus = load_file(RECORD.parent / "versus_trl_135m.py")
    for step in ({"reward/groups_with_variance": 1.0}, {"frac_reward_zero_std": 0.0}):
        assert versus.checked(step) == step
    for step in ({"reward/groups_with_variance": 0.875}, {"frac_reward_zero_std": 0.125}):
        with pytest.raises(AssertionError, match="12% of the groups are rewarded alike"):
            versus.checked(step)


def test_both_trainers_of_the_real_model_train_64_conversations_of_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    versus = load_file(RECORD.parent / "versus_trl_135m.py")
    experiment = compose(parse(versus.FULL.words())).experiment
    assert (experiment.rollout.prompts_per_step, experiment.rollout.group_size) == (8, 8)
    assert type(experiment.environment).__name__ == "SingleTurn" and experiment.sampling.max_new_tokens == 48
    lengths = {
        n: versus.prompt_tokens([*versus.FULL.words(), "model.name=tiny", f"task.examples={n}"]) for n in EXAMPLES
    }
    assert lengths[EXAMPLES[0]] + 10 < lengths[EXAMPLES[1]]
    shots = compose(parse(versus.FEW_SHOT.words())).experiment.task.examples
    assert [message["role"] for message in shots] == ["user", "assistant"] * 4
    assert all("####" in message["content"] for message in shots[1::2])


def test_the_ratios_against_trl_are_of_whole_steps_and_whole_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    versus = load_file(RECORD.parent / "versus_trl_135m.py")
    detail = {
        "ours": {"seconds": 20.0, "peak_bytes": 5},
        "trl": {"seconds": 400.0, "peak_bytes": 10},
        "trl_best": {"seconds": 300.0, "peak_bytes": 8},
    }
    ratios = {"versus_trl.135m": 20.0, "versus_trl.135m_best": 15.0, "versus_trl.135m_memory": 0.5}
    assert versus.ratios_of({"135m": detail}) == ratios
    assert versus.FULL.settings(rows=8, prompts=2)["micro_batches"] == 2
    assert versus.FULL.settings(rows=2, prompts=8)["micro_batches"] == 32


def test_a_cell_is_made_once_and_taken_over_from_a_process_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    table = load_file(RECORD.parent / "table.py")
    cells = [table.Cell(f"cell {number}", ("train", f"seed={number}")) for number in range(3)]
    for cell in cells:  # runs that are finished: what is left to do is to keep their results
        (tmp_path / "runs" / cell.name).mkdir(parents=True)
        found = {"eval/success/before": 0.25, "eval/success/after": 0.75}
        (tmp_path / "runs" / cell.name / "summary.json").write_text(json.dumps(found))
    held = (
        "import pathlib, runs, sys\nwith runs.claimed(pathlib.Path(sys.argv[1])) as own: print(own, flush=1); input()"
    )
    command = [sys.executable, "-c", held, str(tmp_path / "cell 0.claim")]
    with subprocess.Popen(
        command, cwd=RECORD.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout and other.stdout.readline() == "True\n"
        assert table.work(cells, tmp_path, 1) == 1 and cells[1].kept(tmp_path)["after"] == 0.75
        assert table.work(cells, tmp_path, 9) == 1 and cells[2].kept(tmp_path)
        assert cells[0].kept(tmp_path) is None  # the other process is at it
        other.kill()
    assert table.work(cells, tmp_path, 9) == 1 and cells[0].kept(tmp_path)
    assert table.work(cells, tmp_path, 9) == 0
    with pytest.raises(SystemExit, match="other settings than now"):
        table.Cell("cell 0", ("train", "seed=7")).kept(tmp_path)


def test_a_cell_waits_for_its_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    table = load_file(RECORD.parent / "table.py")
    cells = table.cells_of(table.ALGORITHMS, table.TASKS, table.SEEDS, ())
    assert len(table.ALGORITHMS) == 11 and len(cells) == 99 and len({cell.name for cell in cells.values()}) == 99
    assert {cell.warm.name for (_, task, _), cell in cells.items() if task in table.TAUGHT} == {
        "warm_start guess_number"
    }
    cell = cells["grpo", "guess_number", 0]
    with table.claimed(tmp_path / f"{cell.warm.name}.claim"):
        assert table.work([cell], tmp_path, 9) == 0


@pytest.mark.parametrize("algorithm", ["cispo", "grpo", "ppo"])
def test_a_cell_has_the_defaults_of_its_algorithm(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    table = load_file(RECORD.parent / "table.py")
    for task in table.TASKS:
        words = table.cells_of([algorithm], [task], [2], ())[algorithm, task, 2].words
        assert words[0] == "train"
        experiment = compose(parse(list(words[1:]))).experiment
        assert (experiment.trainer.steps, experiment.sft.steps, experiment.seed) == (24, 0, 2)
        assert type(experiment.algorithm).__name__.lower() == algorithm
        assert experiment.algorithm == type(experiment.algorithm)()


def test_the_table_of_algorithms_has_intervals_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    table, report = load_file(RECORD.parent / "table.py"), load_file(RECORD.parent / "report.py")
    success = {  # of two seeds
        "low": {"easy": (0.5, 0.6), "hard": (0.1, 0.2)},
        "high": {"easy": (0.9, 1.0), "hard": (0.5, 0.6)},
        "close": {"easy": (0.9, 0.9), "hard": (0.1, 0.6)},
    }
    kept = {
        (name, task, seed): {"before": 0.1 * seed, "after": after, "machine": "Fast 3000", "commit": "abc"}
        for name, tasks in success.items()
        for task, of in tasks.items()
        for seed, after in enumerate(of)
    }
    found = table.aggregate(kept)
    assert list(found["algorithms"]) == ["high", "close", "low"]
    easy = found["algorithms"]["low"]["tasks"]["easy"]
    # Student's t of one degree of freedom: 12.706 times the standard error, of two values half their difference
    assert easy == {"mean": 0.55, "half_interval": 0.6353, "seeds": {0: 0.5, 1: 0.6}}
    assert found["algorithms"]["close"]["overall"] == {"mean": 0.625, "half_interval": 1.5882}
    assert found["spread"] == {"better": "high", "worse": "low", "mean": 0.4, "half_interval": 0.0}
    assert found["pairs"] == 3 and found["differ"] == [found["spread"]]  # .4 with both seeds
    assert found["before"] == {"easy": pytest.approx(0.05), "hard": pytest.approx(0.05)}
    assert (found["machines"], found["commits"]) == (["Fast 3000"], ["abc"])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "table.json").write_text(json.dumps({"ratios": {"table.seeds": 2}, "detail": found}))
    said = report.agent_rl()
    assert "| `low` | 0.550 ± 0.635 | 0.150 ± 0.635 | 0.350 ± 0.635 |\n" in said
    assert "high and low, differ by 0.400 ± 0.000 in the mean over tasks; 1 of 3 pairs do" in said


def test_search_is_compared_task_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    search, report = load_file(RECORD.parent / "search.py"), load_file(RECORD.parent / "report.py")
    (tmp_path / "trajectories").mkdir()
    names = [f"eval/{name}/{when}" for name in ("success", "no_tools/success") for when in ("before", "after")]
    (tmp_path / "summary.json").write_text(json.dumps(dict.fromkeys(names, 0.5)))
    for name, rewards in (
        ("before", [0, 0, 0, 1]),
        ("after", [1, 1, 0, 1]),
        ("before_no_tools", [0] * 4),
        ("after_no_tools", [0] * 4),
    ):
        rows = [{"task": str(n), "status": "completed", "reward": reward} for n, reward in enumerate(rewards)]
        (tmp_path / f"trajectories/evaluation_{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    points, low, high = search.gain(tmp_path, "success")
    assert points == 50.0 and low < 50 < high
    assert search.gain(tmp_path, "no_tools/success")[0] == 0.0
    arms: dict[str, Any] = {
        arm: {"before": 0.4, "after": 0.8, "gain": [40.0, 31.6, 47.2]} for arm in ("grpo", "shuffled", "no_tools")
    }
    arms["grpo"] |= {"greedy_before": 0.0, "greedy_after": 0.95, "searched": [0.5, 0.7, 0.9], "seconds": 120.0}
    arms["grpo"] |= {"no_tools_before": 0.01, "no_tools_after": 0.0, "no_tools_gain": [-1.0, -4.5, 0.5]}
    arms["shuffled"]["gain"] = [7.5, 2.9, 12.0]
    assert search.gains(arms) == (40.0, [7.5, 40.0, -1.0])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    detail = {"seeds": {"1": arms | {"warm_start_s": 300.0}}}
    (tmp_path / "search.json").write_text(json.dumps({"ratios": {}, "detail": detail}))
    row = "| 1 | 0.400 to 0.800 (+32 to +47) | 0.00 to 0.95 | 0.50 to 0.90 | 0.010 to 0.000 (-4 to +0) | "
    assert f"{row}0.400 to 0.800 (+3 to +12) | " in report.search() and "| 5 + 2 |\n" in report.search()


def test_the_first_lesson_is_compared_by_its_rewards_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RECORD.parent)
    smolgrpo, report = load_file(RECORD.parent / "smolgrpo.py"), load_file(RECORD.parent / "report.py")
    passages = [{"id": str(n), "title": "The sea", "text": "Water. " * n} for n in (1, 40, 100, 300)]
    (tmp_path / "passages.jsonl").write_text("\n".join(map(json.dumps, passages)))
    smolgrpo.write_prompts(tmp_path / "passages.jsonl", tmp_path / "prompts.jsonl")
    words = [*smolgrpo.words_of(tmp_path / "prompts.jsonl", 2e-5), "task.eval_fraction=0"]
    experiment = compose(parse(words)).experiment
    tasks = experiment.task.stream(Split.train, 0)
    assert {next(tasks).id for _ in range(2)} == {"40", "100"}  # those that are long enough, and fit
    assert next(tasks).messages[0].content.startswith("TITLE: The sea\n\nPOST: Water. Water.")
    assert (experiment.rollout.prompts_per_step, experiment.rollout.group_size) == (2, 8)
    assert (experiment.model.lora.rank, experiment.optimizer.lr, experiment.sampling.max_new_tokens) == (16, 2e-5, 96)

    def steps(seconds: float, gain: float, name: str) -> list[dict[str, float]]:
        parts = {"time/rollout_s": 1.0, "time/train_s": 2.0, "peak_bytes": 5, "sampled_tokens": 9}
        return [parts | {"seconds": seconds, name: gain * step - 90.0} for step in range(9)]

    assert smolgrpo.parts([1, 3, 2, 4, 0, 0, 5, 5, 8]) == [2, 3, 0, 6]
    sides = {
        "ours": smolgrpo.describe(steps(4, 1.0, "reward/mean")),
        "trl": smolgrpo.describe(steps(12, 2.0, "reward")),
    }
    ratios = {"smolgrpo.seconds_ratio": 3.0, "smolgrpo.reward_gain": 6.5, "smolgrpo.reward_gain_trl": 13.0}
    assert smolgrpo.ratios_of(sides) == ratios
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "smolgrpo.json").write_text(json.dumps({"ratios": ratios, "detail": sides | {"steps": 9}}))
    assert "| TRL | 12.0 s | 1.0 s | 2.0 s | 1.8 | -89 | -85 | -81 | -76 |\n" in report.smolgrpo()


@pytest.mark.real
@pytest.mark.slow
def test_the_benchmark_of_a_real_model_keeps_finished_arms(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    tiny.build_model(tiny.SHAPES["tiny"], 0).save_pretrained(weights)
    tiny.load_tokenizer().save_pretrained(weights)
    words = ["--recipes", "calculator", "--seeds", "10", "--set", "sft.steps=0", "--folder", str(tmp_path / "kept")]
    command = [sys.executable, str(RECORD.parent / "smollm2.py"), "--quick", "--jobs", "1", *words]

    def run(*arms: str) -> dict[str, Any]:
        environment = os.environ | {"MTGRPO_SMOLLM2": str(weights)}
        line = [*command, "--arms", *arms]
        said = subprocess.run(line, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(said.splitlines()[-1])["detail"]["recipes"]["calculator"]["10"]

    first = run("grpo")
    assert list(first) == ["before", "grpo"]
    assert first["grpo"]["steps"] == 2 and len(first["grpo"]["tasks"]) == 4
    assert not list(tmp_path.glob("kept/**/*.safetensors"))
    second = run("grpo", "own")
    assert {name: second[name] for name in first} == first  # to the last second that it took: nothing was run again
    assert second["own"]["steps"] >= 1 and math.isfinite(second["own"]["gain"]["points"])
    assert (tmp_path / "kept" / "quick" / "smollm2.png").stat().st_size > 1000


@pytest.mark.real
@pytest.mark.slow
def test_a_stream_that_is_killed_three_times_skips_and_repeats_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(RECORD.parent / "stream.py"), "--tasks=3000", f"--folder={tmp_path / 'run'}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    ratios = json.loads(found.stdout)["ratios"]
    assert found.stderr.count("killed after") == 3
    assert (ratios["stream.tasks"], ratios["stream.skipped"], ratios["stream.repeated"]) == (3000, 0, 0)
