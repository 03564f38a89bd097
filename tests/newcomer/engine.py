from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mtgrpo.engines import Engine, RunningEngine
from mtgrpo.types import Completion, Finish


@dataclass
class Plain(Engine):
    """Computes the whole context again for each token: nothing is cached."""

    def start(self, source, deterministic, longest_context, folder=None):
        running = Running(longest_context)
        running.model = source.model
        return running


class Running(RunningEngine):
    shares_weights = True

    @contextmanager
    def _open(self, key):
        yield self.answer

    async def answer(self, tokens, sampling, stream):
        generator = torch.Generator().manual_seed(stream % 2**63)
        output, logprobs = [], []
        while len(output) < sampling.max_new_tokens and not set(output[-1:]) & set(sampling.stop_ids):
            with torch.no_grad():
                logits = self.model(torch.tensor([[*tokens, *output]])).logits[0, -1]
            logp = (logits / (sampling.temperature or 1)).log_softmax(-1)
            output.append(int(torch.multinomial(logp.exp(), 1, generator=generator)))
            logprobs.append(float(logp[output[-1]]))
        finish = Finish.STOP if output[-1] in sampling.stop_ids else Finish.LENGTH
        return Completion(output, logprobs, [self.version] * len(output), finish)

    async def load_weights(self, source):
        self.version = source.version
