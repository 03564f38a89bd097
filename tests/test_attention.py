"""The forest computes what every turn alone would: log-probabilities, gradients, values, for any model family."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    HrmTextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from mtgrpo.batch.forest import Batch, Forest, build_batch, build_forest
from mtgrpo.batch.packing import Layout, pack
from mtgrpo.engines.local import Local
from mtgrpo.errors import ConfigError
from mtgrpo.model import attention
from mtgrpo.model.attention import (
    AttentionKind,
    Piece,
    Visibility,
    attend_by_flex,
    choose_attention,
    describe_attention,
    forest_attention,
    uses_forest,
)
from mtgrpo.model.load import DType, ModelSettings, compute_in, load_model
from mtgrpo.model.lora import LoRA
from mtgrpo.model.scorer import Scorer, flops_of, layout_of
from mtgrpo.model.value import values
from mtgrpo.policy.guard import compare
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn
from mtgrpo.weights.source import ModelWeights

TASK = Task("test/0", (Message("user", "?"),))
FLEX_FORESTS = 100  # of each kind
SIZES: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {  # of "deepseek" keys and values differ in size
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=False),
    "mistral-window": MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=6),
    "gemma": GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16),
    "gemma3-window": Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "looped": HrmTextConfig(
        **SIZES | {"num_hidden_layers": 6}, head_dim=8, num_layers_per_stack=1, H_cycles=2, L_cycles=2
    ),
    "deepseek": DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=2,
    ),
}


def make_model(family: str, dtype: DType = DType.float64) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()
        for parameter in model.parameters():  # far from uniform attention and predictions
            nn.init.normal_(parameter, std=0.3)
    compute_in(model, dtype)
    choose_attention(model, AttentionKind.forest)
    return model


def turn(new_context: list[int], output: list[int], parent: int = -1) -> Turn:
    return Turn(new_context, output, [-1.0] * len(output), [0] * len(output), Finish.STOP, Message("assistant"), parent)


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Conversations over three tokens, so that much is shared: grown, condensed, repeated."""
    tokens = st.lists(st.integers(2, 4), min_size=1, max_size=7)
    prompts = draw(st.lists(tokens, min_size=1, max_size=2))
    found: list[Trajectory] = []
    for _ in range(draw(st.integers(1, 5))):
        turns: list[Turn] = []
        for _ in range(draw(st.integers(1, 3))):
            extends = bool(turns) and draw(st.booleans())
            context = draw(tokens) if extends else [*draw(st.sampled_from(prompts)), *draw(tokens)]
            turns.append(turn(context, draw(tokens), len(turns) - 1 if extends else -1))
        found.append(Trajectory(TASK, turns=turns))
    return found


