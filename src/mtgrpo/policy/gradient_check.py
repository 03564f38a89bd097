"""Whether a model's gradient is the derivative of its log-probabilities, and that of a walk what a plain pass has.

Log-probabilities that are right say nothing of the gradient: it has kernels of its own, and a tree beyond the token
budget gathers it over several passes. Both checks compute some dozens of tokens with copies of a few small weights, so
that no weight, gradient or random number of the run is touched.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice, pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.batch.packing import Layout, pack
from mtgrpo.batch.word import Pass
from mtgrpo.errors import RunError
from mtgrpo.model.attention import AttentionKind, cuts_trees
from mtgrpo.model.checkpointing import decoder_layers
from mtgrpo.model.load import computes_in
from mtgrpo.model.prefix import passes
from mtgrpo.model.rounding import HARMLESS, MARGIN, last_bits_changed
from mtgrpo.model.scorer import Scorer, flops_of, layout_of
from mtgrpo.model.traits import ordinary_tokens
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

MAX_NUMBERS = 2**22  # in a weight whose gradient is compared
TRUNK, BRANCH = 12, 8  # tokens of the tree that is computed
MAX_ROUNDING_RATIO = 4.0  # how many times what the last bits do to a gradient is still rounding
BUDGETS = (40, 15)  # tokens: its chains are held, or computed again
MAX_WALK_DISTANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}  # of the norm
STEPS = (0.03, 0.003, 0.0003)  # nats by which one changes the mean log-probability
STEPS_IN_16_BITS = (0.1, 0.2)  # the same in 16 bits
TOLERANCE = 0.05  # of that change
UNCUT = 10**6  # tokens
PARTS = 4  # of a step, whose deviation is that of noise
NODES = {-math.sqrt(0.6): 5 / 18, 0.0: 4 / 9, math.sqrt(0.6): 5 / 18}  # of Gauss and Legendre, on [-1, 1]
FLOAT16_SCALE = 2.0**10  # of a loss in float16, whose small gradients would vanish


_Result = tuple[Tensor, dict[str, Tensor]]  # log-probabilities, and the gradient of their mean by weight


class _Probe:
    """The mean log-probability of the tokens of a small tree as a function of a few weights."""

    def __init__(
        self, model: PreTrainedModel, context: Tensor, budget: int = UNCUT, layout: Layout = Layout.padded
    ) -> None:
        self.weights = _first_weights(model)  # by name, detached
        self._scorer = Scorer(model)
        self._scale = FLOAT16_SCALE if computes_in(model) is torch.float16 else 1.0
        batch = _tree(context.tolist())
        self._count = len(batch)
        (self._packing,) = pack(batch, torch.arange(len(batch)), budget, flops_of(model), layout)

    def __call__(self, weights: dict[str, Tensor], grad: bool = True) -> _Result:
        """Log-probabilities [entries] in fp64 at `weights`, and the gradient of their mean, 0 without `grad`."""
        leaves = {name: weight.clone().requires_grad_(grad) for name, weight in weights.items()}
        logp = torch.full((self._count,), torch.nan, dtype=torch.float64)
        with _in_place_of_weights(self._scorer.model, leaves), torch.set_grad_enabled(grad):
            for micro, prefix, step in passes(self._packing.micro_batches):
                if step is Pass.keys:
                    with torch.no_grad():
                        self._scorer(micro.unread(), 1.0, prefix)
                elif step is Pass.loss:
                    scores = self._scorer(micro, 1.0, prefix)
                    logp[micro.entries] = scores.logp.detach().double().cpu()[micro.target]
                    prefix.loss = scores.at(micro.target).logp.sum() * (self._scale / len(logp))
                elif grad:
                    prefix.backward()
        reached = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        return logp, {name: gradient.double() / self._scale for name, gradient in reached.items()}

    def along(self, direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
        """The weights `step` further in `direction`."""
        moved = {name: self.weights[name] + (step * part).to(self.weights[name]) for name, part in direction.items()}
        return self.weights | moved


def check_gradient(model: PreTrainedModel, agreed: Callable[[str], str]) -> list[str]:
    """Both checks, over ordinary tokens; notes. The model is trained on padded rows where a forest is wrong.

    agreed: makes of this rank's fault that of all.
    """
    context = ordinary_tokens(model.config, TRUNK + 3 * BRANCH).to(model.device)
    check_derivative(model, context)
    if not (fault := agreed(check_walk(model, context))):
        return []
    model.set_attn_implementation(AttentionKind.sdpa.value)
    return [f"{fault}: training on padded rows"]


def check_derivative(model: PreTrainedModel, context: Tensor) -> None:
    """Raise RunError unless log-probabilities change along the gradient by what the gradient adds up to.

    Rounding spoils short steps, and another choice of experts long ones. So one step has to agree; where none does, the
    last decides, unless its parts differ by as much. `context` [n]: token ids; those that are computed are of them.
    """
    if _cuts_gradient(model, context):
        return
    probe = _Probe(model, context)
    _, gradient = probe(probe.weights)
    norm = _norm(gradient)
    if not 0 < norm < math.inf:  # what is not finite is found in the update
        return
    direction = {name: part / norm for name, part in gradient.items()}
    steps = [change / norm for change in (STEPS_IN_16_BITS if computes_in(model).itemsize == 2 else STEPS)]
    if any(abs(_ratio(probe, direction, -step, step) - 1) <= TOLERANCE for step in steps):
        return
    ends = torch.linspace(-steps[-1], steps[-1], PARTS + 1).tolist()
    ratios = torch.tensor([_ratio(probe, direction, *part) for part in pairwise(ends)])
    if abs(ratios.mean().item() - 1) > TOLERANCE + 3 * ratios.std().item() / PARTS**0.5:
        raise RunError(
            f"the gradient of {type(model).__name__} is not that of its log-probabilities, which change along it by "
            f"{ratios.mean():.3g} times what it says: choose another model, model.dtype or model.quantization"
        )


def check_walk(model: PreTrainedModel, context: Tensor) -> str:
    """How a forest, walked where that is possible, differs from plain rows by more than rounding; "" = it does not."""
    if layout_of(model) is Layout.padded:
        return ""
    plain = _Probe(model, context)
    expected = plain(plain.weights)
    if not math.isfinite(_norm(expected[1])):  # as at first in float16
        return ""
    nats = share = 0.0
    for by in (1.0, -1.0):
        with last_bits_changed(model, [by]):
            moved = _distance(expected, plain(plain.weights))
        nats, share = max(nats, moved[0]), max(share, moved[1])
    for budget in BUDGETS if cuts_trees(model) else (UNCUT,):
        nats_apart, apart = _distance(expected, _Probe(model, context, budget, Layout.forest)(plain.weights))
        bound = max(MAX_WALK_DISTANCE[computes_in(model)], MAX_ROUNDING_RATIO * share)
        if not (apart <= bound and nats_apart <= max(HARMLESS, MARGIN * nats)):
            return (
                f"the gradient of a tree in micro-batches of {budget} tokens differs from that of plain rows by "
                f"{apart:.2g} of its norm, of which rounding explains {bound:.2g}, and log-probabilities by "
                f"{nats_apart:.2g} nats"
            )
    return ""


def _ratio(probe: _Probe, direction: dict[str, Tensor], start: float, end: float) -> float:
    """How much the mean log-probability changes from one place to another, as a multiple of its gradient's integral."""
    first, last = (probe(probe.along(direction, place), grad=False)[0].mean().item() for place in (start, end))
    slope = 0.0
    for node, weight in NODES.items():
        _, gradient = probe(probe.along(direction, (start + end + node * (end - start)) / 2))
        slope += weight * sum((gradient[name] * part).sum().item() for name, part in direction.items())
    return (last - first) / (slope * (end - start)) if slope else math.inf


