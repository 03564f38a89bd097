"""The trainer's forward: log-probabilities of sampled tokens, from hidden states at their parents only."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The language-model head on hidden states [n, hidden] -> logits [n, vocabulary] in fp32 (fp64 for fp64 models)."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    logits: Tensor = head(hidden)
    return logits if logits.dtype == torch.float64 else logits.float()


def sampled_logprobs(
    model: PreTrainedModel, ids: Tensor, row: Tensor, parent: Tensor, token: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token under the policy at `temperature`, and the entropy it was drawn with.

    ids [rows, width] right-padded; row, parent, token [n]. Returns two tensors [n], in fp32 (fp64 for fp64 models);
    only the log-probabilities carry gradient. The head runs at the n parents alone.
    """
    device = model.device
    hidden = model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    logits = head_logits(model, hidden[row.to(device), parent.to(device)])
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, token.to(device)[:, None])[:, 0], entropy
