"""What a trained reward model thinks of the conversation."""

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self, cast

from mtgrpo.errors import ConfigError, PolicyError
from mtgrpo.messages import message_to_dict
from mtgrpo.parts import Network, RunContext, Text
from mtgrpo.rewards import Given, Reward
from mtgrpo.sequence_classifier import Encoded, Precision, SequenceClassifier
from mtgrpo.types import Message, Trajectory


@dataclass
class RewardModel(Reward, batch_size=">= 1"):
    """The output of a reward model: a sequence-classification model of transformers with one output.

    It reads the whole conversation, those of tools too, in its own tokenizer's chat template; what spells a special
    token of the template is read as text. Its output is the reward as it is, without bounds: `success_at` says from
    where on it is a success. A conversation that is longer than the model can read is worth as much as the worst of
    its siblings, at most 0; nothing is cut. Siblings are computed together, in a thread. Example:
    `reward=reward_model reward.model_name=FOLDER`.
    """

    model_name: Network = ""  # a folder, or a name on the Hugging Face hub; weights in safetensors
    device: Text = ""  # cpu, cuda, cuda:1; "" = a GPU where there is one; the memory plan counts its weights alone
    dtype: Precision = Precision.auto
    batch_size: int = 8  # conversations computed at once

    _model = cast("SequenceClassifier | None", None)  # while a run lasts
    _thread = cast("ThreadPoolExecutor | None", None)  # in which it computes; those of asyncio are others' too

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_name:
            raise ConfigError("reward reward_model needs a model: reward.model_name=FOLDER, or a name on the hub")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the model. Raises ConfigError where it cannot be loaded, or its tokenizer writes no conversations."""
        running = copy.copy(self)
        running._model = SequenceClassifier(self.model_name, "reward.model_name", self.device, self.dtype)
        trial = running._text([Message("user", "Hello?"), Message("assistant", "Hello.")])
        if isinstance(trial, Exception):
            why = str(trial).partition("\n")[0]
            raise ConfigError(f"reward.model_name={self.model_name}: its chat template: {why}") from trial
        with ThreadPoolExecutor(1) as running._thread:
            yield running

    async def rewards(self, siblings: Sequence[Trajectory]) -> Sequence[Given]:
        """The model's outputs; an error in the place of one whose conversation it cannot read."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._scores, siblings)

    def _scores(self, siblings: Sequence[Trajectory]) -> Sequence[Given]:
        assert self._model is not None
        texts = [self._text(trajectory.messages) for trajectory in siblings]
        fitting = [text for text in texts if not isinstance(text, Exception)]
        scores = iter(self._model.scores(fitting, self.batch_size))
        rewards = [text if isinstance(text, Exception) else next(scores) for text in texts]
        worst = min([0.0, *(reward for reward in rewards if isinstance(reward, float))])
        return [worst if isinstance(reward, PolicyError) else reward for reward in rewards]

    def _text(self, messages: Sequence[Message]) -> Encoded | Exception:
        """A conversation as the model reads it, or why it does not."""
        assert self._model is not None
        rows = [message_to_dict(replace(message, reasoning="", name="")) for message in messages]
        try:
            json.dumps(rows, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return PolicyError("half a character, too long a number or too deep")
        try:
            text: Encoded = self._model.tokenizer.apply_chat_template(rows, sanitize_control_tokens=True)
        except Exception as error:  # a template's own
            return error
        length, longest = len(text["input_ids"]), self._model.longest
        return text if length <= longest else PolicyError(f"{length} tokens; the reward model reads {longest}")
