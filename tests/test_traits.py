"""What is found of a model's attention by running it: what its cache holds, and how long contexts may be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mtgrpo.config.compose import preset
from mtgrpo.engines.local import Local
from mtgrpo.errors import ConfigError
from mtgrpo.model.attention import AttentionKind, choose_attention, describe_attention, uses_forest
from mtgrpo.model.load import DType, ModelSettings, compute_in, load_model
from mtgrpo.model.traits import traits
from mtgrpo.stages.run import longest_context
from mtgrpo.weights.source import ModelWeights

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 4.0, 8.0], "original_max_position_embeddings": 40,
}  # fmt: skip
PHI = {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40, "num_key_value_heads": 2}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "first_k_dense_replace": 2}


def make_model(kind: str, **settings: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings), dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    compute_in(model, DType.float64)
    return model.eval()


# --- how long contexts may be ---


@pytest.mark.parametrize(
    ("kind", "settings", "trained", "sampled", "reason"),
    [
        ("llama", {}, 512, 512, "names 512 positions"),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 40}, 512, 40, "see no more than 40 tokens"),
        ("gemma3_text", GEMMA, 512, 40, "see no more than 40 tokens"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, 512, 3, "no more than 3 "),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}, 512, 512, "positions"),
        ("phimoe", {"sliding_window": 40}, 40, 40, "see no more than 40 tokens"),  # in its masks alone
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}, 40, 40, "40 tokens"),
        ("phi3", PHI, 40, 40, "changes the positions of all tokens"),
    ],
)
def test_the_longest_context_that_is_computed_as_if_it_were_alone(
    kind: str, settings: dict[str, Any], trained: int, sampled: int, reason: str
) -> None:
    """By engine=local, which has no sliding windows, and by the trainer, whose limit is that of servers."""
    model = make_model(kind, **settings)
    for engine, longest in (("local", sampled), ("server", trained)):
        words = ("calculator", f"engine={engine}", "batch.token_budget=600")
        why = reason if longest == sampled else "names 512 positions"
        with pytest.raises(ConfigError, match=rf"{why}.*; set environment\.max_context_length to at most {longest}"):
            longest_context(preset(*words, f"environment.max_context_length={longest + 1}"), ModelWeights(model))
        assert longest_context(preset(*words), ModelWeights(model)) == longest
        asked = min(longest, 9)
        assert longest_context(preset(*words, f"environment.max_context_length={asked}"), ModelWeights(model)) == asked


@torch.no_grad()
def test_positions_that_depend_on_the_whole_pass_do_so_from_the_next_token_on() -> None:
    """The limit is neither too low nor too high."""
    model = make_model("phi3", **PHI)
    ids = torch.tensor([[3 + i * 7 % 60 for i in range(41)]])

    def states(count: int) -> Tensor:
        return model.base_model(input_ids=ids[:, :count], use_cache=False).last_hidden_state[:, :10]

    traits(model)
    assert torch.allclose(states(40), states(10), atol=1e-12)
    assert not torch.allclose(states(41), states(10), atol=1e-2)
    assert torch.allclose(states(40), states(10), atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("mistral", {"num_key_value_heads": 2, "sliding_window": 40}), ("phi3", PHI)],
)
def test_the_engine_takes_no_longer_contexts_either(kind: str, settings: dict[str, Any]) -> None:
    model = make_model(kind, **settings)
    Local().start(ModelWeights(model), True, 40)
    with pytest.raises(ConfigError, match=r"contexts of 41 tokens .* to at most 40"):
        Local().start(ModelWeights(model), True, 41)


def test_dynamic_positions_end_with_the_configuration() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(ConfigError, match="names 512 positions"):
        Local().start(ModelWeights(make_model("llama", rope_parameters=rope)), True, 513)


# --- what is cached ---


@pytest.mark.parametrize(
    ("kind", "settings", "caches"),
    [
        ("llama", {"num_key_value_heads": 2}, [(2, 8)] * 2),
        ("gpt_bigcode", {}, [(1, 8)] * 2),
        ("diffllama", {"num_key_value_heads": 2}, [(2, 8)] * 4),  # attends twice in each layer
        ("hrm_text", {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2, "head_dim": 8}, [(4, 8)] * 6),
        ("deepseek_v3", {**MLA, "v_head_dim": 12}, [(4, 12)] * 2),
        ("deepseek_v3", {**MLA, "v_head_dim": 6}, [(4, 12)] * 2),
    ],
)
def test_the_cache_holds_what_every_call_of_the_attention_gets(
    kind: str, settings: dict[str, Any], caches: list[tuple[int, int]]
) -> None:
    model = make_model(kind, **settings)
    assert list(traits(model).caches) == caches
    choose_attention(model, AttentionKind.auto)
    assert uses_forest(model)


def test_queries_that_are_scaled_from_some_position_on_are_the_models_own() -> None:
    """Also where no context that is tried at the start reaches that position."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2**14}
    settings = {"max_position_embeddings": 2**16, "sliding_window": None, "rope_parameters": rope}
    scaled = make_model("ministral3", **settings | {"rope_parameters": {**rope, "llama_4_scaling_beta": 0.1}})
    assert not Local().start(ModelWeights(scaled), True, 64)._forward.fused
    unscaled = make_model("ministral3", **settings | {"rope_parameters": {**rope, "llama_4_scaling_beta": 0.0}})
    assert Local().start(ModelWeights(unscaled), True, 64)._forward.fused


