"""Log-probabilities of sampled tokens and entropies, without ever holding [rows, vocabulary] logits.

The logits are computed in tiles of at most `ROWS` rows and `TILE_BYTES`, which fit a processor's cache or fill a GPU.
The forward keeps of each tile t the row's maximum m_t, log-normaliser l_t and entropy H_t, and merges them:

    l = logsumexp_t l_t      logp(token) = logit - l      w_t = exp(l_t - l)      H = sum_t w_t (H_t - log w_t)

The backward computes each tile again, turns it in place into the gradient with respect to the logits

    d = g (onehot(token) - p) - e p (log p + H)      g, e = gradients of logp and H, p = exp(logit - l)

and multiplies it into the gradients. The last `KEPT_BYTES` of tiles are kept from the forward instead, so that nothing
is computed twice where the logits are small.

Where top-k, top-p or min-p cut the distribution, the logits of the kept tokens alone are read off the tiles, and each
distribution is normalised over its own; several may follow one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from mtgrpo.batch.forest import Kept
from mtgrpo.model.cpu_kernels import multiply, onednn
from mtgrpo.model.settings import Head

ROWS = 2048  # of a tile, at most; enough for the matrix products to run at full speed
TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}  # the forward and the backward each work on two tiles
KEPT_BYTES = 64 * 2**20  # of tiles that the backward does not compute again
ONEDNN_SIZE = 384  # of all sides of a product: with a smaller one MKL is faster, which adds up in place


class RoundedHead(nn.Linear):
    """A head whose factors are rounded to `precision`. Its gradient is that of `sampled_logprobs` alone."""

    precision: Head

    def forward(self, input: Tensor) -> Tensor:
        """input [..., hidden] -> logits [..., vocabulary] in fp32. Raises RuntimeError where a gradient is wanted."""
        rows = input.flatten(0, -2).float()
        logits = rows.new_zeros(len(rows), self.out_features)
        with torch.autocast(input.device.type, enabled=False):
            _multiply(logits, rows, self.weight.t(), self.precision, cast("Tensor | None", self.bias))
        return logits.unflatten(0, input.shape[:-1])


def _multiply(
    out: Tensor, a: Tensor, b: Tensor, precision: Head, add: Tensor | None = None, beta: float = 1, alpha: float = 1
) -> None:
    """out = beta * add + alpha * a @ b; `add` is `out` itself by default."""
    add = out if add is None else add
    if precision is Head.bf16:
        a, b = a.bfloat16(), b.bfloat16()
        if a.is_cuda:
            torch.ops.aten.addmm.dtype_out(add, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
            return
        a, b = a.to(out.dtype), b.to(out.dtype)  # the products of numbers of 8 bits are exact
    if min(*a.shape, b.shape[1]) >= ONEDNN_SIZE and onednn(out.device, out.dtype):
        product = multiply(a, b.t()) if a.is_contiguous() else multiply(b.t(), a).t()  # the first factor is copied
        if beta:
            torch.add(add if beta == 1 else add * beta, product, alpha=alpha, out=out)
        else:
            torch.mul(product, alpha, out=out)
        return
    before = torch.backends.cuda.matmul.fp32_precision
    if precision is Head.tf32:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        torch.addmm(add, a, b, beta=beta, alpha=alpha, out=out)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The language-model head."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "the head of a causal language model is a matrix"
    return head


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The language-model head on hidden states [n, hidden] -> logits [n, vocabulary] in fp32 (fp64 for fp64 models)."""
    logits: Tensor = head_of(model)(hidden)
    return logits if logits.dtype == torch.float64 else logits.float()


