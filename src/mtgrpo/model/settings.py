"""What is set of the model. Whoever reads settings loads no library."""

from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Annotated

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Reach, Text, Where
from mtgrpo.runtime.packages import refuse_without_package

NO_FLASH = "model.attention=flash_attention_2 needs a GPU and the flash-attn package; set it to auto"
VALUE_HEAD = "value_head.safetensors"  # apart from the model, so that for other libraries its folder is an ordinary one
FROM_SCRATCH = ("tiny", "tiny-2m", "tiny-30m")  # models that have no weights to be loaded; `tiny.py` has their shapes
SHIPPED = "tiny-calculator"  # the weights that come with the package
Model = Annotated[str, Where(Reach.network, rf"(?!({'|'.join((*FROM_SCRATCH, SHIPPED))})\Z)")]


class AttentionKind(Enum):
    """How a training batch is laid out, and the kernel of its attention."""

    auto = "auto"  # forest where the model can, else sdpa
    forest = "forest"  # every distinct token once
    sdpa = "sdpa"  # padded rows, one per conversation
    flash_attention_2 = "flash_attention_2"  # the same rows with the flash-attn package, on a GPU, in 16 bits


@dataclass
class LoRA:
    """Train low-rank adapters in place of the weights."""

    rank: int = 0  # 0 = off: all weights are trained; a saved adapter keeps its own rank
    alpha: int = 32  # what the adapters add is scaled by alpha / rank
    targets: list[Text] = field(default_factory=list[str])  # ends of module names; [] = every linear layer but the head

    def __post_init__(self) -> None:
        if self.rank < 0 or self.alpha <= 0:
            raise ConfigError(f"`rank` must be >= 0 (0 = off) and `alpha` > 0, got {self.rank} and {self.alpha}")


class DType(Enum):
    """What the forward computes in. Weights are fp32 (fp64 for float64); 16 bits mean autocast, with an fp32 head.

    With 16 bits the frozen layers of a model with adapters are kept in them too, as which they compute anyway. With
    float16 the loss is scaled, so that small gradients are not lost: an update in which one overflows is skipped. On a
    CPU the forest's attention is fp32 too; where that multiplies bf16, so are the products of the head's gradient.
    """

    auto = "auto"  # bfloat16 on a GPU, float16 where that has none, float32 on a CPU
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Quantization(Enum):
    """In what the frozen layers of a model with adapters are kept; they compute in `model.dtype`."""

    none = "none"
    nf4 = "nf4"  # 4 bits a weight (QLoRA, arXiv:2305.14314), more slowly; needs bitsandbytes


class Head(Enum):
    """To what the factors of the head's products are rounded; logits and their sums are fp32 whatever it is."""

    auto = "auto"  # tf32 on a GPU where the body computes in 16 bits, which rounds more; else fp32
    fp32 = "fp32"
    tf32 = "tf32"  # 10 bits, on a GPU; a CPU keeps all
    bf16 = "bf16"  # 7 bits


@dataclass
class ModelSettings:
    """Which model is trained. `tiny`, `tiny-2m` and `tiny-30m` are Qwen3-shaped models from scratch.

    `tiny-calculator` is `tiny` after the warm start of recipe=calculator_from_scratch, which comes with the package;
    `smollm2` is the real SmolLM2-135M-Instruct, which the command `mtgrpo data smollm2` puts on this machine.
    """

    name: Model = "tiny"  # or a folder, or a name on the Hugging Face hub
    dtype: DType = DType.auto  # what the forward computes in; weights that are trained stay fp32
    attention: AttentionKind = AttentionKind.auto  # how a training batch is laid out, and the kernel
    lora: LoRA = field(default_factory=LoRA)
    quantization: Quantization = Quantization.none  # of the frozen layers below adapters
    head: Head = Head.auto  # what the head's factors are rounded to: less is faster on a GPU; see policy/mismatch/*
    checkpointing: bool | None = None  # compute layers twice and keep less; null: where memory asks for it
    value_head: bool = False  # for algorithms that learn what return to expect; starts at zero, or as it was saved

    def check_machine(self) -> None:
        """Raise ConfigError where a package that it needs is not installed."""
        if self.attention is AttentionKind.flash_attention_2 and find_spec("flash_attn") is None:
            raise ConfigError(NO_FLASH)
        if self.quantization is not Quantization.none:
            refuse_without_package("bitsandbytes", f"model.quantization={self.quantization.value}")

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("`name` is empty: give a folder, a name of the hub, smollm2, tiny or tiny-calculator")
        if self.attention is AttentionKind.flash_attention_2 and self.dtype in (DType.float32, DType.float64):
            raise ConfigError("`attention=flash_attention_2` computes in 16 bits: set `dtype=bfloat16`")
        if self.head in (Head.tf32, Head.bf16) and self.dtype is DType.float64:
            raise ConfigError(f"`head={self.head.value}` rounds what `dtype=float64` keeps: set `head=fp32`")
        if self.lora.rank and self.name in FROM_SCRATCH:
            raise ConfigError(
                f"`lora.rank={self.lora.rank}`: `name={self.name}` is a model from scratch, so there is "
                "nothing to adapt; train it first with `lora.rank=0`, then give `name=FOLDER`"
            )
        if self.quantization is not Quantization.none and (self.name in FROM_SCRATCH or self.dtype is DType.float64):
            raise ConfigError(f"`quantization` is for the base of adapters, not in float64: got `name={self.name}`")
