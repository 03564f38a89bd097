"""A model of transformers that gives a text one number: reward models, and cross-encoders that rank passages."""

import threading
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.hub import refuse_unloadable

Encoded = Mapping[str, Sequence[int]]  # what a tokenizer makes of one text


class Precision(Enum):
    """What such a model computes in."""

    auto = "auto"  # what its file says
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class SequenceClassifier:
    """A sequence-classification model with one output, and its tokenizer, which is for one thread at a time: `turn`."""

    def __init__(self, name: str, option: str, device: str = "", precision: Precision = Precision.auto) -> None:
        """Load `name`, a folder or a name on the hub; option: what names it, for messages; device: as torch calls it.

        With device "" it is on a GPU where there is one. Raises ConfigError where it cannot be loaded, has no weights
        for its output, or other than one.
        """
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer  # noqa: PLC0415
        from transformers.utils.import_utils import is_torch_cuda_available  # noqa: PLC0415

        path = Path(name).expanduser()
        where = str(path) if path.exists() else name
        cure = f"give a folder, or another device than {device}" if device else "give a folder"
        with refuse_unloadable(f"{option}={name}", where, cure):
            config: Any = AutoConfig.from_pretrained(where, trust_remote_code=False)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
            if config.num_labels != 1:
                raise ConfigError(f"{option}={name} has {config.num_labels} outputs; give a model with one")
            options = {"dtype": precision.value, "output_loading_info": True, "use_safetensors": True}
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(where, trust_remote_code=False, **options)
            model, report = loaded
            self._model = model.to(device or ("cuda" if is_torch_cuda_available() else "cpu")).eval()
        if missing := sorted(report["missing_keys"]):
            raise ConfigError(f"{option}={name} lacks the weights {missing[0]}; they would be drawn at random")
        self._model.requires_grad_(False)
        self.turn = threading.RLock()  # of the thread that encodes or computes
        lengths = (self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
        self.longest: int = min(length for length in lengths if length)  # tokens of a text
        text_config = config.get_text_config()
        self._pads = text_config.pad_token_id is not None and text_config.pad_token_id == self.tokenizer.pad_token_id

    def scores(self, texts: Sequence[Encoded], batch_size: int) -> list[float]:
        """The model's output for each of the texts. At most `batch_size` of similar length are computed together.

        They are padded on the right, or computed one by one where model and tokenizer name different padding tokens.
        """
        scores = [0.0] * len(texts)
        by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]["input_ids"]))
        size = batch_size if self._pads else 1
        with self.turn:
            for start in range(0, len(texts), size):
                chosen = by_length[start : start + size]
                rows = [dict(texts[number]) for number in chosen]
                padded = self.tokenizer.pad(rows, padding=size > 1, padding_side="right", return_tensors="pt")
                outputs = self._model(**padded.to(self._model.device)).logits[:, 0].tolist()
                for number, score in zip(chosen, outputs, strict=True):
                    scores[number] = score
        return scores
