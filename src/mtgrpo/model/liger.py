"""RMS norms, rotary positions and SwiGLU on a GPU by liger-kernel, in one kernel each where torch launches several.

A kernel takes the place of the model's own operations only where its results and gradients are theirs on a few rows, as
far as rounding goes. Results have the dtype that the model's own have.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtgrpo.model.checkpointing import subclass
from mtgrpo.model.load import computes_in

APART = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # of the size of results and gradients
ROWS = 8  # that are compared
ROPE = "apply_rotary_pos_emb"  # the function that the attention of most families finds in its module


def use_liger(model: PreTrainedModel) -> list[str]:
    """Let a model on a GPU run liger's kernels where they compute the same; returns a line for the user, or none."""
    if model.device.type != "cuda" or computes_in(model) is torch.float64:
        return []
    if find_spec("liger_kernel") is None:
        return ["kernels: torch's own; pip install 'mtgrpo[gpu]' brings fused norms, rotary positions and SwiGLU"]
    return [fuse(model)]


def fuse(model: PreTrainedModel) -> str:
    """As `use_liger`, on any device that runs the kernels."""
    reasons: dict[str, str] = {}  # why something is left as it is, by its name; "" = it is fused
    device, dtype = model.device, computes_in(model)
    rows = partial(torch.randn, 1, generator=torch.Generator(device).manual_seed(0), device=device)
    modules: list[Any] = list(model.base_model.modules())
    for module in modules:
        name, home = type(module).__name__, sys.modules[type(module).__module__]
        if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            kind, hidden = subclass("Liger", _Norm, type(module)), rows(ROWS, len(module.weight))
            reasons[name] = reasons.get(name) or _replace(module, "__class__", kind, module, hidden)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            hidden = rows(ROWS, module.gate_proj.in_features).to(dtype)
            kind = subclass("Liger", _SwiGLU, type(module))
            reasons[name] = reasons.get(name) or _replace(module, "__class__", kind, module, hidden)
        elif hasattr(home, ROPE) and hasattr(module, "head_dim") and ROPE not in reasons:
            if isinstance(original := getattr(home, ROPE), partial):  # as another model has left it
                setattr(home, ROPE, original := original.args[0])
            query, key = (rows(heads, ROWS, module.head_dim).to(dtype) for heads in (4, 2))
            call = partial(_turn_first, home, model.base_model)
            reasons[ROPE] = _replace(home, ROPE, partial(_turn, original, device.type), call, query, key)
    fused = ", ".join(name for name, reason in reasons.items() if not reason)
    left = "".join(f"; {name} is left as it is: {reason}" for name, reason in reasons.items() if reason)
    return f"kernels: liger-kernel {version('liger-kernel')} for {fused or 'nothing'}{left}"


def _replace(owner: Any, name: str, new: object, call: Callable[..., Any], *inputs: Tensor) -> str:
    """Set `name` of `owner` to `new`, and back where `call` then gives something else; "" or why it was set back."""
    original = getattr(owner, name)
    try:
        expected = _results(call, inputs)
        setattr(owner, name, new)
        results = _results(call, inputs)
        apart = [(a - b).norm() / b.norm().clamp(min=1e-9) for a, b in zip(results, expected, strict=True)]
        most = max(APART[tensor.dtype] for tensor in (*inputs, *expected))
        reason = "" if all(distance <= most for distance in apart) else f"it differs by {max(apart).item():.1g}"
    except Exception as error:  # whatever a model or a kernel does that nobody has foreseen
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if reason:
        setattr(owner, name, original)
    return reason


@torch.enable_grad()
def _results(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What `call` gives for `inputs`, and the gradients of these and of its weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    dtype, device = inputs[0].dtype, inputs[0].device.type
    with torch.autocast(device, dtype, enabled=dtype.itemsize == 2):
        output = call(*(leaf * 1 for leaf in leaves))  # a kernel may write into its input
    results: list[Tensor] = [*output] if isinstance(output, tuple) else [output]
    weights = [weight for weight in call.parameters() if weight.requires_grad] if isinstance(call, nn.Module) else []
    seeds = [torch.linspace(-1, 1, result.numel()).view_as(result).to(result) for result in results]
    return [*results, *torch.autograd.grad(results, [*leaves, *weights], seeds)]


class _Norm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: PLC0415  an extra  # pyright: ignore

        weight: Any = self.weight
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, weight.dtype))
        return LigerRMSNormFunction.apply(wide, weight, self.variance_epsilon, 0.0, "llama", False)  # not in place


class _SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # noqa: PLC0415  an extra  # pyright: ignore

        parts: Any = self
        return parts.down_proj(LigerSiLUMulFunction.apply(parts.gate_proj(x), parts.up_proj(x)))


def _turn(
    original: Callable[..., Any], device: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any
) -> Any:
    """In the place of `original`, a module's function, which other models, elsewhere or in fp64, still run."""
    from liger_kernel.ops.rope import LigerRopeFunction  # noqa: PLC0415  an extra  # pyright: ignore

    if rest or named or q.device.type != device or cos.dtype is torch.float64:
        return original(q, k, cos, sin, *rest, **named)
    return LigerRopeFunction.apply(q.to(cos.dtype), k.to(cos.dtype), cos, sin)


def _turn_first(home: Any, body: Any, query: Tensor, key: Tensor) -> Any:
    """What the attention of `home` makes of them at the first positions."""
    cos, sin = body.rotary_emb(query.float(), torch.arange(query.shape[2], device=query.device)[None])
    return getattr(home, ROPE)(query, key, cos, sin)
