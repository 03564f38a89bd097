"""Faults that are planted, one at a time, into runs of two steps, and what the runs say of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as AdaptedLinear
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from mtgrpo import rewards
from mtgrpo.batch.forest import Batch
from mtgrpo.config.compose import preset
from mtgrpo.engines.local import decoder, paged_attention, sampling
from mtgrpo.engines.local import engine as local
from mtgrpo.engines.local.decode_kernels import END, FIRST, LENGTH, PREFIX_LENGTH, CompiledPlan, CompiledPlanner
from mtgrpo.engines.local.decoder import _Product
from mtgrpo.engines.local.kv_cache import BLOCK_SIZE, KVCache
from mtgrpo.engines.local.paged_attention import BatchPlan, BatchPlanner, _Parts
from mtgrpo.engines.local.scheduler import Scheduler
from mtgrpo.environments import Reply
from mtgrpo.log import Sinks
from mtgrpo.model import prefix
from mtgrpo.model.attention import Visibility
from mtgrpo.model.scorer import Scorer
from mtgrpo.policy import objective, optimizer, updater
from mtgrpo.record.curve import Curve
from mtgrpo.rewards import Reward
from mtgrpo.stages import update
from mtgrpo.stages.trainer import train
from mtgrpo.types import Completion, Turn

ENVIRONMENT = '''
from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.rewards import Reward, Score
from mtgrpo.types import Message


@dataclass
class Talk(Environment):
    """Four turns with long answers: contexts of some hundred tokens."""

    async def start(self, task):
        self.turns = 0
        return Opening((Message("system", " 1 2 3 4 5 6 7 8 9" * 3), *task.messages))

    async def step(self, message):
        self.turns += 1
        answer = Message("user", "go on: " + message.content[:8] + " 1 2 3 4 5 6 7 8 9" * 3)
        return Reply((answer,), done=self.turns == 4)


@dataclass
class Varied(Reward):
    def reward(self, trajectory):
        return float(sum(map(sum, (turn.output for turn in trajectory.turns))) % 97)


@dataclass
class Judged(Varied):
    judges_turns = True

    def reward(self, trajectory):
        return Score(super().reward(trajectory), turns=[float(sum(turn.output) % 5) for turn in trajectory.turns])
'''
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def run(folder: Path, monkeypatch: Patch, *words: str) -> list[str]:
    """Two steps of four long conversations; what the user was told."""
    own = folder / "own.py"
    own.write_text(ENVIRONMENT)
    told: list[str] = []
    monkeypatch.setattr(Sinks, "note", lambda _self, text: told.append(text))
    settings = [
        *("trainer.steps=2", "sft.steps=0", "rollout.prompts_per_step=2", "rollout.group_size=2", "log=[jsonl]"),
        *("sampling.max_new_tokens=12", "eval.tasks=1", "eval.samples=1", "eval.every_steps=0"),
        f"sampling.stop_ids={list(range(0, 2048, 8))}".replace(" ", ""),
        f"environment={own}:Talk",
        *("environment.max_turns=5", f"reward={own}:Varied", "optimizer.lr=1e-2", "optimizer.warmup_steps=0"),
    ]
    asyncio.run(train(preset("calculator_from_scratch", *settings, *words), folder / "run", Curve()))
    return told


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Put `change(original, *arguments)` in the place of a function."""

    def plant(monkeypatch: Patch) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments, **named: change(original, *arguments, **named))

    return plant


def positions_jump(first: int) -> Plant:
    def jump(plan: Callable[..., BatchPlan], *arguments: Any) -> BatchPlan:
        found = plan(*arguments)
        return replace(found, positions=found.positions + 1 * (found.positions >= first))

    return changed(BatchPlanner, "plan", jump)


def queries_scaled(first: int) -> Plant:
    """From some position on, as Llama 4 does."""

    def scaled(attend: Any, pages: KVCache, plan: BatchPlan, layer: int, query: Tensor, *rest: Any) -> Tensor:
        return attend(pages, plan, layer, query * (1 + 0.3 * (plan.positions >= first))[:, None, None], *rest)

    return changed(local, "attend", scaled)


