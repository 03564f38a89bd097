"""The chunked head: the numbers of plain autograd, without the logits ever being whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtgrpo.batch.forest import Kept
from mtgrpo.errors import ConfigError
from mtgrpo.model import logprobs
from mtgrpo.model.load import ModelSettings, load_model, round_head
from mtgrpo.model.logprobs import ONEDNN_SIZE, RoundedHead, head_logits, sampled_logprobs
from mtgrpo.model.settings import DType, Head

ROWS, HIDDEN, VOCABULARY = 7, 5, 23
ROW = torch.tensor([6, 0, 0, 3, 1, 0, 5])  # any order; row 0 has several tokens, one of them twice; rows 2 and 4 none
TOKEN = torch.tensor([22, 0, 7, 11, 12, 7, 4])
# The settings (rows of a tile, its bytes, bytes kept): whole; many tiles, one of them kept; many tiles, several kept.
TILINGS = [(2048, 2**24, 2**26), (3, 200, 0), (2, 64, 500)]


def tile(monkeypatch: pytest.MonkeyPatch, rows: int, tile_bytes: int, kept_bytes: int) -> None:
    monkeypatch.setattr(logprobs, "ROWS", rows)
    monkeypatch.setattr(logprobs, "TILE_BYTES", dict.fromkeys(("cpu", "cuda"), tile_bytes))
    monkeypatch.setattr(logprobs, "KEPT_BYTES", kept_bytes)


def make(
    rows: int = ROWS, hidden: int = HIDDEN, vocabulary: int = VOCABULARY, bias: bool = False, scale: float = 1.0
) -> tuple[Tensor, nn.Linear]:
    """Hidden states and a head in fp64."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    head = nn.Linear(hidden, vocabulary, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    states = torch.randn(rows, hidden, generator=generator, dtype=torch.float64) * scale
    return states.requires_grad_(), head


def make_kept(sets: int, vocabulary: int, number: Tensor, token: Tensor, seed: int = 0) -> Kept:
    """About a third of the vocabulary at random, always with what was sampled and something else."""
    keep = torch.rand(sets, vocabulary, generator=torch.Generator().manual_seed(seed)) < 0.3
    keep[number, token] = True
    keep[:, vocabulary // 2] = True
    counts = keep.sum(1)
    return Kept(number, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), keep.nonzero()[:, 1])


