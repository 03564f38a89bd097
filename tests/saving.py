"""Models on disk, as a run leaves them."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtgrpo.model.load import save_weights, saved_weights


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that transformers, vLLM and `model.name=FOLDER` can load."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder, saved_weights(model))
    tokenizer.save_pretrained(folder)
