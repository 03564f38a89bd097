"""The embedded default: a Qwen3 architecture from scratch and a small tokenizer, both shipped with the package.

The tokenizer is byte-level BPE with two habits that make a model of half a million weights learn to use a tool:
every digit is one token, and merges may cross spaces, so that frequent phrases (the head of a tool call, say) are one
token each. Any text can be encoded. `scripts/build_tiny_tokenizer.py` rebuilds the shipped files byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

TOKENIZER = Path(__file__).parent / "tiny_tokenizer"
WEIGHTS = Path(__file__).parent / "tiny_calculator"  # of settings.SHIPPED, in fp16; origin.json says how they were made
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 2048


@dataclass(frozen=True)
class Shape:
    """The size of a from-scratch model. `vocabulary` may exceed the tokenizer's: the rest is never used."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = VOCABULARY


SHAPES = {
    "tiny": Shape(hidden=96, layers=3, heads=3, intermediate=256),
    "tiny-2m": Shape(hidden=192, layers=5, heads=6, intermediate=512),
    "tiny-30m": Shape(hidden=512, layers=8, heads=8, intermediate=1536, vocabulary=8192),
}


def build_model(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model; the weights are a function of `shape` and `seed` alone."""
    import torch  # noqa: PLC0415  the tokenizer needs none of it
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=max(32, shape.hidden // shape.heads),
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        depth_scale = (2 * shape.layers) ** -0.5
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue
            if "embed_tokens" in name:
                torch.nn.init.normal_(weight, std=0.02)
            else:  # variance-preserving; what enters the residual stream is scaled down by depth (GPT-2)
                scale = depth_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                torch.nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)
    return model


def load_tokenizer() -> PreTrainedTokenizerFast:
    """The shipped tokenizer, its chat template included."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    return PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
