"""What a launcher said: torchrun and accelerate launch start several processes, and set variables for each."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtgrpo.errors import ConfigError
from mtgrpo.parallel import Parallel
from mtgrpo.parallel.fsdp2 import FSDP2
from mtgrpo.parallel.zero3 import Zero3

DOOR = "MTGRPO_DOOR"  # how many ranks there are, for a controller that rank 0 of a launcher has started, and more
KEY = "MTGRPO_KEY"  # a secret of the ranks that a controller has started, in text

# Of accelerate's file, by the variable that it becomes: the values that can be followed, and what to do else.
_FOLLOWED = {
    "ACCELERATE_USE_MEGATRON_LM": (("false",), "choose distributed_type: FSDP, DEEPSPEED or MULTI_GPU"),
    "ACCELERATE_MIXED_PRECISION": (("no", "bf16", "fp16"), 'set mixed_precision: "no", and model.dtype'),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("1", "auto"), "leave it out; batch.token_budget bounds what is held"),
    "FSDP_VERSION": (("2",), "set fsdp_version: 2"),
    "FSDP_OFFLOAD_PARAMS": (("false",), "set fsdp_offload_params: false"),
    "FSDP_ACTIVATION_CHECKPOINTING": (("false",), "set it to false there, and model.checkpointing=true"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": (("3",), "set zero_stage: 3, or distributed_type: MULTI_GPU"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (("none",), "offload by deepspeed_config_file, of DeepSpeed's"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (("none",), "offload by deepspeed_config_file, of DeepSpeed's"),
}


@dataclass(frozen=True)
class Launch:
    """The processes that a launcher started, this one among them, and what accelerate's file says of them."""

    ranks: int = 0  # all of them; 0: there was no launcher, or it started this one alone
    local: int = 0  # those on this machine; 0: not said
    parallel: Parallel | None = None  # None: nothing is said
    precision: str = "no"  # or bf16, fp16
    max_grad_norm: float | None = None


def read_launch(environ: Mapping[str, str]) -> Launch:
    """What the variables of a process say. Raises ConfigError for settings of accelerate that cannot be followed."""
    ranks = _count({**environ, "WORLD_SIZE": environ[DOOR].split()[0]} if DOOR in environ else environ, "WORLD_SIZE")
    if not ranks and environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_PORT" in environ:
        raise ConfigError(
            "accelerate launch starts one process where distributed_type is MULTI_CPU: set it to MULTI_GPU, which "
            "starts several on a CPU too, as in configs/accelerate/multi_cpu.yaml"
        )
    uses_fsdp, uses_deepspeed = (_says(environ, f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED"))
    for name, (values, cure) in _FOLLOWED.items():
        unused = (name.startswith("FSDP") and not uses_fsdp) or ("DEEPSPEED" in name and not uses_deepspeed)
        if not unused and _says(environ, name) not in ("", *values):
            raise ConfigError(f"accelerate launch says {name}={environ[name]}, which is not followed here: {cure}")
    said: Parallel | None = None
    if uses_fsdp:
        again = {"true": True, "false": False}.get(_says(environ, "FSDP_RESHARD_AFTER_FORWARD"))
        said = FSDP2(reshard=again)
    elif uses_deepspeed:
        said = Zero3(deepspeed_config=environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""))
    norm = _says(environ, "ACCELERATE_GRADIENT_CLIPPING")
    try:
        max_grad_norm = float(norm) if norm not in ("", "auto", "none") else None
    except ValueError:
        raise ConfigError(
            f"accelerate launch says ACCELERATE_GRADIENT_CLIPPING={norm}, which is no number: set gradient_clipping to "
            "a number, auto or none"
        ) from None
    return Launch(
        ranks=ranks if ranks > 1 else 0,
        local=_count(environ, "LOCAL_WORLD_SIZE"),
        parallel=said,
        precision=_says(environ, "ACCELERATE_MIXED_PRECISION") or "no",
        max_grad_norm=max_grad_norm,
    )


def _says(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").lower()


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name) or "0"
    if not text.isdigit():
        raise ConfigError(f"{name}={text} is no number of processes: unset it, or start them with torchrun")
    return int(text)