def conversation(seed: int = 0) -> list[Trajectory]:
    """A fixed batch: two groups of three siblings, of one to three turns, one of them condensed."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, 24) for _ in range(count)]

    found: list[Trajectory] = []
    for _ in range(2):
        prompt = tokens(9)
        opening = tokens(2)
        for sample_index in range(3):
            turns = [turn(prompt, opening[: sample_index % 2 + 1] + tokens(4))]
            turns += [turn(tokens(3), tokens(5), parent=number) for number in range(sample_index)]
            turns.append(turn(prompt + tokens(4), tokens(6)))
            found.append(Trajectory(TASK, turns=turns))
    return found


def per_turn(model: PreTrainedModel, batch: Sequence[Trajectory], temperature: float) -> Tensor:
    """Log-probabilities of all sampled tokens, every turn a right-padded row with its own context, the plain way."""
    rows = [(t.context(i), turn.output) for t in batch for i, turn in enumerate(t.turns)]
    width = max(len(context) + len(output) for context, output in rows)
    ids = torch.tensor([context + output + [0] * (width - len(context + output)) for context, output in rows])
    logits = model(input_ids=ids, use_cache=False).logits / temperature
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([logp[i, len(c) - 1 : len(c) + len(o) - 1] for i, (c, o) in enumerate(rows)])


def forest_logp(model: PreTrainedModel, batch: Batch, temperature: float, budget: int = 10_000) -> Tensor:
    """The same numbers from the forest."""
    found: list[Tensor] = []
    places: list[Tensor] = []
    for micro in pack(batch, torch.arange(len(batch)), budget, flops_of(model), layout_of(model))[0].micro_batches:
        found.append(Scorer(model)(micro, temperature).logp[micro.target])
        places.append(micro.entries)
    return torch.cat(found)[torch.cat(places).argsort()]


def gradient(model: PreTrainedModel, logp: Tensor) -> Tensor:
    """Of a random weighted sum, flat."""
    weights = torch.randn(len(logp), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((logp * weights.to(logp)).sum(), trained, allow_unused=True)
    return torch.cat([g.flatten().double() for g in found if g is not None])


def assert_equal_to_plain(
    model: PreTrainedModel,
    batch: Sequence[Trajectory],
    logp_tolerance: float,
    grad_tolerance: float,
    budget: int = 10_000,
) -> None:
    plain = per_turn(model, batch, 0.8)
    found = forest_logp(model, build_batch(batch), 0.8, budget)
    assert (plain - found).abs().max() <= logp_tolerance
    expected, got = gradient(model, plain), gradient(model, found)
    assert expected.norm() > 0.1
    assert (expected - got).norm() / expected.norm() <= grad_tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_equals_the_plain_forward_and_backward_of_every_turn(family: str) -> None:
    assert_equal_to_plain(make_model(family), conversation(), 1e-9, 1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_the_plain_forward_and_backward_of_every_turn(family: str) -> None:
    assert_equal_to_plain(make_model(family, DType.float32), conversation(), 1e-5, 1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral-window"])
@settings(max_examples=25, deadline=None)
@given(batch=trajectories(), budget=st.integers(48, 80))
def test_random_forests_however_they_are_cut(family: str, batch: list[Trajectory], budget: int) -> None:
    assert_equal_to_plain(make_model(family), batch, 1e-9, 1e-8, budget)


@settings(max_examples=20, deadline=None)
@given(batch=trajectories())
def test_how_turns_are_stored_changes_nothing(batch: list[Trajectory]) -> None:
    """One segment per turn, whole contexts, or as played; in any order: one loss, one gradient."""
    model = make_model("qwen3")
    split = [Trajectory(TASK, turns=[turn(t.context(i), x.output) for i, x in enumerate(t.turns)]) for t in batch]
    expected = forest_logp(model, build_batch(batch), 1.0)
    slope = gradient(model, expected)
    found = forest_logp(model, build_batch(split), 1.0)
    assert torch.allclose(expected, found, rtol=0, atol=1e-12)
    assert torch.allclose(slope, gradient(model, found), rtol=1e-9, atol=1e-12)
    backwards = build_batch(batch[::-1])
    order = torch.cat([(backwards.trajectory == len(batch) - 1 - i).nonzero()[:, 0] for i in range(len(batch))])
    again = forest_logp(model, backwards, 1.0)[order]
    assert torch.allclose(expected, again, rtol=0, atol=1e-12)
    assert torch.allclose(slope, gradient(model, again), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma"])
def test_adapters_and_value_head(family: str, tmp_path: Path) -> None:
    """LoRA's gradient and the values are those of the plain path too."""
    source = make_model(family, DType.float32)
    source.save_pretrained(tmp_path)
    model = load_model(ModelSettings(str(tmp_path), DType.float64, lora=LoRA(rank=3), value_head=True), seed=0)
    assert uses_forest(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name or "value_head" in name:
                nn.init.normal_(parameter, std=0.3, generator=generator)
    batch = conversation()
    assert_equal_to_plain(model, batch, 1e-9, 1e-8)

    whole = build_batch(batch)
    micro = pack(whole, torch.arange(len(whole)), 10_000, flops_of(model))[0].micro_batches[0]
    parents, row = micro.parent.unique(return_inverse=True)
    found = values(model, Scorer(model).hidden(micro, parents))[row[micro.target]]
    contexts = [t.context(i) + x.output[:j] for t in batch for i, x in enumerate(t.turns) for j in range(len(x.output))]
    plain: list[Tensor] = []
    for context in contexts:
        hidden = model.base_model(input_ids=torch.tensor([context]), use_cache=False).last_hidden_state[0, -1:]
        plain.append(values(model, hidden))
    expected = torch.cat(plain)
    assert (expected - found[micro.entries.argsort()]).abs().max() < 1e-9
    difference = gradient(model, expected) - gradient(model, found[micro.entries.argsort()])
    assert difference.abs().max() < 1e-8


def test_bfloat16_stays_near_fp32() -> None:
    """bfloat16 has 8 bits: the two ways of computing differ in the second digit, and agree with fp32 as well."""
    fp32 = forest_logp(make_model("qwen3", DType.float32), build_batch(conversation()), 1.0)
    model = make_model("qwen3", DType.bfloat16)
    found = forest_logp(model, build_batch(conversation()), 1.0)
    plain = per_turn(model, conversation(), 1.0)
    assert (found - plain).abs().mean() < 2 * (plain - fp32).abs().mean()
    assert (found - fp32).abs().mean() < 2 * (plain - fp32).abs().mean()
    assert not torch.equal(found, fp32)


def test_attention_on_a_cpu_is_in_fp32_where_layers_are_in_16_bits() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    forest = Visibility(torch.arange(5), torch.full((5,), 5))
    expected, _ = forest_attention(nn.Module(), query.float(), key.float(), value.float(), None, forest=forest)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = forest_attention(nn.Module(), query, key, value, None, forest=forest)
    assert torch.equal(found, expected)


# --- the rule ---


def by_hand(forest: Forest, window: int) -> Tensor:
    """[nodes, nodes]: is the column an ancestor of the row, or itself, and fewer than `window` steps above it?"""
    count = len(forest)
    found, parent = torch.zeros(count, count, dtype=torch.bool), forest.parent.tolist()
    for node in range(count):
        seen, above = list[int](), node
        while above >= 0 and (not window or len(seen) < window):
            seen.append(above)
            above = parent[above]
        found[node, seen] = True
    return found


def seen_in(pieces: list[Piece], nodes: int) -> Tensor:
    """[nodes, nodes]: how many pieces show the column to the row."""
    seen = torch.zeros(nodes, nodes, dtype=torch.long)
    for piece in pieces:
        rows = torch.arange(piece.start, piece.end)
        columns = torch.arange(nodes)[piece.columns]
        visible = torch.ones(len(rows), len(columns), dtype=torch.long)
        if piece.causal:
            visible = visible.tril()
        if piece.mask is not None:
            visible = (piece.mask == 0).long()
        seen[rows[:, None], columns] += visible
    return seen


@settings(max_examples=40, deadline=None)
@given(batch=trajectories(), window=st.sampled_from([0, 1, 2, 5]))
def test_the_pieces_cover_what_is_visible_once(batch: list[Trajectory], window: int) -> None:
    whole = build_batch(batch)
    pieces = Visibility(whole.forest.depth, whole.forest.subtree_end).pieces(window, torch.float32)
    assert torch.equal(seen_in(pieces, len(whole.forest)), by_hand(whole.forest, window).long())


@settings(max_examples=40, deadline=None)
@given(batch=trajectories(), draw=st.randoms(use_true_random=False))
def test_the_last_layer_attends_from_what_is_read(batch: list[Trajectory], draw: random.Random) -> None:
    whole = build_batch(batch)
    nodes = len(whole.forest)
    read = torch.tensor(sorted(draw.sample(range(nodes), draw.randint(1, nodes))))
    visibility = Visibility(whole.forest.depth, whole.forest.subtree_end, read)
    assert torch.equal(
        seen_in(visibility.pieces(0, torch.float32, last=True), nodes)[read], by_hand(whole.forest, 0).long()[read]
    )
    assert torch.equal(seen_in(visibility.pieces(0, torch.float32), nodes), by_hand(whole.forest, 0).long())


def test_what_is_not_read_costs_the_last_layer_nothing() -> None:
    """Of a prompt that eight siblings share, only its last token is read."""
    rows = [[0] * 600 + [1 + sample_index] * 20 for sample_index in range(8)]
    forest, nodes = build_forest(rows)
    read = torch.cat([row[599:-1] for row in nodes]).unique()
    visibility = Visibility(forest.depth, forest.subtree_end, read)
    pairs = seen_in(visibility.pieces(0, torch.float32, last=True), len(forest)).sum(1)
    assert pairs[:599].sum() == 0
    assert pairs[599] == 600


def grown_rows(length: int) -> list[list[int]]:
    """Rows that branch anywhere, of `length` tokens in all or a few more."""
    rng = random.Random(length)
    rows: list[list[int]] = [[]]
    while sum(map(len, rows)) < length:
        start = rng.choice(rows)
        rows.append(start[: rng.randrange(len(start) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(5, 200))])
    return rows


@pytest.mark.parametrize("window", [0, 3, 150, 400])
@pytest.mark.parametrize("length", [127, 128, 300, 700, 2000])
def test_tiles_of_flex_attention(window: int, length: int) -> None:
    """Tiles listed as full are seen in full, those listed as partly seen in part, and the others not at all."""
    forest, _ = build_forest(grown_rows(length))
    visible = by_hand(forest, window)
    visibility = Visibility(forest.depth, forest.subtree_end)
    nodes = torch.arange(len(forest))
    zero = torch.zeros(1, dtype=torch.long)
    assert torch.equal(visibility.sees(window)(zero, zero, nodes[:, None], nodes), visible)

    table = visibility.block_mask(window)
    missing = -len(forest) % 128
    padded = nn.functional.pad(visible, (0, missing, 0, missing))  # what is beyond the end may be in either list
    tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    for i in range(len(tiles)):
        partly = set(table.kv_indices[0, 0, i, : table.kv_num_blocks[0, 0, i]].tolist())
        fully = set(table.full_kv_indices[0, 0, i, : table.full_kv_num_blocks[0, 0, i]].tolist())
        assert not partly & fully
        for j in range(len(tiles)):
            tile = tiles[i, :, j][: min(128, len(forest) - i * 128)]
            if j in fully:
                assert tile.all()
            elif j not in partly:
                assert not tile.any()
            elif not window:  # else the list may be longer than it must
                assert tile.any()
                assert not tile.all()


def compile_by(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention, compiled by `backend`; also on a CPU, with gradients."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    compiled = torch.compile(attention.flex_attention, backend=backend)
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: compiled)


@pytest.mark.parametrize("window", [0, 5])
def test_flex_attention_equals_the_rule_on_random_forests(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, by its eager kernels on the CPU; also below a path that is given."""
    compile_by("eager", monkeypatch)
    for seed in range(FLEX_FORESTS):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows = [[rng.randrange(3) for _ in range(rng.randrange(1, 90))] for _ in range(rng.randrange(1, 5))]
        start = [rng.randrange(3) for _ in range(rng.choice([3, 40, 140]))]
        forest, _ = build_forest([start + row for row in rows])
        given = rng.choice([0, 3, len(start) - 1])
        count = len(forest) - given
        inputs = [
            torch.randn(1, heads, size, 16, generator=generator, dtype=torch.float64, requires_grad=True)
            for heads, size in ((4, count), (2, len(forest)), (2, len(forest)))
        ]
        weights = torch.randn(1, 4, count, 16, generator=generator, dtype=torch.float64)
        visibility = Visibility(forest.depth, forest.subtree_end, given=given)
        found = attend_by_flex(*inputs, visibility, window, 0.3)
        gradients = torch.autograd.grad(found, inputs, weights)
        mask = by_hand(forest, window)[given:]
        expected = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3, enable_gqa=True)
        assert torch.allclose(found, expected, atol=1e-9)
        for one, other in zip(gradients, torch.autograd.grad(expected, inputs, weights), strict=True):
            assert torch.allclose(one, other, atol=1e-9)


@pytest.mark.parametrize(("size", "scale"), [(16, 16**-0.5), (32, 0.3)])
def test_flex_attention_is_compiled_for_any_length_a_few_times(
    size: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scale, heads, sizes and tiles as numbers, as the kernel of a GPU wants them."""
    torch._dynamo.reset()
    graphs: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        (node,) = (node for node in graph.graph.nodes if node.name.startswith("flex_attention"))
        query, key, _value, _score, table, used, *_rest = node.args
        shapes = [part.meta["example_value"].shape for part in (query, key)]
        graphs.append([shapes[0][1], shapes[1][1], shapes[0][3], used, *table[-3:-1]])
        return graph.forward

    compile_by(backend, monkeypatch)
    for grad in (False, True):
        for length, above in itertools.product((300, 50, 700, 129, 400), (0, 3)):
            forest, _ = build_forest(grown_rows(length))
            visibility = Visibility(forest.depth, forest.subtree_end, given=above)
            rows = len(forest) - above
            query, key, value = (
                torch.randn(1, heads, count, size, requires_grad=grad)
                for heads, count in ((4, rows), (2, len(forest)), (2, len(forest)))
            )
            attend_by_flex(query, key, value, visibility, 0, scale)
    assert all(graph == pytest.approx([4, 2, size, size**-0.5, 128, 128]) for graph in graphs)
    assert 2 <= len(graphs) <= 6


@pytest.mark.gpu
def test_a_bfloat16_model_on_a_gpu() -> None:
    """The whole pass: body in bfloat16, last layer at the rows that are read, head in fp32, and back."""
    found = forest_logp(make_model("qwen3", DType.bfloat16).cuda(), build_batch(conversation()), 1.0)
    exact = forest_logp(make_model("qwen3", DType.float32), build_batch(conversation()), 1.0)
    assert (found.cpu() - exact).abs().mean() < 0.1
    found.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 150])