def cache_overwritten(first: int) -> Plant:
    """The keys of position 40 become those of a later one."""

    def overwrite(attend: Any, pages: KVCache, plan: BatchPlan, layer: int, *rest: Any) -> Tensor:
        found = attend(pages, plan, layer, *rest)
        if int(plan.positions.max()) >= first:
            keys = pages.own.keys[layer]
            keys[0, :, 8] = keys[0, :, 9]
        return found

    return changed(local, "attend", overwrite)


def window(longest: int) -> Plant:
    """KVCache of a conversation further back than that are not seen."""

    def cut(attend: Any, pages: KVCache, plan: BatchPlan, *rest: Any) -> Tensor:
        table = plan.table.clone()
        absent = plan.absent.clone() if plan.absent is not None else table < 0
        far = plan.positions >= longest
        absent[far & ((~absent).sum(1) > 1), 0] = True
        return attend(pages, replace(plan, absent=absent), *rest)

    return changed(local, "attend", cut)


def shifted_mask(mask: Any, parts: Any, last: Any, places: int) -> Tensor:
    """Every token also sees the one after it."""
    return mask(parts, last + 1, places)


def one_more(advance: Any, planner: BatchPlanner, plan: BatchPlan, rows: Any) -> BatchPlan:
    """A step of decoding sees a place that nobody has written yet."""
    found = advance(planner, plan, rows)
    found.parts[0].mask[found.ends, 0, 0, found.filled.clamp(max=31)] = 0
    return found


def prefix_overwritten(attend: Any, pages: KVCache, plan: BatchPlan, layer: int, *rest: Any) -> Tensor:
    found = attend(pages, plan, layer, *rest)
    keys = pages.prefixes.keys[layer]
    keys[0, :, 8] = keys[0, :, 9]
    return found


def next_row(sample: Any, engine: Any, requests: Any, hidden: Tensor) -> None:
    sample(engine, requests, hidden.roll(1, 0))


def no_temperature(sample: Any, logits: Tensor, *rest: Any) -> Any:
    return sample(logits * 0.8, *rest)


def dynamic(rotary: Any, module: Any, x: Tensor, positions: Tensor) -> Any:
    """Position factors that depend on the longest position of the forward pass."""
    return rotary(module, x, positions * (1 + (int(positions.max()) > 128)))


def siblings_see_one_another(init: Any, visibility: Any, depth: Tensor, ends: Tensor, *rest: Any) -> None:
    init(visibility, depth, ends.clamp(min=len(ends)), *rest)


def no_rest(pieces: Any, *arguments: Any) -> Any:
    """What a run of the forest sees above it is cut short."""
    return [p if p.first else replace(p, columns=slice(p.columns.start, max(p.columns.start + 1, p.columns.stop - 1)))
            for p in pieces(*arguments)]  # fmt: skip


def wrong_parent(read: Any, model: Any, micro: Any, positions: Tensor, *rest: Any) -> Tensor:
    return read(model, micro, (positions - 1).clamp(min=micro.given), *rest)


def jump_in_trainer(read: Any, model: Any, micro: Any, positions: Tensor, *rest: Any) -> Tensor:
    if micro.forest is None:
        return read(model, micro, positions, *rest)
    return read(model, replace(micro, position=micro.position + (micro.position >= 128)), positions, *rest)


def in_trainer(change: Callable[..., Tensor]) -> Plant:
    def plant(monkeypatch: Patch) -> None:
        changed(Scorer, "_hidden", change)(monkeypatch)

    return plant


def steeper(read: Any, model: Any, micro: Any, *rest: Any) -> Tensor:
    """The gradient is a tenth too large."""
    found = read(model, micro, *rest)
    if found.requires_grad:
        found.register_hook(lambda gradient: gradient * 1.1)
    return found