# --- what cannot be replaced, or not be run ---


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("doge", {"num_key_value_heads": 2, "head_dim": 8}, "makes masks of its own"),
        ("nemotron", {"head_dim": 8}, "do not hand on the keyword arguments"),
        ("falcon", {"num_kv_heads": 4}, "transformers has no interface for it"),
        ("phimoe", {"sliding_window": 4}, "branches of a conversation"),
    ],
)
def test_what_cannot_be_replaced_takes_rows_and_cannot_be_sampled(
    kind: str, settings: dict[str, Any], reason: str
) -> None:
    model = make_model(kind, **settings)
    choose_attention(model, AttentionKind.auto)
    assert not uses_forest(model)
    assert reason in describe_attention(model)
    with pytest.raises(ConfigError, match=rf"engine=local cannot sample .*{reason}.*; choose another model"):
        Local().start(ModelWeights(model), True, 64)
    with pytest.raises(ConfigError, match=rf"{reason}.*set model\.attention=auto"):
        choose_attention(model, AttentionKind.forest)


def test_layers_of_different_shapes_can_be_trained_but_not_sampled() -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "head_dim": 8}
    model = make_model("gemma4_text", **layers, num_key_value_heads=2, hidden_size_per_layer_input=0)
    choose_attention(model, AttentionKind.auto)
    assert uses_forest(model)
    with pytest.raises(ConfigError, match="keys of different shapes; choose another model"):
        Local().start(ModelWeights(model), True, 64)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bert", "BertLMHeadModel computes tokens from those that follow"),
        ("llama4_text", "Llama4ForCausalLM has no body apart from its head"),
    ],
)
def test_models_that_cannot_be_used_are_refused_before_anything_is_spent(
    kind: str, reason: str, tmp_path: Path
) -> None:
    make_model(kind, head_dim=8, num_key_value_heads=2).float().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"{reason}.*not supported"):
        load_model(ModelSettings(str(tmp_path)), 0)


def test_a_dtype_that_a_model_cannot_compute_in_is_refused(tmp_path: Path) -> None:
    attention = {"kv_n_heads": 4, "clip_qkv": 8, "rope_theta": 1e4}
    experts = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    make_model("dbrx", **sizes, attn_config=attention, ffn_config=experts).float().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Dbrx.* cannot compute in bfloat16 .*; choose another model\.dtype"):
        load_model(ModelSettings(str(tmp_path), DType.bfloat16), 0)
    load_model(ModelSettings(str(tmp_path)), 0)


def test_experts_and_norms_without_weight_compute_in_float64(tmp_path: Path) -> None:
    for kind, settings in (("mixtral", {"num_key_value_heads": 2}), ("diffllama", {"num_key_value_heads": 2})):
        make_model(kind, **settings).float().save_pretrained(tmp_path / kind)
        model = load_model(ModelSettings(str(tmp_path / kind), DType.float64), 0)
        ids = torch.tensor([random.Random(0).choices(range(64), k=30)])
        exact = model(input_ids=ids).logits
        single = load_model(ModelSettings(str(tmp_path / kind)), 0)(input_ids=ids).logits
        assert exact.dtype is torch.float64
        assert 1e-9 < (exact - single).abs().max() < 1e-3