def test_flex_attention_on_a_gpu(window: int) -> None:
    forest, _ = build_forest(grown_rows(700))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, len(forest), 32, generator=generator) for h in (4, 2, 2))
    inputs = [tensor.cuda().requires_grad_() for tensor in (query, key, value)]
    visibility = Visibility(forest.depth.cuda(), forest.subtree_end.cuda())
    found, _ = forest_attention(nn.Identity(), *inputs, None, forest=visibility, sliding_window=window or None)
    mask = by_hand(forest, window).cuda()
    expected = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(found, expected, atol=5e-3)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        assert ((one - other).norm() / other.norm()) < 1e-2


# --- choosing it ---


def recurrent_model() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def test_models_without_softmax_attention_take_rows_and_say_why() -> None:
    model = recurrent_model()
    choose_attention(model, AttentionKind.auto)
    assert not uses_forest(model)
    assert "padded rows" in describe_attention(model)
    assert "linear_attention" in describe_attention(model)
    assert_equal_to_plain(model, conversation(), 1e-4, 1e-3, budget=70)
    with pytest.raises(ConfigError, match="linear_attention"):
        choose_attention(model, AttentionKind.forest)
    with pytest.raises(ConfigError, match=r"engine=local cannot sample .*linear_attention"):
        Local().start(ModelWeights(model), deterministic=True, longest_context=512)