def sampled_logprobs(
    hidden: Tensor, head: nn.Linear, row: Tensor, token: Tensor, temperature: float, kept: Kept | None = None,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probability of token[i] after hidden[row[i]], and the entropy of the distribution it is drawn from, [n] each.

    hidden [rows, hidden_size]; row, token [n] int64, in any order, several tokens of a row allowed. The distribution
    is softmax(head(hidden) / temperature), renormalised over what was `kept` when the token was sampled. Computed in
    fp32, or in fp64 if hidden or head is; autocast is ignored. Both results are in nats and carry gradient, once; its
    products round factors and results to bf16 if `narrow`.

    Raises ValueError for a row or token out of range, a row that keeps no token, a sampled token that is not kept.
    """
    device, vocabulary, weight = hidden.device, head.out_features, head.weight
    bias = cast("Tensor | None", head.bias)
    _check(row, token, len(hidden), vocabulary)
    cut = None if kept is None else _Cut.of(kept, row, token, len(hidden), vocabulary, device)
    row, token = row.to(device), token.to(device)
    if cut is not None:
        row, token = cut.row, cut.token
        union, index = token.unique(return_inverse=True)
        if 0 < len(union) < vocabulary // 2:  # the rest of the head is not needed
            weight, token = weight.index_select(0, union), index
            bias = None if bias is None else bias.index_select(0, union)
    wide = torch.float64 in (hidden.dtype, weight.dtype)
    dtype = torch.float64 if wide else torch.float32
    precision = head.precision if isinstance(head, RoundedHead) else Head.fp32
    size = TILE_BYTES[device.type] // dtype.itemsize
    plan = _Plan.of(row, token, len(hidden), len(weight), size, temperature, precision, narrow)
    with torch.autocast(device.type, enabled=False):
        bias = None if bias is None else bias.to(dtype)
        inputs = (hidden.to(dtype), weight.to(dtype), bias, plan)
        if cut is not None:
            return cut.scores(_Read.apply(*inputs))
        logp, entropy = _Tiled.apply(*inputs, torch.is_grad_enabled())
        return logp, entropy[row]


def _check(row: Tensor, token: Tensor, rows: int, vocabulary: int) -> None:
    wrong = ((row < 0) | (row >= rows) | (token < 0) | (token >= vocabulary)).nonzero()[:1, 0].tolist()
    for i in wrong:
        pair = f"pair {i} is token {token[i].item()} of row {row[i].item()}"
        raise ValueError(f"{pair}, but there are {rows} rows and a vocabulary of {vocabulary} tokens")


@dataclass(frozen=True)
class _Cut:
    """The kept tokens of all distributions, which differ in row or set, by distribution; tensors [total] int64."""

    distribution: Tensor
    row: Tensor  # of the hidden state
    token: Tensor
    drawn: Tensor  # [n], the distribution of each sampled token
    sampled: Tensor  # [n], the place of each sampled token
    count: int  # of distributions

    @staticmethod
    def of(kept: Kept, row: Tensor, token: Tensor, rows: int, vocabulary: int, device: torch.device) -> _Cut:
        """What was kept when each `token` [n] was sampled after hidden state `row` [n], of which there are `rows`."""
        pairs, drawn = torch.unique(row.cpu() * kept.sets + kept.number, return_inverse=True)
        offset, tokens = kept.listed(pairs % kept.sets)
        row, each, tokens = (pairs // kept.sets).to(device), offset.diff().to(device), tokens.to(device)
        for i in (each <= 0).nonzero()[:1, 0].tolist():
            raise ValueError(f"row {row[i].item()} keeps {each[i].item()} tokens, must keep one at least")
        _check(row.repeat_interleave(each), tokens, rows, vocabulary)
        key = torch.arange(len(row), device=device).repeat_interleave(each) * vocabulary + tokens
        if (key.diff() <= 0).any():  # in another order, or twice
            key = key.unique()
        drawn, token = drawn.to(device), token.to(device)
        wanted = drawn * vocabulary + token
        sampled = torch.searchsorted(key, wanted)
        for i in (key[sampled.clamp(max=len(key) - 1)] != wanted).nonzero()[:1, 0].tolist():
            pair = f"pair {i}, token {token[i].item()} of row {row[drawn[i]].item()},"
            raise ValueError(f"{pair} is not among the tokens that the row keeps: its log-probability is -inf")
        distribution = key // vocabulary
        return _Cut(distribution, row[distribution], key % vocabulary, drawn, sampled, len(row))

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n] of the sampled tokens and entropies [n] of their distributions; `logits` [total]."""
        top = logits.new_full((self.count,), -torch.inf)
        logits = logits - top.scatter_reduce(0, self.distribution, logits.detach(), "amax")[self.distribution]
        logp = logits - self._sum(logits.exp()).log()[self.distribution]
        return logp[self.sampled], -self._sum(logp.exp() * logp)[self.drawn]

    def _sum(self, amounts: Tensor) -> Tensor:
        """The sum over each distribution, in fp64: many small amounts would be lost in fp32."""
        total = amounts.new_zeros(self.count, dtype=torch.float64).index_add(0, self.distribution, amounts.double())
        return total.to(amounts)


@dataclass(frozen=True)
class _Tile:
    """A block of rows and a range of the vocabulary, with what lies in it."""

    rows: slice
    tokens: slice
    column: int  # which range of the vocabulary
    pairs: Tensor  # numbers of the pairs
    pair_at: tuple[Tensor, Tensor]  # their rows and columns within the tile

    def view(self, buffer: Tensor) -> Tensor:
        """The part of `buffer` that holds the tile, [rows, tokens]."""
        height, width = self.rows.stop - self.rows.start, self.tokens.stop - self.tokens.start
        return buffer[: height * width].view(height, width)


@dataclass(frozen=True)
class _Plan:
    """Where everything lies: the tiles, by blocks of rows and then by ranges of the vocabulary."""

    row: Tensor
    column: Tensor  # [n] the range of the vocabulary that holds each pair's token
    columns: int
    temperature: float
    precision: Head
    narrow: bool
    tiles: list[_Tile]
    tile_size: int  # logits of the largest one: a buffer of so many serves all, for fresh memory is slower than work

    @staticmethod
    def of(
        row: Tensor, token: Tensor, rows: int, vocabulary: int, size: int, temperature: float, precision: Head,
        narrow: bool,
    ) -> _Plan:  # fmt: skip
        blocks = max(1, ceil(rows / ROWS))
        height = max(1, ceil(rows / blocks))
        blocks = max(1, ceil(rows / height))
        width = min(vocabulary, max(1, size // height))
        columns = ceil(vocabulary / width)
        width = ceil(vocabulary / columns)
        columns = ceil(vocabulary / width)

        tile = row // height * columns + token // width
        tiles: list[_Tile] = []
        for i, pairs in enumerate(tile.argsort(stable=True).split(tile.bincount(minlength=blocks * columns).tolist())):
            top, left = i // columns * height, i % columns * width
            across, down = slice(left, min(left + width, vocabulary)), slice(top, min(top + height, rows))
            tiles.append(_Tile(down, across, i % columns, pairs, (row[pairs] - top, token[pairs] - left)))
        return _Plan(row, token // width, columns, temperature, precision, narrow, tiles, height * width)

    def logits(self, tile: _Tile, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """head(hidden) / temperature of one tile, in `buffer`."""
        logits = tile.view(buffer)
        scale = 1 / self.temperature
        add, beta = (logits, 0.0) if bias is None else (bias[tile.tokens], scale)
        _multiply(logits, hidden[tile.rows], weight[tile.tokens].t(), self.precision, add, beta, scale)
        return logits


class _Gradients:
    """The gradients of hidden, weight and bias, where they are needed, added up tile by tile."""

    def __init__(self, inputs: tuple[Tensor, Tensor, Tensor | None], needed: tuple[bool, ...], plan: _Plan) -> None:
        self._hidden, self._weight, _ = inputs
        self._plan = plan
        both = zip(inputs, needed, strict=False)
        self.hidden, self.weight, self.bias = (
            None if x is None or not need else torch.zeros_like(x) for x, need in both
        )

    def add(self, tile: _Tile, d: Tensor) -> None:
        """`d` is the gradient with respect to the tile's logits, times the temperature."""
        rows, tokens = tile.rows, tile.tokens
        if self.hidden is not None:
            self._add_product(self.hidden[rows], d, self._weight[tokens])
        if self.weight is not None:
            self._add_product(self.weight[tokens], d.t(), self._hidden[rows])
        if self.bias is not None:
            self.bias[tokens] += d.sum(0)

    def _add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        if self._plan.narrow:
            total += a.bfloat16() @ b.bfloat16()
        else:
            _multiply(total, a, b, self._plan.precision)


class _Tiled(torch.autograd.Function):
    """The module's formulas. Everything is of one dtype; `keep` = a backward may follow."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, keep: bool
    ) -> tuple[Tensor, Tensor]:
        maximum, log_sum, entropy = hidden.new_empty(3, plan.columns, len(hidden))
        logp = hidden.new_empty(len(plan.row))
        buffer, scratch = (hidden.new_empty(plan.tile_size) for _ in range(2))
        keep = keep and any(ctx.needs_input_grad)
        saved = plan.tiles[-max(1, KEPT_BYTES // max(1, buffer.nbytes)) :] if keep else []
        stored: list[Tensor] = []
        for number, tile in enumerate(plan.tiles, len(saved) - len(plan.tiles)):
            at = (tile.column, tile.rows)
            logits = plan.logits(tile, hidden, weight, bias, buffer)
            maximum[at] = logits.amax(-1)
            logits.sub_(maximum[at][:, None])
            logp[tile.pairs] = logits[tile.pair_at]
            if number >= 0:
                scratch = torch.empty_like(buffer)
                stored.append(scratch)
            weights = torch.exp(logits, out=tile.view(scratch))
            total = weights.sum(-1)
            log_sum[at] = total.log()
            entropy[at] = log_sum[at] - logits.mul_(weights).sum(-1) / total
        log_share = maximum + log_sum
        normaliser = log_share.logsumexp(0)
        log_share -= normaliser
        entropy = (log_share.exp() * (entropy - log_share)).sum(0)
        logp += (maximum - normaliser)[plan.column, plan.row]
        share = (maximum - normaliser).exp_()  # what a stored tile's exp(logit - m_t) lacks to be a probability
        ctx.save_for_backward(hidden, weight, bias, share, normaliser, entropy, *stored)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares neither names nor number
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, share, normaliser, entropy, *stored = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradients = _Gradients((hidden, weight, bias), ctx.needs_input_grad, plan)
        onehot = None if grad_logp is None else grad_logp / plan.temperature
        spread = hidden.new_zeros(len(hidden))  # the gradient is p * -spread + onehot, but for the entropy's p log p
        if onehot is not None:
            spread.index_put_((plan.row,), onehot, accumulate=True)
        if grad_entropy is not None:
            grad_entropy = grad_entropy / plan.temperature
            spread.addcmul_(grad_entropy, entropy)
        buffer, scratch = (hidden.new_empty(plan.tile_size) for _ in range(2))
        with torch.autocast(hidden.device.type, enabled=False):
            for number, tile in enumerate(plan.tiles, len(stored) - len(plan.tiles)):
                rows = tile.rows
                if number >= 0:
                    d = torch.mul(tile.view(stored[number]), share[tile.column, rows, None], out=tile.view(buffer))
                else:
                    d = plan.logits(tile, hidden, weight, bias, buffer).sub_(normaliser[rows, None]).exp_()
                p_log_p = None if grad_entropy is None else torch.xlogy(d, d, out=tile.view(scratch))
                d.mul_(-spread[rows, None])
                if grad_entropy is not None and p_log_p is not None:
                    d.addcmul_(p_log_p, grad_entropy[rows, None], value=-1)
                if onehot is not None:
                    d.index_put_(tile.pair_at, onehot[tile.pairs], accumulate=True)
                gradients.add(tile, d)
        return gradients.hidden, gradients.weight, gradients.bias, None, None


class _Read(torch.autograd.Function):
    """The logits of the plan's pairs alone, [n]; the head runs once for each row, however often it is read."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        logits = hidden.new_empty(len(plan.row))
        buffer = hidden.new_empty(plan.tile_size)
        for tile in plan.tiles:
            logits[tile.pairs] = plan.logits(tile, hidden, weight, bias, buffer)[tile.pair_at]
        ctx.save_for_backward(hidden, weight, bias)
        ctx.plan = plan
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradients = _Gradients((hidden, weight, bias), ctx.needs_input_grad, plan)
        buffer, grad = hidden.new_empty(plan.tile_size), grad / plan.temperature
        with torch.autocast(hidden.device.type, enabled=False):
            for tile in plan.tiles:
                d = tile.view(buffer).zero_()
                gradients.add(tile, d.index_put_(tile.pair_at, grad[tile.pairs], accumulate=True))
        return gradients.hidden, gradients.weight, gradients.bias, None
