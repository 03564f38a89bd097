"""liger's kernels in the place of a model's own operations: on a GPU, or on a CPU with TRITON_INTERPRET=1.

The interpreter has no bfloat16 arithmetic, so a CPU shows float32 and float16.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from mtgrpo.batch.forest import build_batch
from mtgrpo.engines.local import Local
from mtgrpo.model import liger
from mtgrpo.model.checkpointing import checkpoint_layers, subclass
from mtgrpo.model.liger import ROPE, fuse, use_liger
from mtgrpo.model.settings import DType
from mtgrpo.weights.source import ModelWeights
from test_attention import conversation, forest_logp, gradient, make_model

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [DType.float32, DType.float16, *([DType.bfloat16] if DEVICE == "cuda" else [])]
FUSED = {  # in the order of the modules
    "qwen3": "apply_rotary_pos_emb, Qwen3RMSNorm, Qwen3MLP",
    "llama": "apply_rotary_pos_emb, LlamaMLP, LlamaRMSNorm",
    "deepseek": "DeepseekV3RMSNorm, DeepseekV3MLP",
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tells Triton's interpreter what it lacks, numbers as tensors and rsqrt; puts the models' functions back."""
    norms = importlib.import_module("liger_kernel.ops.rms_norm")
    if DEVICE == "cpu":
        import numpy as np  # noqa: PLC0415  no GPU test needs these
        import triton.language as tl  # noqa: PLC0415
        from triton.runtime import interpreter  # noqa: PLC0415

        own = interpreter._implicit_cvt

        def convert(value: object) -> object:
            if not isinstance(value, float):
                return own(value)
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

        monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
        monkeypatch.setattr(norms, "rsqrt", lambda x: 1 / tl.sqrt(x))
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and isinstance(kernel := vars(module).get(ROPE), partial):
            setattr(module, ROPE, kernel.args[0])


def built(family: str, dtype: DType = DType.float32) -> PreTrainedModel:
    return make_model(family, dtype).to(DEVICE)


def relative(model: PreTrainedModel, expected: torch.Tensor) -> float:
    """How far the gradient of a forest is from `expected`, of its size."""
    found = gradient(model, forest_logp(model, build_batch(conversation()), 1.0))
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
def test_gradients_are_those_of_the_models_own_operations(family: str, dtype: DType, twice: bool) -> None:
    own, model = built(family, dtype), built(family, dtype)
    expected = gradient(own, forest_logp(own, build_batch(conversation()), 1.0))
    if twice:
        checkpoint_layers(model)
    said = fuse(model)
    assert said.partition(" for ")[2] == FUSED[family] and said.startswith("kernels: liger-kernel ")
    assert 0 < relative(model, expected) <= {DType.float32: 1e-4, DType.float16: 2e-2, DType.bfloat16: 0.1}[dtype]
    assert [*model.state_dict()] == [*own.state_dict()]


def test_what_computes_something_else_is_left_as_it_is() -> None:
    """Gemma's norms scale by 1 + weight, and its MLP has another activation."""
    model = built("gemma")
    kinds = {type(module) for module in model.modules()}
    said = fuse(model)
    assert " for apply_rotary_pos_emb; GemmaMLP is left as it is: it differs by 0." in said
    assert {type(module) for module in model.modules()} == kinds


@pytest.mark.parametrize("kernel", ["_Norm", "_SwiGLU"])
def test_a_kernel_that_is_wrong_or_fails_is_left_off(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("qwen3")
    own = getattr(liger, kernel).forward
    monkeypatch.setattr(getattr(liger, kernel), "forward", lambda self, x: 1.01 * own(self, x))
    wrong = {"_Norm": "Qwen3RMSNorm", "_SwiGLU": "Qwen3MLP"}[kernel]
    assert f"; {wrong} is left as it is: it differs by 0.01" in fuse(model)

    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(getattr(liger, kernel), "forward", fails)
    said = fuse(built("qwen3"))
    assert f"; {wrong} is left as it is: RuntimeError: no such instruction" in said and "\n" not in said


def test_the_engine_samples_from_a_fused_model_and_a_copy_is_one() -> None:
    model = built("qwen3")
    fuse(model)
    engine = Local(0.001).start(ModelWeights(model), False, 256)  # compares its own pass with that of the model
    assert "fused decoding" in engine.notes[0]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(1.5)
    ids = torch.arange(10, device=DEVICE)[None]
    assert not torch.equal(twin(ids).logits, model(ids).logits)


def test_many_rows_of_few_numbers() -> None:
    """The norms of single heads: another kernel from 32,768 rows on."""
    module = built("qwen3").model.layers[0].self_attn.q_norm
    rows = torch.randn(33_000, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    expected, found = (liger._results(norm, (rows,)) for norm in (module, norm_of(copy.deepcopy(module))))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


def norm_of(module: nn.Module) -> nn.Module:
    module.__class__ = subclass("Liger", liger._Norm, type(module))
    return module


def test_models_on_a_cpu_and_in_fp64_keep_their_own() -> None:
    assert use_liger(make_model("qwen3")) == []
    assert use_liger(make_model("qwen3").to(DEVICE)) == []
