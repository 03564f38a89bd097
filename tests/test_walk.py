"""Trees beyond the token budget: walked depth first, every token computed once, and the gradient that of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import build_batch
from mtgrpo.batch.packing import MicroBatch, pack, visits
from mtgrpo.config.compose import preset
from mtgrpo.errors import ConfigError
from mtgrpo.model.attention import AttentionKind
from mtgrpo.model.checkpointing import checkpoint_layers
from mtgrpo.model.load import DType, Head
from mtgrpo.model.logprobs import RoundedHead
from mtgrpo.model.prefix import Prefix
from mtgrpo.model.scorer import Scorer, Scores, flops_of
from mtgrpo.model.traits import traits
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.settings import OptimizerSettings
from mtgrpo.policy.step import Policy, at_once
from mtgrpo.stages.run import longest_context
from mtgrpo.types import Trajectory
from mtgrpo.weights.source import ModelWeights
from test_attention import conversation, make_model, trajectories
from test_packing import COST, trajectory
from test_policy import Descent

NO_CUT = 10**6


def loss(entries: Tensor, scores: Scores) -> PerToken:
    return PerToken(
        scores.logp + 0.1 * scores.entropy, torch.zeros(len(entries), dtype=torch.bool, device=scores.logp.device)
    )


def trained(
    played: Sequence[Trajectory], budget: int, family: str = "qwen3", dtype: DType = DType.float64, twice: bool = False
) -> tuple[dict[str, float], dict[str, Tensor], Tensor]:
    """Metrics and gradient of one update in micro-batches of `budget` tokens, and the log-probabilities."""
    model = make_model(family, dtype)
    if twice:
        checkpoint_layers(model)
    descent = Descent(model, 0.0)
    policy = Policy(model, descent, budget, 0.8)  # type: ignore[arg-type]
    batch = build_batch(played)
    logp = at_once(policy.scoring(batch, torch.arange(len(batch)))).logp
    weights = torch.linspace(-1, 2, len(batch), dtype=torch.float64)
    metrics = at_once(policy.updating(batch, torch.arange(len(batch)), weights, loss))
    return metrics, descent.gradients[0], logp


def assert_as_uncut(
    played: Sequence[Trajectory], budget: int, tolerance: float = 1e-10, **how: object
) -> dict[str, float]:
    expected, found = (trained(played, size, **how) for size in (NO_CUT, budget))  # type: ignore[arg-type]
    names = ("loss", "entropy", "clip_fraction")
    assert [found[0][name] for name in names] == pytest.approx([expected[0][name] for name in names], rel=tolerance)
    assert (found[2] - expected[2]).abs().max() <= tolerance
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= tolerance * max(1.0, gradient.norm().item()), name
    return found[0]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "gemma3-window", "deepseek"])
@pytest.mark.parametrize("budget", [48, 20, 3])
def test_a_budget_of_any_size(family: str, budget: int, twice: bool) -> None:
    """The longest context here has 43 tokens: below that chains are computed again."""
    metrics = assert_as_uncut(conversation(), budget, family=family, twice=twice)
    assert (metrics["repeated_tokens"] == 0) == (budget == 48)


@settings(max_examples=10, deadline=None)
@given(batch=trajectories(), budget=st.integers(1, 40), twice=st.booleans())
def test_random_forests(batch: list[Trajectory], budget: int, twice: bool) -> None:
    assert_as_uncut(batch, budget, twice=twice)


@pytest.mark.parametrize("twice", [False, True])
def test_in_fp32_and_in_16_bits(twice: bool) -> None:
    assert_as_uncut(conversation(), 20, 2e-5, dtype=DType.float32, twice=twice)
    assert_as_uncut(conversation(), 20, 0.1, dtype=DType.bfloat16, twice=twice)
    assert_as_uncut(conversation(), 20, 0.02, dtype=DType.float16, twice=twice)


class Gathered(Optimizer):
    """Keeps the gradients of a step in place of taking it: those of the weights, or of their copies on the host."""

    def step(self) -> float:
        self.gathered = [stepped.grad for stepped in self._stepped.values() if stepped.grad is not None]
        for weight in self._stepped:
            weight.grad = None
        return 1.0


def gathered(
    budget: int, head: Head = Head.fp32, twice: bool = False, offload: bool = False, dtype: DType = DType.float64
) -> Tensor:
    """The gradient of one update, flat."""
    model = make_model("qwen3", dtype)
    if head is not Head.fp32:
        found = model.get_output_embeddings()
        found.__class__, found.precision = RoundedHead, head
    if twice:
        checkpoint_layers(model)
    optimizer = Gathered(model, OptimizerSettings(offload=offload), 0)
    batch = build_batch(conversation())
    weights = torch.linspace(-1, 2, len(batch), dtype=torch.float64)
    at_once(Policy(model, optimizer, budget, 0.8).updating(batch, torch.arange(len(batch)), weights, loss))
    assert len(optimizer.gathered) == len(list(model.parameters()))
    return torch.cat([gradient.flatten().double() for gradient in optimizer.gathered])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("budget", [NO_CUT, 48, 20])
def test_every_way_to_need_less_memory_gives_the_plain_gradient(
    budget: int, twice: bool, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers computed twice, trees walked depth first, gradients that leave for the host; and any head with them."""
    monkeypatch.setattr("mtgrpo.policy.optimizer._on_gpu", lambda _: True)
    plain = gathered(NO_CUT)
    assert (gathered(budget, twice=twice, offload=offload) - plain).norm() <= 1e-8 * plain.norm()
    for head, precision in ((Head.tf32, 1e-4), (Head.bf16, 2e-2)):
        found = gathered(budget, head, twice, offload, DType.float32)
        assert (found - plain).norm() <= precision * plain.norm()
        assert (found - gathered(NO_CUT, head, dtype=DType.float32)).norm() <= 1e-4 * plain.norm()