def _distance(expected: _Result, other: _Result) -> tuple[float, float]:
    """Of log-probabilities in nats, root mean square, and of gradients as a share of the norm."""
    nats = (other[0] - expected[0]).square().mean().sqrt().item()
    apart = _norm({name: other[1][name] - part for name, part in expected[1].items()})
    return nats, apart / max(_norm(expected[1]), 1e-300)


@contextmanager
def _in_place_of_weights(model: PreTrainedModel, leaves: dict[str, Tensor]) -> Generator[None]:
    """Within, the model computes with `leaves`, by name, and no other weight gets a gradient.

    The backward pass is to be within as well, for it may compute layers again.
    """
    trained = {id(weight): leaves.get(name, weight.detach()) for name, weight in model.named_parameters()}
    places = [
        (module._parameters, name, weight)  # pyright: ignore[reportPrivateUsage]  as functional_call does
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.requires_grad
    ]
    try:
        for parameters, name, weight in places:
            parameters[name] = trained[id(weight)]  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for parameters, name, weight in places:
            parameters[name] = weight


def _first_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The small ones that are trained in the first layer that has any: their gradient comes through all layers above.

    Without layers, or where they are all large, those of the whole body.
    """
    for part in (*decoder_layers(model), model.base_model):
        inside = {id(weight) for weight in part.parameters() if weight.requires_grad and weight.numel() <= MAX_NUMBERS}
        if inside:
            return {name: weight.detach() for name, weight in model.named_parameters() if id(weight) in inside}
    return {}


def _tree(context: Sequence[int]) -> Batch:
    """Three branches after a trunk, of which two branch again, of the tokens of `context`."""
    tokens = cycle(context)

    def turn(new_context: list[int], sampled: int, parent: int) -> Turn:
        output = list(islice(tokens, sampled))
        return Turn(new_context, output, [0.0] * sampled, [0] * sampled, Finish.STOP, Message("assistant"), parent)

    trunk, task = list(islice(tokens, TRUNK)), Task("gradient", (Message("user", ""),))
    trajectories: list[Trajectory] = []
    for branches in (2, 2, 1):
        first = turn(trunk, BRANCH, -1)
        for _ in range(branches):
            second = turn(list(islice(tokens, 2)), BRANCH - 2, 0)
            trajectories.append(Trajectory(task, turns=[first, second]))
    return build_batch(trajectories)


def _cuts_gradient(model: PreTrainedModel, context: Tensor) -> bool:
    """Whether layers run without gradient by design, as the first cycles of some looped models do."""
    cut: list[bool] = []

    def note(_layer: nn.Module, _inputs: object) -> None:
        cut.append(not torch.is_grad_enabled())

    hooks = [layer.register_forward_pre_hook(note) for layer in decoder_layers(model)]
    try:
        model.base_model(input_ids=context[None, :1].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return any(cut)


def _norm(gradient: dict[str, Tensor]) -> float:
    return math.sqrt(sum(part.square().sum().item() for part in gradient.values()))
