"""What top-k, top-p and min-p kept, where siblings were sampled from different weights: against masks, one by one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.engines.local.sampling import sample
from mtgrpo.model.attention import AttentionKind, choose_attention
from mtgrpo.model.scorer import Scores
from mtgrpo.policy.step import at_once
from mtgrpo.types import Finish, Message, Sampling, Task, Trajectory, Turn
from test_policy import ONE_MICRO_BATCH, TEMPERATURE, Watched, largest_difference, make_model

TASK = Task("test/0", (Message("user", "?"),))
PROMPT = [5, 6, 7]
SAMPLING = Sampling(temperature=TEMPERATURE, top_p=0.6, top_k=40)
SIBLINGS, TOKENS = 6, 4
MODEL = make_model()
LONGEST = len(PROMPT) + TOKENS - 1


def older(model: PreTrainedModel) -> PreTrainedModel:
    """As the weights were an update ago."""
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return found


def played(model: PreTrainedModel, seed: int) -> Trajectory:
    """One turn of `TOKENS` tokens, sampled from `model`; all siblings draw the same first number."""
    turn = Turn(PROMPT, [], [], [], Finish.LENGTH, Message("assistant"))
    uniform = np.random.default_rng(seed).random(TOKENS)
    uniform[0] = 0.5
    for point in uniform:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT + turn.output])).logits[:, -1]
        drawn = sample(logits, [SAMPLING], point[None])
        assert drawn.kept[0] is not None
        turn.output.append(drawn.tokens[0])
        turn.logprobs.append(drawn.logprobs[0])
        turn.kept.append(drawn.kept[0])
        turn.versions.append(0)
    return Trajectory(TASK, turns=[turn])


OLDER = older(MODEL)
PLAYED = [played(model, seed) for model in (MODEL, OLDER) for seed in range(SIBLINGS)]
BATCH = build_batch(PLAYED)
EVERY = torch.arange(len(BATCH))


def masked(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every sampled token: its own context alone, what was not kept masked out."""
    logp: list[Tensor] = []
    entropy: list[Tensor] = []
    for trajectory in PLAYED:
        (turn,) = trajectory.turns
        for place, token in enumerate(turn.output):
            logits = model(input_ids=torch.tensor([PROMPT + turn.output[:place]])).logits[0, -1] / TEMPERATURE
            mask = torch.ones(len(logits), dtype=torch.bool)
            mask[list(turn.kept[place])] = False
            row = logits.masked_fill(mask, -torch.inf).log_softmax(-1)
            logp.append(row[token])
            entropy.append(-(row[~mask].exp() * row[~mask]).sum())
    return torch.stack(logp), torch.stack(entropy)


def several(batch: Batch) -> int:
    """How many nodes were sampled from different sets."""
    assert batch.kept is not None
    pairs = torch.stack([batch.node, batch.kept.number], dim=1).unique(dim=0)
    return int((pairs[:, 0].bincount() > 1).sum())


@pytest.mark.parametrize("attention", [AttentionKind.forest, AttentionKind.sdpa])
@pytest.mark.parametrize("token_budget", [ONE_MICRO_BATCH, LONGEST])
def test_each_token_is_normalised_over_what_was_kept_when_it_was_sampled(
    token_budget: int, attention: AttentionKind
) -> None:
    """Values, entropies and gradients, in fp64."""
    assert several(BATCH) >= 2
    slope, bonus = torch.linspace(-1, 2, len(BATCH)).double(), torch.linspace(1, 3, len(BATCH)).double()
    model = copy.deepcopy(MODEL)
    choose_attention(model, attention)
    policy = Watched(model, token_budget=token_budget)
    found = at_once(policy.scoring(BATCH, EVERY))

    def loss(entries: Tensor, scores: Scores) -> PerToken:
        value = slope[entries] * scores.logp + bonus[entries] * scores.entropy
        return PerToken(value, torch.zeros_like(value))

    at_once(policy.updating(BATCH, EVERY, torch.ones(len(BATCH)).double(), loss))
    logp, entropy = masked(MODEL)
    torch.testing.assert_close(found.logp, logp.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(found.entropy, entropy.detach(), rtol=0, atol=1e-10)
    names, parameters = zip(*MODEL.named_parameters(), strict=True)
    gradients = torch.autograd.grad((slope * logp + bonus * entropy).sum(), parameters)
    assert largest_difference(policy.descent.gradients[0], dict(zip(names, gradients, strict=True))) < 1e-9


def test_what_the_same_weights_sampled_has_the_log_probability_that_the_engine_reported() -> None:
    found = at_once(Watched(copy.deepcopy(MODEL)).scoring(BATCH, EVERY)).logp
    same = BATCH.trajectory < SIBLINGS
    assert (found - BATCH.behaviour_logp)[same].abs().max() < 1e-9
    assert (found - BATCH.behaviour_logp)[~same].abs().max() > 1e-2


def test_a_log_probability_does_not_depend_on_what_else_is_in_the_micro_batch() -> None:
    policy = Watched(copy.deepcopy(MODEL))
    together = at_once(policy.scoring(BATCH, EVERY))
    for entry in EVERY.split(1):
        alone = at_once(policy.scoring(BATCH, entry))
        assert alone.logp[entry].item() == pytest.approx(together.logp[entry].item(), abs=1e-12)
        assert alone.entropy[entry].item() == pytest.approx(together.entropy[entry].item(), abs=1e-12)