def test_a_prompt_that_nearly_fills_the_budget_is_computed_once() -> None:
    """2 x 8 siblings, prompts of 30,000 tokens, answers of up to 1,500, some begin alike; a budget of 32,000."""
    lengths = range(800, 1600, 100)
    played = [
        trajectory([first] * 30_000 + [3] * (100 * (number % 3)), [100 + number] * length)
        for first in (1, 2)
        for number, length in enumerate(lengths)
    ]
    batch = build_batch(played)
    (packing,) = pack(batch, torch.arange(len(batch)), 32_000, COST)
    assert packing.distinct == 2 * (30_200 + sum(lengths) - len(lengths))
    assert packing.computed / packing.distinct <= 1.2
    assert held_at_once(packing.micro_batches) <= 32_000


def held_at_once(micro_batches: Sequence[MicroBatch]) -> int:
    """The most tokens whose activations a walk holds."""
    most, held = 0, list[int]()
    for micro, entered in visits(micro_batches):
        if not entered:
            held.pop()
        most = max(most, sum(held) + micro.computed)
        if entered and micro.opens:
            held.append(micro.computed if micro.held else 0)
    return most


@settings(max_examples=60)
@given(batch=trajectories(), budget=st.integers(1, 60), ranks=st.integers(1, 3))
def test_no_more_than_the_budget_is_held(batch: list[Trajectory], budget: int, ranks: int) -> None:
    whole = build_batch(batch)
    for rank in pack(whole, torch.arange(len(whole)), budget, COST, ranks=ranks):
        assert held_at_once(rank.micro_batches) <= budget
        assert all(not micro.given or micro.forest is not None for micro in rank.micro_batches)


@settings(max_examples=8, deadline=None)
@given(batch=trajectories(), budget=st.integers(5, 40))
def test_ranks_share_a_tree(batch: list[Trajectory], budget: int) -> None:
    """The gradients of all ranks add up to that of one."""
    whole = build_batch(batch)
    entries, weights = torch.arange(len(whole)), torch.linspace(-1, 2, len(whole), dtype=torch.float64)
    found: list[dict[str, Tensor]] = []
    for rank, ranks in ((0, 1), (0, 3), (1, 3), (2, 3)):
        model = make_model("qwen3")
        descent = Descent(model, 0.0)
        policy = Policy(model, descent, budget, 0.8, parallel=ParallelLayout(rank, ranks))  # type: ignore[arg-type]
        at_once(policy.updating(whole, entries, weights, loss))
        found.append(descent.gradients[0])
    for name, expected in found[0].items():
        together = sum(part[name] for part in found[1:])
        assert (together - expected).norm() <= 1e-10 * max(1.0, expected.norm().item())


