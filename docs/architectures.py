"""Tries every architecture of transformers at a tiny size and writes docs/architectures.md: `make architectures`.

For each: how training batches are laid out, how the engine decodes, and how far the log-probabilities of both are from
those of a plain forward pass over each context alone; or the error that refuses it.
`tests/test_architectures.py` runs the same and compares.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mtgrpo.batch.forest import build_batch
from mtgrpo.batch.packing import pack
from mtgrpo.config.compose import preset
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local, scheduler
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.errors import ConfigError
from mtgrpo.model.attention import uses_forest
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.model.scorer import Scorer, flops_of, layout_of
from mtgrpo.stages.run import longest_context
from mtgrpo.types import Completion, Finish, Message, Sampling, Task, Trajectory, Turn
from mtgrpo.weights.source import ModelWeights

TARGET = Path(__file__).with_name("architectures.md")
LONG = 150  # tokens of the longest context that is tried
WINDOW = 72  # of models with sliding windows or chunks
ORIGINAL = 80  # positions of models whose scheme changes after some
INTRODUCTION = f"""# Architectures

You have a model and want to know whether it can be trained: find the `model_type` of its `config.json` in the table.

`make architectures` builds each causal language model of transformers {transformers.__version__} at a tiny size with
random weights, and tries trainer and engine on contexts that branch, have several turns, are condensed, and reach the
longest length.

- training: *forest*: each distinct token once. *padded*: a row per conversation. Empty: refused.
- decoding with `engine=local`: *fused*: the fast path. *own modules*: the model's. Empty: refused.
- trained, sampled: the longest context, in tokens, with `engine=server` and with `engine=local`. {LONG} were tried;
  windows have {WINDOW}, and position schemes that change do so after {ORIGINAL}.
- trainer, engine: largest error of a log-probability in the line, in nats (float64), against the model's own pass,
  context by context.
- refused: why. *longer*: contexts beyond those columns.

"""

# Values for the fields that a configuration has.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0, "embd_pdrop": 0.0, "attention_dropout": 0.0, "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW, "ffn_hidden_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 32,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "intermediate_size_mlp": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "zero_expert_num": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 32, "index_topk": WINDOW, "mamba_n_heads": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2,
    "state_size": 8, "ssm_state_size": 8, "n_groups": 1, "mamba_n_groups": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "dropout": 0.0,
    "activation_dropout": 0.0, "layerdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "hidden_dropout": 0.0,
    "embedding_dropout": 0.0, "resid_dropout": 0.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 4.0, 8.0], "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
MLA = {"num_key_value_heads": 4, "head_dim": 4}
# Model types of transformers and what else their configurations need; "type: note" is a variant of the type.
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {"global_attn_every_n_layers": 2, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "axk1": MLA,
    "bert": {},
    "bamba": {"attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "cohere": {"logit_scale": 1.0},
    "cohere: scaled logits": {},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "ctrl": {"dff": 48},
    "cwm": {},
    "dbrx": {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v3: keys larger than values": {**MLA, "v_head_dim": 6, "qk_nope_head_dim": 4},
    "deepseek_v32": MLA,
    "diffllama": {},
    "doge": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_layer_end_index": 2},
    "exaone4": {"sliding_window_pattern": 2},
    "exaone_moe": {"sliding_window_pattern": 2},
    "falcon": {},
    "falcon_h1": {"mamba_d_ssm": 64},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {**MLA, "qk_nope_head_dim": 4, "head_dim": 4},
    "glm_moe_dsa": MLA,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "granitemoeshared": {"shared_intermediate_size": 16},
    "helium": {},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "expert_layer_period": 2},
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 8},
    "laguna": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "llama": {},
    "llama: dynamic": {
        "max_position_embeddings": ORIGINAL,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
    "llama: linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama: llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        }
    },
    "llama: yarn": {"rope_parameters": YARN},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "longcat_flash": {**MLA, "num_layers": 1},
    "mamba": {},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "minicpm3": MLA,
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "minimax_m2": {},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": {"sliding_window": None, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {"local_attention": WINDOW, "global_attn_every_n_layers": 2},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": None},
    "phi3: longrope": {
        "sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL
    },
    "phimoe": {"sliding_window": None},
    "phimoe: windows": {},
    "qwen2": {},
    "qwen2: windows": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {},
    "qwen2_moe: windows": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {},
    "xglm": {},
    "youtu": MLA,
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The result of one architecture. Errors are the worst, in nats; NaN where nothing was measured."""

    layout: str = ""
    decoding: str = ""
    trained: int = 0  # tokens of the longest context
    sampled: int = 0  # the same of engine=local
    trainer: float = math.nan
    engine: float = math.nan
    refused: str = ""  # what is refused, and why