def plain(
    hidden: Tensor, head: nn.Linear, row: Tensor, token: Tensor, temperature: float, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, by plain autograd."""
    logits = head(hidden)[row] / temperature
    if kept is not None:
        cut = torch.ones(logits.shape, dtype=torch.bool)
        for i, number in enumerate(kept.number.tolist()):
            cut[i, kept.token[kept.offset[number] : kept.offset[number + 1]]] = False
        logits = logits.masked_fill(cut, -1e4)  # the fp64 probability is exactly 0
    logp = logits.log_softmax(-1)
    return logp[torch.arange(len(row)), token], -(logp.exp() * logp).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor], entropy: bool) -> tuple[Tensor, ...]:
    """Of a weighted sum of the log-probabilities, and of the entropies if `entropy`."""
    logp, entropies = outputs
    loss = (logp * torch.linspace(-1, 2, len(logp), dtype=logp.dtype)).sum()
    if entropy:
        loss = loss + (entropies * torch.linspace(1, 3, len(entropies), dtype=logp.dtype)).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_plain_autograd(
    monkeypatch: pytest.MonkeyPatch,
    tiling: tuple[int, int, int],
    bias: bool,
    entropy: bool,
    cut: bool,
    temperature: float,
) -> None:
    tile(monkeypatch, *tiling)
    hidden, head = make(bias=bias)
    kept = make_kept(ROWS, VOCABULARY, ROW, TOKEN) if cut else None
    inputs = [hidden, *head.parameters()]
    found = sampled_logprobs(hidden, head, ROW, TOKEN, temperature, kept)
    expected = plain(hidden, head, ROW, TOKEN, temperature, kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        gradients(found, inputs, entropy), gradients(expected, inputs, entropy), rtol=0, atol=1e-12
    )


@given(
    rows=st.integers(0, 9),
    hidden_size=st.integers(1, 4),
    vocabulary=st.integers(1, 30),
    pairs=st.integers(0, 12),
    tiling=st.tuples(st.integers(1, 5), st.integers(1, 400), st.integers(0, 2000)),
    cut=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(
    rows: int, hidden_size: int, vocabulary: int, pairs: int, tiling: tuple[int, int, int], cut: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = pairs if rows else 0
    row = torch.randint(0, max(rows, 1), (pairs,), generator=generator)
    token = torch.randint(0, vocabulary, (pairs,), generator=generator)
    hidden, head = make(rows, hidden_size, vocabulary, bias=True)
    kept = make_kept(rows, vocabulary, row, token, seed) if cut else None
    inputs = [hidden, *head.parameters()]
    with pytest.MonkeyPatch.context() as monkeypatch:
        tile(monkeypatch, *tiling)
        found = sampled_logprobs(hidden, head, row, token, 0.8, kept)
        slopes = gradients(found, inputs, entropy=True)
    expected = plain(hidden, head, row, token, 0.8, kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(slopes, gradients(expected, inputs, entropy=True), rtol=0, atol=1e-11)


@pytest.mark.parametrize("tiling", TILINGS)
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, tiling: tuple[int, int, int]) -> None:
    tile(monkeypatch, *tiling)
    hidden, head = make(4, 3, 11, bias=True)
    row, token = torch.tensor([3, 0, 3]), torch.tensor([10, 2, 5])

    def outputs(hidden: Tensor, *_parameters: Tensor) -> tuple[Tensor, Tensor]:
        return sampled_logprobs(hidden, head, row, token, 0.9)

    assert torch.autograd.gradcheck(outputs, (hidden, *head.parameters()))


@pytest.mark.parametrize("tiling", [*TILINGS[:1], (32, 2**12, 2**13)])
def test_fp32_is_within_rounding_of_fp64(monkeypatch: pytest.MonkeyPatch, tiling: tuple[int, int, int]) -> None:
    tile(monkeypatch, *tiling)
    hidden, head = make(100, 64, 1000)
    row, token = torch.arange(100), torch.arange(0, 1000, 10)
    exact = plain(hidden, head, row, token, 1.0)
    slopes = gradients(exact, [hidden, head.weight], entropy=True)
    narrow, narrow_head = hidden.detach().float().requires_grad_(), head.float()
    found = sampled_logprobs(narrow, narrow_head, row, token, 1.0)
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found, tuple(x.float() for x in exact), rtol=0, atol=3e-5)
    narrow_slopes = gradients(found, [narrow, narrow_head.weight], entropy=True)
    torch.testing.assert_close(narrow_slopes, tuple(x.float() for x in slopes), rtol=0, atol=2e-4)


@pytest.mark.parametrize("tiling", TILINGS)
def test_huge_logits_stay_finite(monkeypatch: pytest.MonkeyPatch, tiling: tuple[int, int, int]) -> None:
    tile(monkeypatch, *tiling)
    head = nn.Linear(1, 6, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1e4], [-1e4], [0.0], [-1e4], [1e4], [3.0]]))
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    row, token = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 3])
    logp, entropy = sampled_logprobs(hidden, head, row, token, 1.0)
    log_half = -torch.tensor(2.0).log()
    torch.testing.assert_close(logp, torch.stack([log_half, log_half - 2e4, log_half]), rtol=0, atol=2e-3)
    torch.testing.assert_close(entropy, -log_half.expand(3), rtol=0, atol=2e-3)
    assert all(slope.isfinite().all() for slope in gradients((logp, entropy), [hidden, head.weight], entropy=True))


# --- what is computed, in which precision, at what cost ---


class Seen(TorchDispatchMode):
    """Counts matrix products and records the largest floating-point tensor that comes into being."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += "mm" in func.name()
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("cut", [False, True])
def test_no_tensor_is_larger_than_a_tile_or_a_gradient(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    rows, size, vocabulary = 64, 8, 512
    tile(monkeypatch, 16, 16 * 32 * 8, 0)
    hidden, head = make(rows, size, vocabulary, bias=True)
    row, token = torch.arange(rows), torch.arange(rows) * 7
    kept = Kept(row, torch.arange(rows + 1) * 2, torch.stack([token, token + 1], 1).flatten()) if cut else None
    with Seen() as seen:
        outputs = sampled_logprobs(hidden, head, row, token, 1.0, kept)
        gradients(outputs, [hidden, *head.parameters()], entropy=True)
    assert seen.largest <= max(16 * 32, vocabulary * size)
    with Seen() as seen:
        gradients(plain(hidden, head, row, token, 1.0), [hidden, head.weight], entropy=True)
    assert seen.largest == rows * vocabulary  # it can be seen


def products(hidden: Tensor, head: nn.Linear, grad: bool = True) -> tuple[int, int]:
    """Matrix products of the forward and of the backward."""
    with Seen() as forward, torch.set_grad_enabled(grad):
        logp, _ = sampled_logprobs(hidden, head, ROW, TOKEN, 1.0)
    assert logp.requires_grad == (grad and (hidden.requires_grad or head.weight.requires_grad))
    with Seen() as backward:
        if logp.requires_grad:
            logp.sum().backward()
    return forward.products, backward.products


def test_nothing_is_computed_twice_or_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = make()
    assert products(hidden, head) == (1, 2)  # one tile, kept
    assert products(hidden, head, grad=False) == (1, 0)
    tile(monkeypatch, ROWS, ROWS * 6 * 8, 0)
    assert products(hidden, head) == (4, 3 + 4 * 2)  # the last tile is kept in any case
    head.weight.requires_grad_(False)
    head.weight.grad = None
    assert products(hidden, head) == (4, 3 + 4)
    assert head.weight.grad is None
    assert products(hidden.detach(), head) == (4, 0)
    head.weight.requires_grad_(True)
    assert products(hidden.detach(), head) == (4, 3 + 4)
    assert head.weight.grad is not None


def test_a_small_union_of_kept_tokens_needs_a_small_part_of_the_head() -> None:
    hidden, head = make(vocabulary=1000, bias=True)
    kept = make_kept(ROWS, VOCABULARY, ROW, TOKEN)
    with Seen() as seen:
        found = sampled_logprobs(hidden, head, ROW, TOKEN, 1.0, kept)
    assert seen.largest < 1000
    torch.testing.assert_close(found, plain(hidden, head, ROW, TOKEN, 1.0, kept), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tiling", TILINGS)
def test_several_distributions_may_follow_a_row(monkeypatch: pytest.MonkeyPatch, tiling: tuple[int, int, int]) -> None:
    """Each is normalised over its own tokens; the head runs once for each row all the same."""
    tile(monkeypatch, *tiling)
    hidden, head = make(bias=True)
    row, token = torch.tensor([0, 3, 3, 3, 6, 3, 0]), torch.tensor([22, 0, 7, 11, 12, 7, 4])
    kept = make_kept(5, VOCABULARY, torch.tensor([4, 0, 2, 3, 3, 0, 1]), token)  # sets 0, 2 and 3 follow row 3
    inputs = [hidden, *head.parameters()]
    with Seen() as seen:
        found = sampled_logprobs(hidden, head, row, token, 0.7, kept)
        slopes = gradients(found, inputs, entropy=True)
    expected = plain(hidden, head, row, token, 0.7, kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(slopes, gradients(expected, inputs, entropy=True), rtol=0, atol=1e-12)
    with Seen() as alone:  # as many rows, a distribution each
        one = make_kept(ROWS, VOCABULARY, ROW, TOKEN)
        gradients(sampled_logprobs(hidden, head, ROW, TOKEN, 0.7, one), inputs, entropy=True)
    assert seen.products == alone.products


def test_kept_tokens_may_come_in_any_order_and_twice() -> None:
    hidden, head = make(2)
    row, token = torch.tensor([0, 1, 1]), torch.tensor([4, 9, 2])
    strewn = Kept(row, torch.tensor([0, 3, 7]), torch.tensor([8, 4, 8, 9, 2, 1, 9]))
    sorted_ = Kept(row, torch.tensor([0, 2, 5]), torch.tensor([4, 8, 1, 2, 9]))
    found = sampled_logprobs(hidden, head, row, token, 1.0, strewn)
    torch.testing.assert_close(found, plain(hidden, head, row, token, 1.0, sorted_), rtol=0, atol=1e-12)


def test_many_kept_tokens_are_summed_without_loss_in_fp32() -> None:
    """30 000 tokens of 1e-6 each beside one of 0.97: added up in fp32 they are off by 1.3e-3."""
    hidden, head = torch.ones(1, 1), nn.Linear(1, 30_001, bias=False)
    with torch.no_grad():
        head.weight.zero_()[0] = math.log(1e6)
    kept = Kept(torch.tensor([0]), torch.tensor([0, 30_001]), torch.arange(30_001))
    logp, _ = sampled_logprobs(hidden, head, torch.tensor([0]), torch.tensor([0]), 1.0, kept)
    assert logp.item() == pytest.approx(-math.log1p(0.03), abs=1e-6)


def test_what_was_kept_for_the_backward_survives_it() -> None:
    hidden, head = make()
    logp, entropy = sampled_logprobs(hidden, head, ROW, TOKEN, 1.0)
    loss = logp.sum() + entropy.sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, hidden)[0])


def test_bfloat16_hidden_states_are_computed_with_in_fp32_under_autocast_too() -> None:
    hidden, head = make()
    narrow, head = hidden.detach().bfloat16().requires_grad_(), head.float()
    expected = plain(narrow.float(), head, ROW, TOKEN, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = sampled_logprobs(narrow, head, ROW, TOKEN, 1.0)
        slopes = gradients(found, [narrow, head.weight], entropy=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [slope.dtype for slope in slopes] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(slopes[1], gradients(expected, [head.weight], entropy=True)[0], rtol=0, atol=1e-5)


# --- products by oneDNN ---


@pytest.mark.parametrize("bias", [False, True])
def test_products_by_onednn_are_as_exact_as_those_by_mkl(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    size = ONEDNN_SIZE
    exact_hidden, exact_head = make(size, size, 2 * size, bias, scale=0.2)
    row, token = torch.arange(size), torch.arange(size)
    inputs = [exact_hidden, *exact_head.parameters()]
    expected = plain(exact_hidden, exact_head, row, token, 0.8)
    expected = [*expected, *gradients(expected, inputs, entropy=True)]
    hidden, head = exact_hidden.detach().float().requires_grad_(), exact_head.float()
    distances: dict[int, list[float]] = {}
    for least in (size, size + 1):
        monkeypatch.setattr(logprobs, "ONEDNN_SIZE", least)
        found = sampled_logprobs(hidden, head, row, token, 0.8)
        slopes = gradients(found, [hidden, *head.parameters()], entropy=True)
        pairs = zip([*found, *slopes], expected, strict=True)
        distances[least] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    for by_onednn, by_mkl in zip(distances[size], distances[size + 1], strict=True):
        assert by_onednn <= 3 * by_mkl <= 1e-5


@pytest.mark.parametrize("kept", [None, make_kept(ROWS, VOCABULARY, ROW, TOKEN)])
def test_a_narrow_gradient_is_near_the_one_of_the_same_scores(kept: Kept | None) -> None:
    hidden, head = make(bias=True)
    hidden, head = hidden.detach().float().requires_grad_(), head.float()
    inputs = [hidden, *head.parameters()]
    wide, narrow = (sampled_logprobs(hidden, head, ROW, TOKEN, 0.8, kept, narrow) for narrow in (False, True))
    assert all(map(torch.equal, wide, narrow))
    found, expected = (gradients(scores, inputs, entropy=True) for scores in (narrow, wide))
    assert not torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])
    for slope, exact in zip(found, expected, strict=True):
        assert (slope - exact).norm() <= 1e-2 * exact.norm()


# --- a head of rounded factors ---


def rounded(head: nn.Linear, precision: Head) -> RoundedHead:
    head.float().__class__ = RoundedHead
    head.precision = precision
    return head


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiling", TILINGS)
def test_bf16_rounds_the_factors_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tiling: tuple[int, int, int], bias: bool
) -> None:
    """Log-probabilities are those of rounded states and weights; gradients are the plain ones to two digits."""
    tile(monkeypatch, *tiling)
    hidden, head = make(bias=bias)
    hidden = hidden.detach().float().requires_grad_()
    inputs = [hidden, *head.float().parameters()]
    exact = gradients(plain(hidden, head, ROW, TOKEN, 0.8), inputs, entropy=True)
    expected = nn.functional.linear(hidden.bfloat16().float(), head.weight.bfloat16().float(), head.bias) / 0.8
    head = rounded(head, Head.bf16)
    logp, entropy = sampled_logprobs(hidden, head, ROW, TOKEN, 0.8)
    torch.testing.assert_close(logp, expected.log_softmax(-1)[ROW, TOKEN], rtol=0, atol=1e-5)
    assert (logp - plain(hidden, make(bias=bias)[1].float(), ROW, TOKEN, 0.8)[0]).abs().max() > 1e-3
    for found, slope in zip(gradients((logp, entropy), inputs, entropy=True), exact, strict=True):
        assert (found - slope).norm() <= 2e-2 * slope.norm()
    with torch.no_grad():
        torch.testing.assert_close(head(hidden[None])[0] / 0.8, expected, rtol=0, atol=1e-5)


def test_tf32_leaves_the_products_of_others_as_they_are() -> None:
    hidden, head = make()
    expected = plain(hidden.float(), head.float(), ROW, TOKEN, 1.0)
    found = sampled_logprobs(hidden.float(), rounded(head, Head.tf32), ROW, TOKEN, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.backends.cuda.matmul.fp32_precision == "none"


def test_the_setting_of_the_head() -> None:
    """Trainer, engine and the model's own forward pass have one head."""
    model = load_model(ModelSettings("tiny", head=Head.bf16), 0)
    exact = load_model(ModelSettings("tiny"), 0)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        assert torch.equal(logits, head_logits(model, hidden))
        logp, _ = sampled_logprobs(hidden, model.lm_head, torch.arange(3), torch.tensor([1, 2, 3]), 1.0)
        assert torch.allclose(logp, logits.log_softmax(-1)[torch.arange(3), [1, 2, 3]], atol=1e-5)
        assert 0 < (logits - exact(input_ids=ids, use_cache=False).logits[0]).abs().max() < 0.05
    with pytest.raises(ConfigError, match=r"`head=bf16` rounds what `dtype=float64` keeps: set `head=fp32`"):
        ModelSettings("tiny", DType.float64, head=Head.bf16)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "most"), [(Head.tf32, 2e-2), (Head.bf16, 1e-4)])
def test_a_head_on_a_gpu(precision: Head, most: float) -> None:
    """Against the CPU, which rounds for bf16 alone."""
    found: list[tuple[Tensor, ...]] = []
    for device in ("cpu", "cuda"):
        hidden, head = make(64, 128, 1000)
        states = hidden.detach().float().to(device).requires_grad_()
        head = rounded(head, precision).to(device)
        row, token = torch.arange(64, device=device), torch.arange(64, device=device)
        outputs = sampled_logprobs(states, head, row, token, 1.0)
        found.append((*outputs, *gradients((outputs[0].cpu(), outputs[1].cpu()), [states, head.weight], True)))
    for one, other in zip(*found, strict=True):
        assert (one - other.cpu()).norm() <= most * one.norm()


@pytest.mark.parametrize(
    ("settings", "device_type", "precision"),
    [
        (ModelSettings("tiny"), "cuda", Head.tf32),
        (ModelSettings("tiny", DType.float32), "cuda", None),
        (ModelSettings("tiny", DType.bfloat16), "cpu", None),
        (ModelSettings("tiny", DType.float64), "cuda", None),
        (ModelSettings("tiny", head=Head.fp32), "cuda", None),
        (ModelSettings("tiny", head=Head.bf16), "cpu", Head.bf16),
    ],
)
def test_a_head_rounds_by_itself_where_the_body_rounds_more(
    settings: ModelSettings, device_type: str, precision: Head | None
) -> None:
    head = nn.Linear(4, 4)
    round_head(head, settings, device_type)
    assert (head.precision if isinstance(head, RoundedHead) else None) is precision


# --- wrong input ---


@pytest.mark.parametrize(
    ("row", "token", "said"),
    [
        ([0, 7], [1, 1], "pair 1 is token 1 of row 7, but there are 7 rows"),
        ([-1], [1], "token 1 of row -1"),
        ([0], [23], "token 23 of row 0, but there are 7 rows and a vocabulary of 23 tokens"),
        ([0], [-1], "token -1"),
    ],
)
def test_a_row_or_token_out_of_range_is_named(row: list[int], token: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampled_logprobs(*make(), torch.tensor(row), torch.tensor(token), 1.0)


@pytest.mark.parametrize(
    ("offset", "token", "said"),
    [
        ([0, 1, 2], [4, 5], r"pair 1, token 4 of row 1, is not among"),
        ([0, 2, 2], [4, 5], "row 1 keeps 0 tokens"),
        ([0, 1, 2], [4, 23], "token 23 of row 1"),
    ],
)
def test_a_kept_set_that_cannot_be_is_refused(offset: list[int], token: list[int], said: str) -> None:
    kept = Kept(torch.tensor([0, 1]), torch.tensor(offset), torch.tensor(token))
    with pytest.raises(ValueError, match=said):
        sampled_logprobs(*make(2), torch.tensor([0, 1]), torch.tensor([4, 4]), 1.0, kept)
