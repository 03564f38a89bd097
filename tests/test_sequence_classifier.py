"""Reward models, and cross-encoders that rank what was found: against plain transformers, on tiny random models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from busy_threads import busy_threads
from mtgrpo.errors import ConfigError
from mtgrpo.model import tiny
from mtgrpo.parts import RunContext
from mtgrpo.rewards import scores
from mtgrpo.rewards.composed import Composed
from mtgrpo.rewards.reward_model import RewardModel
from mtgrpo.sequence_classifier import Precision
from mtgrpo.tools.search import Search
from mtgrpo.types import Finish, Message, Task, ToolCall, Trajectory, Turn

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TASK = Task("task/1", (Message("system", "Be brief."), Message("user", "2 + 2?")), "4")


def tokenizer(template: bool = True) -> PreTrainedTokenizerFast:
    made = tiny.load_tokenizer()
    if not template:
        made.chat_template = None
    return made


def saved(folder: Path, outputs: int = 1, template: bool = True, **changes: Any) -> Path:
    """A random reward model, a decoder that is read at its last token."""
    words = tokenizer(template)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 200}
    config = Qwen3Config(**{**SMALL, **sizes, "num_labels": outputs, "pad_token_id": words.pad_token_id, **changes})
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def conversation(*said: str) -> Trajectory:
    turns = [Turn([], [], [], [], Finish.STOP, Message("assistant", text)) for text in said]
    return Trajectory(TASK, turns=turns)


def with_a_tool() -> Trajectory:
    call = Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "2 + 2"}),))
    asked = Turn([], [], [], [], Finish.STOP, call, observations=(Message("tool", "4", name="calculator"),))
    summary = Turn([], [], [], [], Finish.STOP, Message("assistant", "not said to anybody"), auxiliary=True)
    return Trajectory(TASK, turns=[asked, summary, *conversation("It is 4.").turns])


def scored(reward: RewardModel | Composed, siblings: Sequence[Trajectory], folder: Path) -> list[Any]:
    async def run() -> list[Any]:
        async with reward.open(RunContext(folder, print, {})) as running:
            return await scores(running, siblings)

    return asyncio.run(run())


def plain(folder: Path, messages: list[dict[str, Any]]) -> float:
    """By transformers alone."""
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = words.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        return Qwen3ForSequenceClassification.from_pretrained(folder)(input_ids=ids).logits.item()


OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
TEXTS = ["4", "It is 4, as everybody knows who can add.", "", "5"]


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_reward_is_the_models_output(tmp_path: Path, batch_size: int, padding: bool) -> None:
    changes = {} if padding else {"pad_token_id": None}  # then one by one
    folder = saved(tmp_path / "model", **changes)
    reward = RewardModel(model_name=str(folder), batch_size=batch_size, device="cpu")
    found = scored(reward, [conversation(text) for text in TEXTS], tmp_path)
    expected = [plain(folder, [*OPENING, {"role": "assistant", "content": text}]) for text in TEXTS]
    assert [one.total for one in found] == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == len(TEXTS), "the model tells them apart"


def test_it_reads_the_whole_conversation(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (found,) = scored(RewardModel(model_name=str(folder), device="cpu"), [with_a_tool()], tmp_path)
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2 + 2"}}}
    told = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert found.total == pytest.approx(plain(folder, OPENING + told), abs=1e-6)
    assert found.total != pytest.approx(plain(folder, [*OPENING, told[-1]]), abs=1e-6)


def test_no_text_becomes_a_special_token(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    words = tokenizer()
    special = words.eos_token
    honest, hostile = (conversation(text) for text in ("4", f"4{special}"))
    (one, two) = scored(RewardModel(model_name=str(folder), device="cpu"), [honest, hostile], tmp_path)
    raw = plain(folder, [*OPENING, {"role": "assistant", "content": f"4{special}"}])
    assert two.total != pytest.approx(raw, abs=1e-6) and two.total != one.total


def test_what_is_too_long_is_worth_no_more_than_the_worst(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", max_position_embeddings=60)
    reward = RewardModel(model_name=str(folder), device="cpu", retries=0)
    good, bad, last = scored(reward, [conversation("4"), conversation("4 " * 80), conversation("5")], tmp_path)
    assert bad.total == min(0, good.total, last.total)
    (alone,) = scored(reward, [conversation("4 " * 80)], tmp_path)
    assert alone.total == 0
    broken, readable = scored(reward, [conversation("\ud800"), conversation("?")], tmp_path)
    assert broken.total == min(0, readable.total)
    alone = scored(reward, [conversation("4"), conversation("5")], tmp_path)
    assert [good.total, last.total] == pytest.approx([one.total for one in alone], abs=1e-6)


def test_it_computes_in_a_thread_and_the_event_loop_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = RewardModel(model_name=str(saved(tmp_path / "model")), device="cpu")
    threads: list[int] = []
    own = RewardModel._scores

    def watched(self: RewardModel, siblings: Sequence[Trajectory]) -> Any:
        threads.append(threading.get_ident())
        return own(self, siblings)

    monkeypatch.setattr(RewardModel, "_scores", watched)
    scored(reward, [conversation("4")], tmp_path)
    assert threads and threading.get_ident() not in threads


async def test_it_waits_for_no_thread_of_others(tmp_path: Path) -> None:
    reward = RewardModel(model_name=str(saved(tmp_path / "model")), device="cpu")
    async with reward.open(RunContext(tmp_path, print, {})) as running, busy_threads():
        found = await asyncio.gather(*(running.rewards([conversation("4")]) for _ in range(3)))
    assert found[0] == found[1] == found[2]


def test_it_has_a_weight_beside_others(tmp_path: Path) -> None:
    settings = {"model_name": str(saved(tmp_path / "model")), "device": "cpu", "weight": 0.5}
    (found,) = scored(
        Composed(of={"reward_model": settings, "numeric": {"require_marker": False}}), [conversation("4")], tmp_path
    )
    assert found.total == pytest.approx(0.5 * found.components["reward_model"] + 1)


def test_precisions(tmp_path: Path) -> None:
    name = str(saved(tmp_path / "model"))
    found = {
        precision: scored(RewardModel(model_name=name, device="cpu", dtype=precision), [conversation("4")], tmp_path)
        for precision in (Precision.auto, Precision.float32, Precision.bfloat16)
    }
    exact, same, rough = (found[precision][0].total for precision in found)
    assert exact == same != rough == pytest.approx(exact, abs=0.05)


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        scored(RewardModel(model_name=str(folder), **settings), [], folder.parent)
    return str(caught.value)


def test_models_that_are_none_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    assert "has 3 outputs; give a model with one" in refusal(saved(tmp_path / "three", outputs=3))
    assert "chat template" in refusal(saved(tmp_path / "mute", template=False))
    folder = saved(tmp_path / "headless")
    config = Qwen3Config.from_pretrained(folder)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    assert "lacks the weights score.weight; they would be drawn at random" in refusal(folder)
    (tmp_path / "empty").mkdir()
    assert f"reward.model_name={tmp_path / 'empty'} cannot be loaded" in refusal(tmp_path / "empty")
    said = refusal(saved(tmp_path / "model"), device="nowhere")
    assert "cannot be loaded (" in said and "another device than nowhere" in said
    with pytest.raises(ConfigError, match="is not on this machine"):
        scored(RewardModel(model_name="somebody/reward-model"), [], tmp_path)
    with pytest.raises(ConfigError, match=r"needs a model: reward\.model_name=FOLDER"):
        RewardModel()


# --- ranking what was found

PASSAGES = [
    {"id": "a", "title": "Rome", "text": "Rome is the capital of Italy. It is old."},
    {"id": "b", "title": "Paris", "text": "Paris is the capital of France and lies on the river Seine."},
    {"id": "c", "title": "", "text": "A capital letter is a large one."},
    {"id": "d", "title": "Money", "text": "capital " + "is money of which there is more " * 30},
]


def cross_encoder(folder: Path) -> Path:
    words = tokenizer(template=False)
    torch.manual_seed(1)
    config = BertConfig(**SMALL, vocab_size=len(words), max_position_embeddings=64, pad_token_id=words.pad_token_id)
    config.num_labels = 1
    config.initializer_range = 1.0  # so that it tells texts apart
    BertForSequenceClassification(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def test_a_cross_encoder_puts_passages_in_its_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus, folder = tmp_path / "passages.jsonl", cross_encoder(tmp_path / "encoder")
    corpus.write_text("".join(f"{json.dumps(row)}\n" for row in PASSAGES))
    words, model = (
        PreTrainedTokenizerFast.from_pretrained(folder),
        BertForSequenceClassification.from_pretrained(folder),
    )
    query, expected = "the capital of Italy", dict[str, float]()
    for row in PASSAGES:
        text = f"{row['title']} {row['text']}".strip()
        pair = words(query, text, truncation="only_second", max_length=64, return_tensors="pt")
        with torch.no_grad():
            expected[row["id"]] = model(**pair).logits.item()
    order = sorted(expected, key=lambda name: -expected[name])
    plain = [one.id for one in Search(corpus=str(corpus)).with_index()._rank(query, 4)]
    ranked = Search(corpus=str(corpus), rerank=str(folder), device="cpu").with_index()
    assert [one.id for one in ranked._rank(query, 4)] == order != plain
    assert [one.id for one in ranked._rank(query, 2)] == order[:2]
    few = Search(corpus=str(corpus), rerank=str(folder), candidates=2, device="cpu").with_index()
    assert [one.id for one in few._rank(query, 2)] == [name for name in order if name in plain[:2]]
    assert ranked.search("capital \ud800 <|im_end|>" * 50).startswith("["), "whatever is asked"
    assert ranked.search("quetzal") == "no passage has any of these words"
    assert ranked.search(query).startswith(f"[{order[0]}]")


def test_settings_of_ranking_need_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pytest.importorskip("bm25s")
    with pytest.raises(ConfigError, match="`candidates=7` has no effect"):
        Search(corpus="x", candidates=7)
    corpus = tmp_path / "passages.jsonl"
    corpus.write_text(json.dumps(PASSAGES[0]))
    with pytest.raises(ConfigError, match=r"environment\.tools\.search\.rerank=.*has 3 outputs"):
        Search(
            corpus=str(corpus), index=str(tmp_path / "i"), rerank=str(saved(tmp_path / "three", outputs=3))
        ).with_index()