def names() -> list[str]:
    """Those that this version of transformers has."""
    return [name for name in sorted(CONFIGS) if name.partition(":")[0] in CONFIG_MAPPING]


def build(name: str) -> PreTrainedModel:
    """A tiny model of random weights, far from uniform attention and predictions."""
    kind, extra = name.partition(":")[0], CONFIGS[name]
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map}
    config = AutoConfig.for_model(kind, **{k: v for k, v in SIZES.items() if k in known} | extra)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        assert model.num_parameters() < 500_000, f"{name} is no tiny model: {model.num_parameters()} parameters"
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        nn.init.normal_(model.get_input_embeddings().weight)
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head.mul_(3 / model(input_ids=torch.arange(3, 64)[None], use_cache=False).logits.std())
    return model


def tokens(rng: random.Random, count: int) -> list[int]:
    """Ordinary tokens of the tiny vocabulary."""
    return [rng.randrange(3, 64) for _ in range(count)]


def turn(new_context: list[int], output: list[int], parent: int = -1) -> Turn:
    """A turn with log-probabilities that are not compared."""
    unknown = [-1.0] * len(output), [0] * len(output)
    return Turn(new_context, output, *unknown, Finish.STOP, Message("assistant"), parent)


def trajectories(longest: int) -> list[Trajectory]:
    """Two groups of three siblings of one to four turns, of which one reaches `longest`; the last context is new."""
    rng, task = random.Random(0), Task("sweep/0", (Message("user", "?"),))
    rollouts: list[Trajectory] = []
    for length in (longest, 20):
        prompt, opening, part = tokens(rng, length // 2), tokens(rng, 2), length // 8
        for sample_index in range(3):
            turns = [turn(prompt, opening[: 1 + sample_index % 2] + tokens(rng, part - 1 - sample_index % 2))]
            for _ in range(sample_index):
                turns.append(turn(tokens(rng, part // 2), tokens(rng, part - part // 2), parent=len(turns) - 1))
            if sample_index == 2:
                turns.append(
                    turn(tokens(rng, 1), tokens(rng, length - length // 2 - 3 * part - 1), parent=len(turns) - 1)
                )
            turns.append(turn(prompt[: length // 4] + tokens(rng, 2), tokens(rng, part)))
            rollouts.append(Trajectory(task, turns=turns))
    return rollouts


@contextmanager
def transformers_own(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model attends as transformers would."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    yield
    model.set_attn_implementation(implementation)


@torch.no_grad()
def plain(model: PreTrainedModel, context: list[int], output: list[int]) -> torch.Tensor:
    """Log-probabilities of `output`, by a forward pass over this context alone."""
    hidden = model.base_model(input_ids=torch.tensor([context + output]), use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[0, len(context) - 1 : -1])
    return logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; infinite where one is not a number."""
    return float((found - expected).abs().nan_to_num(torch.inf).max())


def trainer_error(model: PreTrainedModel, longest: int) -> float:
    """All of a batch in one micro-batch."""
    rollouts = trajectories(longest)
    batch = build_batch(rollouts)
    packed = pack(batch, torch.arange(len(batch)), 100_000, flops_of(model), layout_of(model))
    (micro,) = packed[0].micro_batches
    with torch.no_grad():
        logp = Scorer(model)(micro, 1.0).logp[micro.target][micro.entries.argsort()]
    with transformers_own(model):
        expected = [plain(model, t.context(i), x.output) for t in rollouts for i, x in enumerate(t.turns)]
    return worst(logp, torch.cat(expected))


def engine_error(model: PreTrainedModel, engine: LocalEngine, longest: int) -> float:
    """Two groups of three siblings, one to three turns each; prompts are prefilled in chunks."""
    rng = random.Random(1)
    prompts = [tokens(rng, longest // 2), tokens(rng, longest // 3)]
    turns: list[tuple[list[int], Completion]] = []

    async def converse(task: int, sample_index: int) -> None:
        context = prompts[task]
        async with engine.conversation(Key(0, "sweep", str(task), sample_index)) as sample:
            for number in range(sample_index + 1):
                new = longest - len(context) if task == 0 and number == 2 else longest // 8
                done = await sample(context, Sampling(max_new_tokens=new))
                turns.append((context, done))
                context = context + done.tokens + tokens(rng, 1 + (task + sample_index) % 3)

    async def run_all() -> None:
        await asyncio.gather(*(converse(task, sample_index) for task in range(2) for sample_index in range(3)))

    asyncio.run(run_all())
    assert max(len(context) + len(done.tokens) for context, done in turns) == longest
    with transformers_own(model):
        return max(
            worst(torch.tensor(done.logprobs, dtype=torch.float64), plain(model, context, done.tokens))
            for context, done in turns
        )


def load(name: str) -> PreTrainedModel:
    """The way of a run, from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        build(name).save_pretrained(folder)
        return load_model(ModelSettings(folder, DType.float64), seed=0)


def longest_of(model: PreTrainedModel, engine: str) -> tuple[int, str]:
    """How long contexts may grow, and why not longer."""
    words = ("calculator", f"engine={engine}", f"batch.token_budget={LONG}")
    try:
        return longest_context(preset(*words, f"environment.max_context_length={LONG}"), ModelWeights(model)), ""
    except ConfigError as error:
        return longest_context(preset(*words), ModelWeights(model)), str(error)


def measure(name: str) -> Found:
    """Try one architecture."""
    try:
        model = load(name)
    except ConfigError as error:
        return Found(refused=re.sub(r"model\.name=\S+?(?=[: ])", f"model.name={name.partition(':')[0]}", str(error)))
    trained, _ = longest_of(model, "server")
    layout = "forest" if uses_forest(model) else "padded"
    error = trainer_error(model, trained)
    sampled, refused = longest_of(model, "local")
    try:
        with patch.dict(scheduler.MAX_PREFILL_TOKENS, cpu=16):
            engine = Local(memory_fraction=0.001).start(ModelWeights(model), True, sampled)
    except ConfigError as reason:
        return Found(layout, "", trained, 0, error, refused=str(reason))
    decoding = "fused" if engine._forward.fused else "own modules"
    return Found(layout, decoding, trained, sampled, error, engine_error(model, engine, sampled), refused)


def reason(refused: str) -> str:
    """Why something is refused, without what every such message says."""
    text = re.sub(r"; (such models|set environment|choose another).*", "", refused)
    text = re.sub(r"contexts of \d+ tokens are more than can be computed exactly", "longer", text)
    text = re.sub(r"engine=local cannot sample .* cannot be replaced \((.*)\)", r"engine=local: \1", text)
    text = re.sub(r"engine=local cannot sample .* the layers of \w+ have", "engine=local:", text)
    text = re.sub(r"it has layers of another kind: (\w+)", r"\1 layers", text)
    text = re.sub(r"layers of \w+ see no more .*engine=server has\)", "windows, with engine=local", text)
    text = re.sub(r"layers of \w+ see no more .*", "windows", text)
    text = re.sub(r"^model\.name=\S+ \(\w+\) |^model\.name=\S+: ", "", text)
    return re.sub(r"(the configuration of )?\b\w+(ForCausalLM|LMHeadModel) ", "", text)


def row(found: Found) -> list[str]:
    """One architecture, as cells of the table without its name."""

    def decade(error: float) -> str:
        return "" if math.isnan(error) else f"1e{math.ceil(math.log10(max(error, 1e-16)))}"

    lengths = [str(tokens or "") for tokens in (found.trained, found.sampled)]
    errors = [decade(found.trainer), decade(found.engine)]
    return [found.layout, found.decoding, *lengths, *errors, reason(found.refused)]


HEAD = ["training", "decoding", "trained", "sampled", "trainer", "engine", "refused", "model types"]


def table(rows: dict[str, list[str]]) -> str:
    """The model types by what was found of them, with the largest errors of each line."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, cells in sorted(rows.items(), key=lambda one: (one[1][0] or "z", one[1][1] or "z", one[1][-1])):
        alike.setdefault((*cells[:4], cells[-1]), []).append(name)
    lines = [HEAD, ["---"] * len(HEAD)]
    for (*found, refused), names in alike.items():
        errors = [max((rows[name][at] for name in names), key=lambda text: float(text or 0)) for at in (4, 5)]
        lines.append([*found, *errors, refused, ", ".join(sorted(names))])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page() -> str:
    """All of them."""
    return INTRODUCTION + table({name: row(measure(name)) for name in names()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    TARGET.write_text(page())