def steeper_in_forests(read: Any, model: Any, micro: Any, *rest: Any) -> Tensor:
    return (steeper if micro.forest is not None else lambda read, *rest: read(*rest))(read, model, micro, *rest)


def other_way_back(forward: Any, layer: Any, states: Tensor) -> Tensor:
    """What comes back through a layer is of weights that are laid out otherwise."""
    states = states.view_as(states)
    if states.requires_grad:
        states.register_hook(lambda gradient: gradient.flip(-1))
    return forward(layer, states)


def one_layer(extend: Any, kept: Any, _layer: int, *rest: Tensor) -> Any:
    """Layers overwrite one another's keys and values."""
    return extend(kept, 0, *rest)


def shifted_rows(read: Any, model: Any, micro: Any, positions: Tensor, *rest: Any) -> Tensor:
    return read(model, replace(micro, ids=micro.ids.roll(1, 1)), positions, *rest)


def other_weight(merge: Any, layer: Any) -> Any:
    """Weights of the head in the engine's copy are others; with those of layers it would not decode by its copy."""
    weight, bias = merge(layer)
    weight = weight.detach().clone()
    if weight.shape[0] > 1000:
        weight[::7, 0] += 1
    return weight, bias


def without_adapter(merge: Any, layer: Any) -> Any:
    return merge(layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer)


def batch_with(change: Callable[[Batch], Batch]) -> Plant:
    """What is trained is changed after it was laid out."""
    return changed(update, "build_batch", lambda build, trajectories: change(build(trajectories)))


def half_of_the_siblings(batch: Batch) -> Batch:
    return replace(batch, trajectory=batch.trajectory.max() - batch.trajectory)


def text_before(batch: Batch) -> Batch:
    """The first sampled token of each turn gives way to the text before it."""
    first = torch.cat([torch.tensor([True]), batch.turn.diff() != 0])
    return replace(batch, node=torch.where(first, batch.forest.parent[batch.node], batch.node))


def advantage_of_nothing(assign: Any, *arguments: Any) -> Any:
    found = assign(*arguments)
    return replace(found, advantage=found.advantage * torch.inf)


def gradient_of_nothing(clip: Any, parameters: Any, *rest: Any) -> Tensor:
    for parameter in parameters:
        parameter.grad.fill_(torch.nan)
    return clip(parameters, *rest)


def weights_of_nothing(step: Any, optimizer: Any) -> float:
    found = step(optimizer)
    with torch.no_grad():
        optimizer._weights[0].fill_(torch.nan)
    return found


def logprobs_with(change: Callable[[list[float]], Any]) -> Plant:
    """What the engine says of the tokens that it sampled."""

    def turn(original: Any, sampled: Completion, *more: Any, **named: Any) -> Any:
        return original(replace(sampled, logprobs=change(sampled.logprobs)), *more, **named)

    return changed(Turn, "of", turn)


async def rewards_of_nothing(_original: Any, *_: Any) -> None: ...


def outage(_original: Any, *_: Any, **__: Any) -> None:
    raise OSError("the world is away")


def not_reproducible(read: Any, model: Any, micro: Any, positions: Tensor, *rest: Any) -> Tensor:
    """It depends on whether there will be a gradient."""
    found = read(model, micro, positions, *rest)
    return found * 1.01 if torch.is_grad_enabled() else found


def frozen_copy(monkeypatch: Patch) -> None:
    """The engine's copy of the weights is made once, and kept while it sleeps."""
    copied: set[int] = set()
    original = _Product.copy_weights

    def once(self: _Product) -> None:
        if id(self) not in copied:
            copied.add(id(self))
            original(self)

    monkeypatch.setattr(_Product, "copy_weights", once)
    monkeypatch.setattr(_Product, "release", lambda _self: None)


def compiled_positions_jump(plan: Callable[..., CompiledPlan], *arguments: Any) -> CompiledPlan:
    found = plan(*arguments)
    return replace(found, positions=found.positions + 1 * (found.positions >= 128))