def test_a_micro_batch_by_itself_computes_what_it_is_not_given() -> None:
    """As the comparison with plain forward passes needs it."""
    model, batch = make_model("qwen3"), build_batch(conversation())
    (packing,) = pack(batch, torch.arange(len(batch)), 20, flops_of(model))
    scorer, above = Scorer(model), None
    compared = 0
    for micro, entered in visits(packing.micro_batches):
        if not entered:
            above = above and above.above
            continue
        prefix = Prefix(micro, above)
        above = prefix if micro.opens else above
        with torch.no_grad():
            found = scorer(micro, 0.8, prefix).logp
            if len(found):
                assert torch.allclose(found, scorer(micro, 0.8).logp, atol=1e-10)
                compared += bool(micro.given)
    assert compared > 2


def test_trees_of_a_model_that_attends_several_times_in_a_layer_become_padded_rows() -> None:
    """Its configuration names as many layers as there are calls of its attention: 6, of 1 layer in two stacks."""
    assert_as_uncut(conversation(), 50, family="looped")
    model, batch = make_model("looped"), build_batch(conversation())
    assert len(traits(model).caches) == model.config.num_hidden_layers == 6
    assert longest_context(preset("calculator", "batch.token_budget=20"), ModelWeights(model)) == 20
    with pytest.raises(ConfigError, match=r"max_context_length=50: padded rows.*batch\.token_budget=20"):
        longest_context(
            preset("calculator", "batch.token_budget=20", "environment.max_context_length=50"), ModelWeights(model)
        )
    policy = Policy(model, Descent(model, 0.0), 50, 0.8)  # type: ignore[arg-type]
    (packing,) = policy.pack(batch, torch.arange(len(batch)))
    assert all(micro.forest is None for micro in packing.micro_batches)
    assert "attends several times in a layer" in policy.notes[0]


def test_padded_rows_are_not_cut() -> None:
    model = make_model("qwen3")
    model.set_attn_implementation(AttentionKind.sdpa.value)
    policy = Policy(model, Descent(model, 0.0), 20, 0.8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"padded row longer than batch\.token_budget=20"):
        policy.pack(build_batch(conversation()), torch.arange(40))


@pytest.mark.gpu
@pytest.mark.parametrize("twice", [False, True])
def test_a_walk_on_a_gpu(twice: bool) -> None:
    """Against the same tree in one micro-batch, in fp32 and by FlexAttention."""
    found: list[tuple[dict[str, float], dict[str, Tensor]]] = []
    for budget in (NO_CUT, 20):
        model = make_model("qwen3", DType.float32).cuda()
        if twice:
            checkpoint_layers(model)
        descent = Descent(model, 0.0)
        policy = Policy(model, descent, budget, 0.8)  # type: ignore[arg-type]
        batch = build_batch(conversation())
        weights = torch.linspace(-1, 2, len(batch), dtype=torch.float64)
        found.append((at_once(policy.updating(batch, torch.arange(len(batch)), weights, loss)), descent.gradients[0]))
    assert found[1][0]["loss"] == pytest.approx(found[0][0]["loss"], rel=1e-2)
    for name, expected in found[0][1].items():
        assert (found[1][1][name] - expected).norm() <= 2e-2 * max(1.0, expected.norm().item()), name


@pytest.mark.gpu
def test_an_offloaded_optimizer_on_a_gpu() -> None:
    batch = build_batch(conversation())
    weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
    found: list[dict[str, Tensor]] = []
    for offload in (False, True):
        model = make_model("qwen3", DType.float32).cuda()
        policy = Policy(model, Optimizer(model, OptimizerSettings(lr=1e-3, offload=offload), 0), NO_CUT, 0.8)
        for _ in range(2):
            at_once(policy.updating(batch, torch.arange(len(batch)), weights, loss))
        found.append({name: weight.detach() for name, weight in model.named_parameters()})
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected, atol=1e-4), name