def test_models_whose_attention_is_of_another_kind() -> None:
    config = GptOssConfig(**SIZES, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"GptOss.* has no scaled dot-product attention"):
        choose_attention(AutoModelForCausalLM.from_config(config), AttentionKind.auto)


def test_the_choice_is_told() -> None:
    model = make_model("qwen3")
    assert "forest" in describe_attention(model)
    choose_attention(model, AttentionKind.sdpa)
    assert layout_of(model) is Layout.padded
    assert describe_attention(model) == "attention: padded rows, sdpa"


def test_flash_attention_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(ConfigError, match="flash-attn package"):
        choose_attention(make_model("qwen3"), AttentionKind.flash_attention_2)


def test_flash_attention_needs_sixteen_bits() -> None:
    with pytest.raises(ConfigError, match=r"set `dtype=bfloat16`"):
        ModelSettings("tiny", DType.float32, attention=AttentionKind.flash_attention_2)


def test_rows_and_forest_agree() -> None:
    model = make_model("qwen3")
    batch = build_batch(conversation())
    expected = forest_logp(model, batch, 1.0)
    choose_attention(model, AttentionKind.sdpa)
    assert (forest_logp(model, batch, 1.0, budget=70) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.ones(2)}, {"dropout": 0.1}])
def test_attention_with_extras_is_refused(extra: dict[str, Any]) -> None:
    forest, _ = build_forest([[1, 2, 3]])
    states = torch.randn(1, 2, 3, 8)
    visibility = Visibility(forest.depth, forest.subtree_end)
    with pytest.raises(ValueError, match=r"model\.attention=sdpa"):
        forest_attention(nn.Identity(), states, states, states, None, forest=visibility, **extra)


# --- the check at the start ---


def test_a_forest_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had transformers not handed the forest to the attention, all siblings would see one another."""
    model = make_model("qwen3", DType.float32)
    whole = build_batch(conversation())
    micro = pack(whole, torch.arange(len(whole)), 10_000, flops_of(model))[0].micro_batches[0]
    assert compare(Scorer(model), [micro]).holds
    causal = torch.arange(len(whole.forest))
    monkeypatch.setattr(Visibility, "pieces", lambda *_: [Piece(0, len(micro.ids[0]), slice(0, len(causal)), True)])
    assert not compare(Scorer(model), [micro]).holds