def seen_twice(attend: Any, plan: CompiledPlan, layer: int, *rest: Any) -> Tensor:
    """Rows of one token write it in the next place too, and see both."""
    attend(plan, layer, *rest)
    rows = plan.rows.copy()
    rows[:, LENGTH] += (rows[:, END] - rows[:, FIRST] == 1) & (rows[:, LENGTH] % BLOCK_SIZE > 0)
    return attend(replace(plan, rows=rows), layer, *rest)


def without_prefixes(attend: Any, plan: CompiledPlan, layer: int, *rest: Any) -> Tensor:
    rows = plan.rows.copy()
    rows[:, PREFIX_LENGTH] = 0
    return attend(replace(plan, rows=rows), layer, *rest)


def warmer(sample: Any, library: Any, logits: Tensor, temperatures: Any, uniform: Any) -> Any:
    return sample(library, logits, [1.1 * temperature for temperature in temperatures], uniform)


FAULTS: dict[str, Plant] = {
    "positions of the engine jump at 64": positions_jump(64),
    "positions of the engine jump at 128": positions_jump(128),
    "queries are scaled from 64": queries_scaled(64),
    "queries are scaled from 128": queries_scaled(128),
    "a key is overwritten at 80": cache_overwritten(80),
    "a key is overwritten at 160": cache_overwritten(160),
    "the first page is not seen from 80": window(80),
    "the first page is not seen from 160": window(160),
    "a prompt sees one token too many": changed(_Parts, "_mask", shifted_mask),
    "a decoding step sees an empty place": changed(BatchPlanner, "_advance", one_more),
    "a key that siblings share is overwritten": changed(local, "attend", prefix_overwritten),
    "partial results are not merged": changed(
        paged_attention, "_attention", lambda f, *a: (lambda o, s: (o, s * 0))(*f(*a))
    ),
    "positions of the compiled engine jump at 128": changed(CompiledPlanner, "plan", compiled_positions_jump),
    "a compiled decoding step sees its token twice": changed(CompiledPlan, "attend", seen_twice),
    "a compiled step does not see prefixes": changed(CompiledPlan, "attend", without_prefixes),
    "compiled sampling has another temperature": changed(sampling, "sample_whole", warmer),
    "the cache outlives an update": changed(Scheduler, "reset_cache", lambda _original, _self: None),
    "the copy of the weights outlives an update": frozen_copy,
    "tokens are sampled from the next conversation": changed(local.LocalEngine, "_sample", next_row),
    "the engine has another temperature": changed(local, "sample", no_temperature),
    "positions depend on the whole forward pass": changed(Qwen3RotaryEmbedding, "forward", dynamic),
    "siblings see one another": changed(Visibility, "__init__", siblings_see_one_another),
    "a run misses the last token above it": changed(Visibility, "pieces", no_rest),
    "the hidden state before is read": in_trainer(wrong_parent),
    "positions of the trainer jump at 128": in_trainer(jump_in_trainer),
    "gradients are a tenth too large": in_trainer(steeper),
    "gradients of the token forest are a tenth too large": in_trainer(steeper_in_forests),
    "gradients go back through other weights": changed(AdaptedLinear, "forward", other_way_back),
    "a walked tree loses the gradient of what is below": changed(
        prefix, "_leaf", lambda _original, keys: keys.detach()
    ),
    "layers of a walked tree share keys": changed(prefix.Prefix, "extend", one_layer),
    "a weight of the engine is another one": changed(decoder, "merged", other_weight),
    "the adapter does not reach the engine": changed(decoder, "merged", without_adapter),
    "the mask is shifted by one": batch_with(lambda b: replace(b, node=b.forest.parent[b.node])),
    "the text of a tool is trained": batch_with(text_before),
    "log-probabilities are shifted by one": batch_with(lambda b: replace(b, behaviour_logp=b.behaviour_logp.roll(1))),
    "siblings are swapped": batch_with(half_of_the_siblings),
    "the last sampled token is left out": batch_with(
        lambda b: replace(
            b, **{f: getattr(b, f)[:-1] for f in ("node", "behaviour_logp", "trajectory", "turn", "segment", "version")}
        )
    ),
    "a sampled token has no log-probability": logprobs_with(lambda given: given[:-1]),
    "a log-probability of the engine is NaN": logprobs_with(lambda given: [*given[:-1], float("nan")]),
    "log-probabilities of the engine are 2 nats off": logprobs_with(lambda given: [one - 2 for one in given]),
    "the loss is divided by half": changed(updater, "token_weights", lambda weigh, *rest: 2 * weigh(*rest)),
    "what is masked is not counted by the normaliser": changed(
        updater, "token_weights", lambda weigh, *rest: weigh(*rest) * 1.01
    ),
    "an advantage is infinite": changed(objective, "advantages", advantage_of_nothing),
    "every gradient is NaN": changed(optimizer.nn.utils, "clip_grad_norm_", gradient_of_nothing),
    "the weights are NaN": changed(optimizer.Optimizer, "step", weights_of_nothing),
    "every reward is NaN": changed(rewards, "Score", lambda score, *_: score(float("nan"))),
    "every reward is nothing": changed(Reward, "rewards", rewards_of_nothing),
    "every answer of the environment fails": changed(Reply, "__init__", outage),
    "the forward pass changes from one time to the next": in_trainer(not_reproducible),
}

