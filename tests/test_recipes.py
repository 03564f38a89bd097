"""Every recipe can be typed and planned where the hub is out of reach; those of real models fit their GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from conftest import Run
from mtgrpo import memory
from mtgrpo.config.experiment import Experiment
from mtgrpo.config.recipe import recipes
from mtgrpo.errors import ConfigError
from mtgrpo.model import skeleton, smollm2
from mtgrpo.model.settings import ModelSettings
from mtgrpo.tasks.parquet import write_parquet
from test_sandbox import require_bubblewrap

PUBLISHED = {  # how many weights the files on the hub have
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}
MODELS = [name for name in recipes() if name.startswith(("qwen", "llama"))]
WORDS = {
    "lora": ["recipe=[gsm8k,lora]"],
    "jsonl": ["recipe=jsonl", "task.path=mine.jsonl"],
    **{name: [f"recipe=[gsm8k,{name}]"] for name in (*MODELS, "four_gpus", "async")},
    **{name: [f"recipe={name}", "task.path=mine.parquet"] for name in recipes() if name.startswith("condensed_")},
    **{name: [f"recipe={name}", "agent.environment=x"] for name in ("verifiers", "tau_4b", "wordle_1.7b")},
}  # fmt: skip
LARGE = {
    *("code_4b", "grpo_ifeval", "ifeval_8b", "math_1.5b", "math_1.5b_condensed", "multiturn_grpo", "search_r1_3b"),
    *("skyrl_grpo", "sql_7b", "tau_4b", "toolrl_3b", "triviaqa", "wordle_1.7b"),
}


@pytest.fixture
def furnished(place: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real data, and files of the user's own."""
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    rows = [{"prompt": f"What is 1 + {n}?", "answer": str(n + 1), "tests": "assert f()"} for n in range(40)]
    (place / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_parquet(place / "mine.jsonl", place / "mine.parquet")


def needs(name: str) -> None:
    text = recipes()[name].read_text()
    if "smollm2" in text and not smollm2.folder().is_dir():
        pytest.skip("SmolLM2 is not on this machine: mtgrpo data smollm2")
    if any(word in text for word in ("mbpp", "coding", "tools: [python]")):
        require_bubblewrap()


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_dry_runs(name: str, run: Run, furnished: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(experiment: Experiment, *_: object) -> tuple[Experiment, list[str]]:
        return experiment, ["planned"]

    needs(name)
    monkeypatch.setattr(memory, "planned", planned)
    words = WORDS.get(name, [f"recipe={name}"])
    words = [*words, f"agent.python={sys.executable}"] if "agent.environment=x" in words else words
    code, out, err = run("train", *words, "--dry-run")
    assert code == 0, err
    assert out.startswith("no fault found")
    if name in LARGE or name in MODELS:
        assert "no GPU is here; on GPUs of 80 GB it would be\nplanned\n" in out
        assert err.count("mtgrpo: not checked: ") == err.count("mtgrpo: "), "nothing but what lies on a hub"


@pytest.mark.parametrize(("name", "weights"), PUBLISHED.items())
def test_shapes_of_the_table_have_the_weights_that_are_published(name: str, weights: int) -> None:
    model = skeleton.Skeleton(ModelSettings(name=name), "cuda").model
    assert sum(weight.numel() for weight in model.parameters()) == weights


def test_a_name_of_the_table_begins_that_of_the_model() -> None:
    assert skeleton.known_shape("Qwen/Qwen2.5-Coder-7B")["hidden_size"] == 3584
    for name in ("Qwen/Qwen2.5-0.5", "Qwen/Qwen3-4", "Mine/Qwen3-4B", "Qwen/Qwen3-4Bx", ".qwen3"):
        assert not skeleton.known_shape(name), name


def test_every_model_of_a_recipe_is_in_the_table() -> None:
    named = {yaml.safe_load(recipes()[name].read_text())["model"]["name"] for name in MODELS}
    assert len(named) == len(MODELS) == 11 and all(map(skeleton.known_shape, named))


def test_a_dry_run_plans_the_memory_and_shows_the_first_prompt(run: Run, furnished: None) -> None:
    words = ("recipe=[gsm8k,qwen2.5_0.5b]", "batch.token_budget=1024", "sampling.max_new_tokens=64")
    code, out, _ = run("train", *words, "environment.max_context_length=1024", "--dry-run")
    lines = out.splitlines()
    assert code == 0
    assert lines[lines.index("no GPU is here; on GPUs of 80 GB it would be") + 1].startswith("devices: GPU 0 train")
    assert any(line.split()[:2] == ["weights", "1.98"] for line in lines), "4 bytes each"
    prompt = next(number for number, line in enumerate(lines) if line.startswith("the first of its tasks, gsm8k/"))
    assert lines[prompt + 1].startswith("system: Solve the problem step by step")
    assert lines[prompt + 2].startswith("user: ")
    out = run("train", "recipe=smollm2_calculator", "model.name=tiny", "--dry-run")[1]
    assert "\nassistant:  calculator({'expression': '1340 + 5206'})\ntool: 6546\nassistant: #### 6546\n" in out


def test_a_model_that_is_too_large_is_no_fault_of_this_machine(
    run: Run, furnished: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("model.name=X needs 90 GB at its peak: take another")

    monkeypatch.setattr(memory, "planned", refuse)
    code, out, _ = run("train", "recipe=[gsm8k,qwen2.5_0.5b]", "--dry-run")
    assert code == 0
    assert "\nmemory: model.name=X needs 90 GB at its peak: take another\n" in out


def test_a_recipe_of_a_real_model_says_where_its_settings_are_from() -> None:
    sources = ("arXiv", "NeMo", "verl", "TRL", "torchtitan", "TorchRL", "tinker", "slime", "SkyRL", "prime-rl")
    for name in {*LARGE, *MODELS} - {"math_1.5b_condensed"}:
        said = "".join(line for line in recipes()[name].read_text().splitlines() if line.startswith("#"))
        assert any(source in said for source in (*sources, "Agent-Lightning")), name