SAID = {  # where it is not the difference of log-probabilities that shows
    "gradients are a tenth too large": "is not that of its log-probabilities",
    "gradients of the token forest are a tenth too large": "differs from that of plain rows",
    "gradients go back through other weights": "is not that of its log-probabilities",
    "a walked tree loses the gradient of what is below": "differs from that of plain rows",
    "layers of a walked tree share keys": "differs from that of plain rows",
    "the mask is shifted by one": "is not that of a sampled token",
    "the text of a tool is trained": "is not that of a sampled token",
    "log-probabilities are shifted by one": "is not that of a sampled token",
    "siblings are swapped": "the trajectory of entry 0 of a batch is not that of a sampled token",
    "the last sampled token is left out": "is not that of a sampled token",
    "a sampled token has no log-probability": "the engine must report one for each sampled token",
    "a log-probability of the engine is NaN": "has log-probability nan",
    "the loss is divided by half": "the loss is divided wrongly",
    "what is masked is not counted by the normaliser": "the loss is divided wrongly",
    "an advantage is infinite": "an advantage is not finite",
    "every gradient is NaN": "the weights stay as they were, 3 times in a row",
    "the weights are NaN": "has log-probability nan",
    "every reward is NaN": "give a finite number",
    "every reward is nothing": "give one for each",
    "every answer of the environment fails": "the world is away",
    "the forward pass changes from one time to the next": "the forward pass is not reproducible",
}
TORCH = ("engine=local", "engine.compiled=false")
WORDS = {
    **dict.fromkeys(
        (
            *("positions of the engine jump at 64", "positions of the engine jump at 128"),
            *("queries are scaled from 64", "queries are scaled from 128"),
            *("a key is overwritten at 80", "a key is overwritten at 160"),
            *("the first page is not seen from 80", "the first page is not seen from 160"),
            *("a prompt sees one token too many", "a decoding step sees an empty place"),
            *("a key that siblings share is overwritten", "partial results are not merged"),
        ),
        TORCH,
    ),
    "the adapter does not reach the engine": ("model.lora.rank=4",),
    "gradients go back through other weights": ("model.lora.rank=4",),
    "every gradient is NaN": ("trainer.steps=4",),
    "the forward pass changes from one time to the next": ("trainer.minibatch_trajectories=2",),
    "positions depend on the whole forward pass": ("environment.max_context_length=512",),
    "the cache outlives an update": ("rollout.max_staleness=2", "rollout.ahead=3", "trainer.steps=8"),
}
