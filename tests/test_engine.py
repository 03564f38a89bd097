"""The local engine: its log-probabilities are those of a full forward pass, its tokens depend on the seed alone."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mtgrpo.engines import Key
from mtgrpo.engines.local import Local, paged_attention, scheduler
from mtgrpo.engines.local import engine as local
from mtgrpo.engines.local.decode_kernels import CompiledPlanner
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.engines.local.kv_cache import BLOCK_SIZE, KVCache, token_bytes
from mtgrpo.engines.local.paged_attention import BatchPlanner, Row
from mtgrpo.engines.local.scheduler import Scheduler
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.types import Completion, Sampling
from mtgrpo.weights.source import ModelWeights

STOP = 2


@dataclass
class Played:
    """One conversation: every turn's context and what was sampled."""

    contexts: list[list[int]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)


def make_model(dtype: DType = DType.float32, seed: int = 0) -> PreTrainedModel:
    model = load_model(ModelSettings("tiny", dtype), seed)
    with torch.no_grad():  # sharper distributions than a fresh model's, so that exactness is worth something
        model.get_input_embeddings().weight.mul_(8)
    return model


def prompt_of(task: int) -> list[int]:
    rng = random.Random(task)
    return [rng.randrange(20, 1000) for _ in range(rng.randrange(5, 40))]


async def converse(
    engine: LocalEngine, key: Key, task: int, sampling: Sampling, turns: int, delays: random.Random | None = None
) -> Played:
    played = Played()
    rng = random.Random(f"{key.scope}/{key.task}/{key.sample_index}")
    context = prompt_of(task)
    async with engine.conversation(key) as sample:
        for _ in range(turns):
            completion = await sample(context, sampling)
            played.contexts.append(context)
            played.completions.append(completion)
            if delays is not None:
                await asyncio.sleep(delays.random() * 0.02)
            reply = [rng.randrange(20, 1000) for _ in range(rng.randrange(1, 20))]
            context = [*context, *completion.tokens, *reply]
    return played


def play_many(
    engine: LocalEngine, sampling: Sampling, tasks: int = 4, siblings: int = 3, delay_seed: int | None = None
) -> list[Played]:
    async def run() -> list[Played]:
        delays = None if delay_seed is None else random.Random(delay_seed)
        return list(
            await asyncio.gather(
                *(
                    converse(
                        engine,
                        Key(7, "train/1", str(task), sample_index),
                        task,
                        sampling,
                        1 + (task + sample_index) % 4,
                        delays,
                    )
                    for task in range(tasks)
                    for sample_index in range(siblings)
                )
            )
        )

    return asyncio.run(run())


def full_logprobs(model: PreTrainedModel, context: list[int], output: list[int], temperature: float) -> list[float]:
    """One forward pass of transformers over the whole sequence, nothing cached."""
    with torch.no_grad():
        logits = model(torch.tensor([context + output])).logits[0, len(context) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


def differences(model: PreTrainedModel, conversations: list[Played], temperature: float) -> list[float]:
    return [
        abs(a - b)
        for played in conversations
        for context, completion in zip(played.contexts, played.completions, strict=True)
        for a, b in zip(completion.logprobs, full_logprobs(model, context, completion.tokens, temperature), strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("dtype", "compiled", "worst", "mean"),
    [(DType.float64, False, 1e-9, 1e-9), (DType.float32, False, 5e-4, 1e-5), (DType.float32, True, 5e-4, 1e-5)],
)
def test_logprobs_equal_a_full_forward_at_every_turn(
    dtype: DType, compiled: bool, worst: float, mean: float, temperature: float
) -> None:
    model = make_model(dtype)
    sampling = Sampling(temperature=temperature, max_new_tokens=12, stop_ids=[STOP])
    found = differences(
        model, play_many(Local(compiled=compiled).start(ModelWeights(model), True, 1024), sampling), temperature
    )
    assert len(found) > 200
    assert max(found) <= worst
    assert sum(found) / len(found) <= mean


def test_same_seed_same_digits_however_slow_the_tools_are() -> None:
    sampling = Sampling(max_new_tokens=10, stop_ids=[STOP])
    model = make_model()
    runs = [
        play_many(Local().start(ModelWeights(model), True, 1024), sampling, delay_seed=seed) for seed in (None, 1, 2)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_a_conversation_does_not_depend_on_the_others() -> None:
    sampling = Sampling(max_new_tokens=10, stop_ids=[STOP])
    model = make_model(DType.float64)
    together = play_many(Local().start(ModelWeights(model), False, 1024), sampling)
    engine = Local().start(ModelWeights(model), False, 1024)
    alone = asyncio.run(converse(engine, Key(7, "train/1", "2", 1), 2, sampling, 4))
    assert [c.tokens for c in together[2 * 3 + 1].completions] == [c.tokens for c in alone.completions]


def test_another_seed_scope_task_sibling_or_turn_gives_other_tokens() -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=12)
    keys = [Key(7, "a", "t", 0), Key(8, "a", "t", 0), Key(7, "b", "t", 0), Key(7, "a", "u", 0), Key(7, "a", "t", 1)]

    async def run() -> list[Played]:
        engine = Local().start(ModelWeights(model), True, 1024)
        return [await converse(engine, key, 0, sampling, 1) for key in keys]

    outputs = [tuple(played.completions[0].tokens) for played in asyncio.run(run())]
    assert len(set(outputs)) == len(keys)


def test_greedy_equals_generate() -> None:
    model = make_model()
    prompt = prompt_of(3)

    async def run() -> list[int]:
        async with Local().start(ModelWeights(model), True, 1024).conversation(Key(0, "eval", "t", 0)) as sample:
            return (await sample(prompt, Sampling(temperature=0, max_new_tokens=20))).tokens

    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert asyncio.run(run()) == expected[0, len(prompt) :].tolist()


def test_new_weights_in_mid_conversation_drop_what_was_cached() -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=8)

    async def run() -> tuple[list[int], Completion]:
        engine = Local().start(ModelWeights(model), True, 1024)
        async with engine.conversation(Key(0, "train/1", "t", 0)) as sample:
            first = await sample(prompt_of(1), sampling)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.02)
            await engine.load_weights(ModelWeights(model, 5))
            context = prompt_of(1) + first.tokens + [33, 34]
            return context, await sample(context, sampling)

    context, second = asyncio.run(run())
    assert second.versions == [5] * len(second.tokens)
    expected = full_logprobs(model, context, second.tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(second.logprobs, expected, strict=True)) < 5e-5


def test_an_error_in_decoding_reaches_every_conversation_and_the_engine_goes_on() -> None:
    model = make_model()
    engine = Local().start(ModelWeights(model), True, 1024)
    sampling = Sampling(max_new_tokens=5)

    async def ask(sample_index: int, token: int) -> Completion:
        async with engine.conversation(Key(0, "train/1", "t", sample_index)) as sample:
            return await sample([token, 5, 6], sampling)

    async def run() -> tuple[list[object], Completion]:
        broken = await asyncio.gather(ask(0, 10**9), ask(1, 7), return_exceptions=True)
        return list(broken), await ask(2, 7)

    broken, after = asyncio.run(run())
    assert all(isinstance(result, EngineError) for result in broken)
    assert len(after.tokens) == 5


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_error_among_more_conversations_than_before_is_survived(deterministic: bool) -> None:
    engine = Local().start(ModelWeights(make_model()), deterministic, 1024)
    sampling = Sampling(max_new_tokens=5)

    async def ask(sample_index: int, token: int) -> Completion:
        async with engine.conversation(Key(0, "train/1", "t", sample_index)) as sample:
            return await sample([token, 5, 6], sampling)

    async def run() -> tuple[list[object], list[Completion]]:
        before = await asyncio.gather(ask(0, 7), ask(1, 8))
        broken = await asyncio.gather(*(ask(sample_index, 10**9) for sample_index in range(5)), return_exceptions=True)
        assert before == await asyncio.gather(ask(0, 7), ask(1, 8))
        return list(broken), list(await asyncio.gather(*(ask(sample_index, 7) for sample_index in range(5))))

    broken, after = asyncio.run(run())
    assert [str(error) for error in broken] == ["decoding failed: IndexError: index out of range in self"] * 5
    assert [len(completion.tokens) for completion in after] == [5] * 5


def test_running_out_of_memory_ends_the_run_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Local().start(ModelWeights(make_model()), True, 1024)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved ...")

    async def run() -> None:
        async with engine.conversation(Key(0, "train/1", "t", 0)) as sample:
            await sample([5, 6], Sampling(max_new_tokens=5))

    monkeypatch.setattr(engine, "_step", full)
    with pytest.raises(
        ConfigError, match=r"not enough \(sampling\).* Unless it is set, set engine\.memory_fraction lower"
    ):
        asyncio.run(run())


def test_a_conversation_that_has_not_spoken_yet_survives_the_end_of_another() -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=5)

    async def run() -> Completion:
        engine = Local().start(ModelWeights(model), False, 1024)
        async with engine.conversation(Key(0, "train/1", "t", 1)) as first:
            await first(prompt_of(1), sampling)
            opened = engine.conversation(Key(0, "train/1", "t", 2))
            second = await opened.__aenter__()
        completion = await second(prompt_of(2), sampling)
        await opened.__aexit__(None, None, None)
        return completion

    completion = asyncio.run(run())
    expected = full_logprobs(model, prompt_of(2), completion.tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) < 5e-4


@pytest.mark.parametrize("length", [2, 31, 32, 33, 65, 256, 257, 258, 600])
def test_siblings_share_a_prompt_of_any_length(length: int) -> None:
    """Also one that fills its pages exactly."""
    model = make_model()
    prompt = [20 + number * 7 % 900 for number in range(length)]

    async def ask(engine: LocalEngine, sample_index: int) -> Completion:
        async with engine.conversation(Key(0, "train/1", "t", sample_index)) as sample:
            return await sample(prompt, Sampling(max_new_tokens=5))

    async def run() -> list[Completion]:
        engine = Local().start(ModelWeights(model), True, 1024)
        return list(await asyncio.gather(*(ask(engine, sample_index) for sample_index in range(3))))

    for completion in asyncio.run(run()):
        expected = full_logprobs(model, prompt, completion.tokens, 1.0)
        assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) < 5e-4


def test_conversations_that_come_and_go_keep_their_own_past() -> None:
    """Blocks change hands while others go on."""
    model = make_model(DType.float64)
    sampling = Sampling(max_new_tokens=6, stop_ids=list(range(200)))
    places = asyncio.Semaphore(4)

    async def one(engine: LocalEngine, number: int) -> Played:
        async with places:
            return await converse(engine, Key(7, "train/1", str(number), 0), number, sampling, 1 + number * 7 % 5)

    async def run() -> list[Played]:
        engine = Local().start(ModelWeights(model), False, 1024)
        return list(await asyncio.gather(*(one(engine, number) for number in range(14))))

    assert max(differences(model, asyncio.run(run()), 1.0)) <= 1e-9


def test_a_conversation_goes_on_after_an_error() -> None:
    model = make_model()

    async def run() -> Completion:
        engine = Local().start(ModelWeights(model), True, 1024)
        async with engine.conversation(Key(0, "train/1", "t", 0)) as sample:
            with pytest.raises(EngineError):
                await sample([*prompt_of(1), 10**9], Sampling(max_new_tokens=5))
            return await sample([*prompt_of(1), 7], Sampling(max_new_tokens=5))

    completion = asyncio.run(run())
    expected = full_logprobs(model, [*prompt_of(1), 7], completion.tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) < 5e-4


@pytest.mark.parametrize("deterministic", [True, False])
def test_waiting_for_the_tools_of_others_is_counted(deterministic: bool) -> None:
    engine = Local().start(ModelWeights(make_model()), deterministic, 1024)

    async def uses_a_tool() -> None:
        async with engine.conversation(Key(0, "train/1", "t", 0)) as sample:
            first = await sample(prompt_of(4), Sampling(max_new_tokens=1))
            await asyncio.sleep(0.2)
            await sample([*prompt_of(4), *first.tokens, 33], Sampling(max_new_tokens=1))

    async def run() -> None:
        other = ask(engine, Key(0, "train/1", "t", 1), prompt_of(5), 30)
        await asyncio.gather(uses_a_tool(), other)

    asyncio.run(run())
    _, waited_s = engine.take_seconds()
    assert (waited_s > 0.1) is deterministic and engine.take_seconds() == (0.0, 0.0)


@pytest.mark.parametrize("cancelled", ["asking", "silent"])
def test_a_cancelled_conversation_is_neither_waited_for_nor_played_on(cancelled: str) -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=5)

    async def run() -> tuple[list[int], Completion]:
        engine = Local().start(ModelWeights(model), True, 1024)
        opened = asyncio.Event()

        async def leaves() -> None:
            async with engine.conversation(Key(0, "train/1", "t", 0)) as sample:
                opened.set()
                if cancelled == "asking":
                    await sample(prompt_of(4), sampling)
                await asyncio.Event().wait()

        async with engine.conversation(Key(0, "train/1", "t", 1)) as sample:
            context = prompt_of(5) + (await sample(prompt_of(5), sampling)).tokens + [33, 34]
            left = asyncio.create_task(leaves())
            await opened.wait()
            if cancelled == "asking":
                left.cancel()
                await asyncio.wait([left])
                return context, await asyncio.wait_for(sample(context, sampling), 20)
            asked = asyncio.create_task(sample(context, sampling))
            done, _ = await asyncio.wait([asked], timeout=0.1)
            assert not done, "another open conversation was not waited for"
            left.cancel()
            return context, await asyncio.wait_for(asked, 20)

    context, completion = asyncio.run(run())
    expected = full_logprobs(model, context, completion.tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) < 5e-4


# --- memory ---


def small_engine(model: PreTrainedModel, pages: int, deterministic: bool = True) -> LocalEngine:
    """So small that there is no room for prefixes."""
    return LocalEngine(
        ModelWeights(model),
        deterministic,
        KVCache(model, pages * BLOCK_SIZE, pages * BLOCK_SIZE),
        longest_context=pages * BLOCK_SIZE,
    )


@pytest.mark.parametrize("pages", [3, 5, 12])
def test_what_is_forgotten_for_lack_of_memory_is_computed_again_exactly(pages: int) -> None:
    """Idle conversations give way first, then the youngest of those that run."""
    model = make_model(DType.float64)
    sampling = Sampling(max_new_tokens=12, stop_ids=[STOP])
    engine = small_engine(model, pages)
    played = play_many(engine, sampling, tasks=5, siblings=3)
    assert max(differences(model, played, 1.0)) <= 1e-9
    plenty = play_many(Local().start(ModelWeights(model), True, 1024), sampling, tasks=5, siblings=3)
    tokens = [[c.tokens for c in p.completions] for p in played]
    assert tokens == [[c.tokens for c in p.completions] for p in plenty]


def test_every_page_comes_back() -> None:
    engine = Local().start(ModelWeights(make_model()), False, 1024)
    pools = (engine._kv_cache.own, engine._kv_cache.prefixes)
    for round_ in range(3):
        play_many(engine, Sampling(max_new_tokens=8, stop_ids=[STOP]), tasks=6, siblings=4, delay_seed=round_)
        assert [pool.free for pool in pools] == [pool.count for pool in pools]
        assert not engine._scheduler._prefixes


def test_memory_does_not_grow_with_the_number_of_conversations() -> None:
    """Blocks are used again before new ones are touched."""
    model = make_model()
    engine = LocalEngine(ModelWeights(model), False, KVCache(model, 2**14, 1024), longest_context=1024)
    places = asyncio.Semaphore(20)

    async def one(number: int) -> None:
        async with places:
            await converse(
                engine, Key(7, "a", str(number // 4), number % 4), number // 4, Sampling(max_new_tokens=4), 2
            )

    async def run() -> None:
        await asyncio.gather(*(one(number) for number in range(400)))

    asyncio.run(run())
    touched = [
        int((pool.keys[0] != 0).flatten(1).any(1).sum()) for pool in (engine._kv_cache.own, engine._kv_cache.prefixes)
    ]
    assert 20 <= touched[0] <= 20 * 3
    assert 1 <= touched[1] <= 20


def test_a_budget_below_one_conversation_is_refused_with_the_number_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    monkeypatch.setattr(local, "memory_bytes", lambda device: 10_000 * token_bytes(model))
    said = r"memory_fraction=0.1 .* of 992 tokens, but one may grow to 1000; set .* at least 0.1024, .* at most 992"
    with pytest.raises(ConfigError, match=said):
        Local(memory_fraction=0.1).start(ModelWeights(model), True, 1000)
    assert Local(memory_fraction=0.1024).start(ModelWeights(model), True, 1000)._kv_cache.own.count * BLOCK_SIZE >= 1000
    with pytest.raises(ConfigError, match=r"grow to 20000; set environment.max_context_length to at most 992"):
        Local(memory_fraction=0.1).start(ModelWeights(model), True, 20_000)


def test_a_context_beyond_what_the_engine_was_started_for_is_refused() -> None:
    async def run() -> None:
        async with Local().start(ModelWeights(make_model()), True, 64).conversation(Key(0, "a", "t", 0)) as sample:
            await sample([5] * 60, Sampling(max_new_tokens=5))

    with pytest.raises(EngineError, match=r"5 tokens after 60 .* at most 64"):
        asyncio.run(run())


def test_a_turn_after_nothing_is_refused() -> None:
    with pytest.raises(EngineError, match="empty context"):
        asyncio.run(ask(Local().start(ModelWeights(make_model()), True, 64), Key(0, "a", "t", 0), [], 5))


def test_prefixes_are_forgotten_and_computed_again_too() -> None:
    """A pool of a few prefixes and few pages, with contexts that are rewound and written anew between turns."""
    model = make_model(DType.float64)
    engine = LocalEngine(ModelWeights(model), True, KVCache(model, 2304, 512), longest_context=512)
    assert engine._kv_cache.prefixes.count == 2

    async def one(task: int, sample_index: int) -> Played:
        played, rng = Played(), random.Random(task * 10 + sample_index)
        prompt = [20 + task * 50 + i % 40 for i in range(60 + 130 * task)]
        context = list(prompt)
        async with engine.conversation(Key(7, "a", str(task), sample_index)) as sample:
            for turn in range(4):
                completion = await sample(context, Sampling(max_new_tokens=5))
                played.contexts.append(context)
                played.completions.append(completion)
                grown = [*context, *completion.tokens, *(rng.randrange(20, 900) for _ in range(rng.randrange(1, 30)))]
                rewound = [*context[: len(prompt) + 3], 7, 8, 9]  # shares a beginning with what is stored
                condensed = [*prompt[: 40 + 10 * task], *(rng.randrange(20, 900) for _ in range(12))]
                context = [grown, rewound, condensed][(turn + sample_index + task) % 3]
        return played

    async def run() -> list[Played]:
        return list(await asyncio.gather(*(one(task, sample_index) for task in range(3) for sample_index in range(4))))

    assert max(differences(model, asyncio.run(run()), 1.0)) <= 1e-9
    pools = (engine._kv_cache.own, engine._kv_cache.prefixes)
    assert [pool.free for pool in pools] == [pool.count for pool in pools]


# --- what is computed ---


def count_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every forward pass, those at the start apart."""
    monkeypatch.setattr(LocalEngine, "check", lambda _: None)
    counts: list[int] = []
    for planner in (BatchPlanner, CompiledPlanner):

        def counting(self: Any, rows: list[Row], plan: Any = planner.plan) -> Any:
            found = plan(self, rows)
            counts.append(found.real)
            return found

        monkeypatch.setattr(planner, "plan", counting)
    return counts


async def ask(engine: LocalEngine, key: Key, tokens: list[int], new: int) -> list[int]:
    async with engine.conversation(key) as sample:
        return (await sample(tokens, Sampling(max_new_tokens=new))).tokens


def test_siblings_compute_their_prompt_once_and_a_turn_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_tokens(monkeypatch)
    engine = Local().start(ModelWeights(make_model()), True, 1024)
    prompt = list(range(20, 170))

    async def two_turns(sample_index: int) -> None:
        async with engine.conversation(Key(0, "a", "t", sample_index)) as sample:
            first = await sample(prompt, Sampling(max_new_tokens=4))
            await sample([*prompt, *first.tokens, 7, 8, 9], Sampling(max_new_tokens=3))

    async def run() -> None:
        await asyncio.gather(*(two_turns(sample_index) for sample_index in range(5)))

    asyncio.run(run())
    assert counts == [149 + 5, 5, 5, 5, 5 * 4, 5, 5]


def test_different_prompts_share_what_they_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_tokens(monkeypatch)
    model = make_model()
    engine = Local().start(ModelWeights(model), True, 1024)
    prompts = [[*range(20, 120), *range(300 + i, 310 + 2 * i)] for i in range(4)] + [list(range(500, 540))]

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(ask(engine, Key(0, "a", str(i), 0), p, 2) for i, p in enumerate(prompts)))

    together = asyncio.run(run())
    assert counts[0] == 100 + sum(len(p) - 100 for p in prompts[:4]) + 40
    alone = [
        asyncio.run(ask(Local().start(ModelWeights(model), True, 1024), Key(0, "a", str(i), 0), p, 2))
        for i, p in enumerate(prompts)
    ]
    assert together == alone


@pytest.mark.parametrize("leaves", [False, True])
def test_worked_examples_before_many_prompts_are_computed_once(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt with siblings is a prefix of its own; their common beginning, longer than a step, is copied.

    With `leaves` the conversations whose prompt would compute it are cancelled while the others wait for it.
    """
    counts = count_tokens(monkeypatch)
    model = make_model(DType.float64)
    engine = Local().start(ModelWeights(model), True, 1024)
    examples = [20 + i * 7 % 900 for i in range(600)]
    prompts = [[*examples, *(30 + task + i for i in range(20 + task))] for task in range(4)]

    async def one(task: int, sample_index: int) -> Played:
        async with engine.conversation(Key(0, "a", str(task), sample_index)) as sample:
            return Played([prompts[task]], [await sample(prompts[task], Sampling(max_new_tokens=2))])

    async def run() -> list[Played]:
        running = [asyncio.create_task(one(task, sample_index)) for task in range(4) for sample_index in range(5)]
        while leaves and len(counts) < 1:
            await asyncio.sleep(0)
        for conversation in running[:5] if leaves else []:
            conversation.cancel()
        return [found for found in await asyncio.gather(*running, return_exceptions=True) if isinstance(found, Played)]

    found = asyncio.run(run())
    assert len(found) == (15 if leaves else 20)
    assert max(differences(model, found, 1.0)) <= 1e-9
    once = 600 + sum(len(prompt) - 601 for prompt in prompts)
    assert sum(counts) - 2 * len(found) <= once + (620 if leaves else 0)  # what was computed for those that left
    assert not engine._scheduler._prefixes


def test_a_sibling_that_comes_later_finds_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_tokens(monkeypatch)
    engine = Local().start(ModelWeights(make_model()), False, 1024)
    prompt = list(range(20, 120))

    async def run() -> None:
        async with (
            engine.conversation(Key(0, "a", "t", 0)) as first,
            engine.conversation(Key(0, "a", "t", 1)) as second,
        ):
            await asyncio.gather(*(sample(prompt, Sampling(max_new_tokens=2)) for sample in (first, second)))
            await ask(engine, Key(0, "a", "t", 2), prompt, 2)

    asyncio.run(run())
    assert counts == [99 + 2, 2, 1, 1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_siblings_share_their_prompt_also_when_they_do_not_come_at_once(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few places, several prompts with a short common beginning, and a conversation that has a prompt for itself."""
    counts = count_tokens(monkeypatch)
    engine = Local().start(ModelWeights(make_model()), deterministic, 1024)
    places = asyncio.Semaphore(3)
    prompts = [[*range(20, 60), *(60 + task * 100 + i for i in range(90))] for task in range(4)]

    async def one(task: int, sample_index: int) -> None:
        async with places:
            await ask(engine, Key(0, "a", str(task), sample_index), prompts[task], 2)

    async def run() -> None:
        await asyncio.gather(*(one(task, s) for task in range(4) for s in range(1 if task == 0 else 5)))

    asyncio.run(run())
    prompts_computed = sum(counts) - 16 * 2  # what each of 16 conversations computes itself: two tokens
    assert prompts_computed <= 2 * 4 * 129  # a prompt may be computed again after its last sample has left


def test_one_conversation_before_a_group_does_not_part_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_tokens(monkeypatch)
    engine = Local().start(ModelWeights(make_model()), True, 1024)
    first, second = [*range(20, 60), *range(100, 300)], [*range(20, 60), *range(400, 600)]

    async def run() -> None:
        keys = [Key(0, "a", str(number), 0) for number in range(9)]
        prompts = [first, *[second] * 8]
        await asyncio.gather(*(ask(engine, key, prompt, 1) for key, prompt in zip(keys, prompts, strict=True)))

    asyncio.run(run())
    assert sum(counts) == 239 + 1 + 239 + 8


def test_long_prompts_are_computed_in_parts_beside_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_tokens(monkeypatch)
    monkeypatch.setitem(scheduler.MAX_PREFILL_TOKENS, "cpu", 50)
    model = make_model(DType.float64)
    engine = Local().start(ModelWeights(model), False, 1024)

    async def run() -> list[Played]:
        short = asyncio.create_task(converse(engine, Key(7, "a", "2", 0), 2, Sampling(max_new_tokens=30), 1))
        while len(counts) < 3:
            await asyncio.sleep(0)
        long = [
            one_turn(engine, Key(7, "a", "3", sample_index), [30 + i % 900 for i in range(180)])
            for sample_index in range(2)
        ]
        return list(await asyncio.gather(short, *long))

    async def one_turn(engine: LocalEngine, key: Key, prompt: list[int]) -> Played:
        async with engine.conversation(key) as sample:
            return Played([prompt], [await sample(prompt, Sampling(max_new_tokens=5))])

    assert max(differences(model, asyncio.run(run()), 1.0)) <= 1e-9
    assert max(counts) <= 50 + 3
    assert counts.count(51) >= 3  # a part of the long prompt and a token of the short conversation


def test_long_prefill_is_computed_some_queries_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, whose plain products hold few scores at once."""
    monkeypatch.setattr(paged_attention, "FEW", 10**9)
    monkeypatch.setattr(paged_attention, "SCORES", 4000)
    model = make_model(DType.float64)
    found = play_many(Local().start(ModelWeights(model), True, 1024), Sampling(max_new_tokens=12, stop_ids=[STOP]))
    assert max(differences(model, found, 1.0)) <= 1e-9


def test_requests_that_wait_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every step: comparing long contexts takes longer than to decode."""
    model = make_model()
    engine = LocalEngine(ModelWeights(model), False, KVCache(model, 160, 64), longest_context=64)
    looked: list[int] = []
    share, step = Scheduler._share, LocalEngine._step
    steps: list[int] = []
    monkeypatch.setattr(Scheduler, "_share", lambda self, fresh: (looked.append(len(fresh)), share(self, fresh))[1])
    monkeypatch.setattr(LocalEngine, "_step", lambda self: (steps.append(len(engine.requests)), step(self))[1])

    async def run() -> None:
        keys = [Key(0, "a", f"{number:02}", 0) for number in range(30)]
        await asyncio.gather(*(ask(engine, key, [20 + i, *range(40)], 20) for i, key in enumerate(keys)))

    asyncio.run(run())
    assert len(steps) > 100 and steps[20] > 20
    assert sum(looked) <= 2 * 30  # when they come, and before they are admitted


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_conversation_begins_when_there_is_room_for_it(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight conversations of four turns, blocks for three: those that have begun keep what is cached of them."""
    counts = count_tokens(monkeypatch)
    model = make_model()
    engine = LocalEngine(ModelWeights(model), deterministic, KVCache(model, 3 * 192, 180), longest_context=180)
    delays = random.Random(0)

    async def one(number: int) -> int:
        context = [20 + number, *range(100, 130)]
        async with engine.conversation(Key(7, "a", str(number), 0)) as sample:
            for _ in range(4):
                completion = await sample(context, Sampling(max_new_tokens=12))
                for _ in range(1 if deterministic else delays.randint(1, 20)):
                    await asyncio.sleep(0)
                context = [*context, *completion.tokens, *range(200, 220)]
        return len(context) - 20

    async def run() -> list[int]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    distinct = sum(asyncio.run(run()))
    assert sum(counts) <= 2 * distinct


# --- weights ---


def test_three_updates_in_the_middle_of_conversations() -> None:
    """Every token carries the log-probability of the weights that sampled it."""
    model = make_model(DType.float64)

    async def run() -> float:
        engine = Local().start(ModelWeights(model), True, 1024)
        worst = 0.0
        async with engine.conversation(Key(0, "a", "t", 0)) as one, engine.conversation(Key(0, "a", "t", 1)) as other:
            contexts = [prompt_of(3), prompt_of(3)]
            for version in range(1, 5):
                both = await asyncio.gather(
                    *(s(c, Sampling(max_new_tokens=6)) for s, c in zip((one, other), contexts, strict=True))
                )
                for context, completion in zip(contexts, both, strict=True):
                    assert completion.versions == [version - 1] * 6
                    full = full_logprobs(model, context, completion.tokens, 1.0)
                    worst = max(worst, *(abs(a - b) for a, b in zip(full, completion.logprobs, strict=True)))
                contexts = [[*c, *b.tokens, 40, 41] for c, b in zip(contexts, both, strict=True)]
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
                await engine.load_weights(ModelWeights(model, version))
        return worst

    assert asyncio.run(run()) <= 1e-9


def test_weights_that_change_unannounced_are_noticed() -> None:
    """As those of a warm start, which counts no versions."""
    model, changes = make_model(), [0]
    engine = Local().start(ModelWeights(model, 0, lambda: changes[0]), True, 1024)
    asyncio.run(ask(engine, Key(0, "a", "t", 0), prompt_of(1), 3))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.5)
    changes[0] += 1
    played = play_many(engine, Sampling(max_new_tokens=6))
    assert max(differences(model, played, 1.0)) <= 5e-4


@pytest.mark.parametrize("scale", [0.5, float("nan")])
def test_fused_decoding_that_has_gone_wrong_gives_way_to_the_models_own_modules(scale: float) -> None:
    model = make_model()
    engine = Local().start(ModelWeights(model), True, 1024)
    engine.notes.clear()
    engine._forward.fused._layers[0].scale = scale  # type: ignore[union-attr]
    asyncio.run(engine.load_weights(ModelWeights(model, 1)))
    played = play_many(engine, Sampling(max_new_tokens=6))
    assert not engine._forward.fused
    assert "fused decoding differ" in engine.notes[0]
    assert max(differences(model, played, 1.0)) <= 5e-4


def test_tokens_on_which_a_model_was_never_trained_do_not_condemn_it() -> None:
    """As in SmolLM2, whose first ids are unused: rounding behind them is a thousand times that of ordinary ones."""
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[1:9].mul_(1e6)
    engine = Local().start(ModelWeights(model), True, 1024)
    for version in range(1, 4):
        with torch.no_grad():
            model.get_input_embeddings().weight[9:].mul_(1.01)
        asyncio.run(engine.load_weights(ModelWeights(model, version)))
        asyncio.run(ask(engine, Key(0, "a", "t", 0), prompt_of(1), 3))
    assert engine._forward.fused
    assert len(engine.notes) == 1


def shift_positions(monkeypatch: pytest.MonkeyPatch, planner: type[BatchPlanner | CompiledPlanner]) -> None:
    """Of all tokens that come after others."""
    plan: Any = planner.plan

    def shifted(self: Any, rows: list[Row]) -> Any:
        past = len(rows[0].block_table.tokens)
        found = plan(self, rows)
        return replace(found, positions=found.positions + 1) if past else found

    monkeypatch.setattr(planner, "plan", shifted)


def test_a_cache_that_is_wrong_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    shift_positions(monkeypatch, BatchPlanner)
    with pytest.raises(ConfigError, match=r"differ from the model's own forward pass by .* nats"):
        Local(compiled=False).start(ModelWeights(make_model()), True, 1024)


def test_compiled_kernels_that_are_wrong_give_way_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shift_positions(monkeypatch, CompiledPlanner)
    model = make_model()
    engine = Local().start(ModelWeights(model), True, 1024)
    assert "log-probabilities by compiled kernels differ" in engine.notes[0]
    assert max(differences(model, play_many(engine, Sampling(max_new_tokens=6)), 1.0)) <= 5e-4


def test_compiled_kernels_that_fail_give_way_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, rows: list[Row]) -> Any:
        raise RuntimeError("an illegal instruction\nand more")

    monkeypatch.setattr(CompiledPlanner, "plan", fails)
    model = make_model()
    engine = Local().start(ModelWeights(model), True, 1024)
    assert "compiled kernels fail (RuntimeError: an illegal instruction): torch's are used" in engine.notes[0]
    assert max(differences(model, play_many(engine, Sampling(max_new_tokens=6)), 1.0)) <= 5e-4


def test_models_that_the_fused_path_does_not_know_sample_through_their_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(DType.float64)
    sampling = Sampling(max_new_tokens=12, stop_ids=[STOP])
    fused = Local().start(ModelWeights(model), True, 1024)
    monkeypatch.setattr("mtgrpo.engines.local.decoder._like_llama", lambda model: False)
    own = Local().start(ModelWeights(model), True, 1024)
    assert fused._forward.fused
    assert not own._forward.fused
    played = play_many(own, sampling)
    assert max(differences(model, played, 1.0)) <= 1e-9
    assert [[c.tokens for c in p.completions] for p in played] == [
        [c.tokens for c in p.completions] for p in play_many(fused, sampling)
    ]


# --- the protocol ---


def test_weights_of_another_model_are_refused() -> None:
    engine = Local().start(ModelWeights(make_model()), True, 1024)
    with pytest.raises(EngineError, match="samples from the model it was started with"):
        asyncio.run(engine.load_weights(ModelWeights(make_model(seed=1), 1)))
    assert engine.version == 0


def test_loading_weights_resets_the_cache_and_is_measured() -> None:
    model = make_model()
    engine = Local().start(ModelWeights(model), True, 1024)

    async def run() -> tuple[int, int]:
        async with engine.conversation(Key(0, "a", "t", 0)) as sample:
            await sample(prompt_of(1), Sampling(max_new_tokens=4))
            before = engine._kv_cache.own.free
            await engine.load_weights(ModelWeights(model, 3))
            return before, engine._kv_cache.own.free

    before, after = asyncio.run(run())
    assert before < after == engine._kv_cache.own.count
    assert engine.version == 3
    assert engine.sync_s > 0


def test_nothing_is_sampled_until_it_goes_on() -> None:
    """And then what would have been sampled anyway, also by a conversation that was open meanwhile."""
    model, sampling = make_model(DType.float64), Sampling(max_new_tokens=30)

    async def run(stop: bool) -> tuple[list[Completion], list[int]]:
        engine, lengths = Local().start(ModelWeights(model), True, 1024), []
        async with engine.conversation(Key(0, "a", "t", 0)) as sample:
            asked = asyncio.create_task(sample(prompt_of(1), sampling))
            while not any(request.output.tokens for request in engine._scheduler.requests):
                await asyncio.sleep(0)
            if stop:
                await engine.sleep()
                for _ in range(2):
                    lengths.append(sum(len(request.output.tokens) for request in engine._scheduler.requests))
                    await asyncio.sleep(0.05)
                assert not engine._kv_cache.own.keys  # the memory is given back
                await engine.wake()
            first = await asyncio.wait_for(asked, 20)
            return [first, await sample([*prompt_of(1), *first.tokens, 7], sampling)], lengths

    plain, _ = asyncio.run(run(False))
    stopped, lengths = asyncio.run(run(True))
    assert 0 < lengths[0] == lengths[1] < 30
    assert [c.tokens for c in stopped] == [c.tokens for c in plain]
    assert stopped[1].logprobs == pytest.approx(plain[1].logprobs, abs=1e-10)


def test_a_night_changes_no_digit() -> None:
    model, sampling = make_model(), Sampling(max_new_tokens=8, stop_ids=[STOP])
    found: list[list[Played]] = []
    for nights in (0, 2):
        engine = Local().start(ModelWeights(model), True, 1024)
        play_many(engine, sampling)
        for _ in range(nights):
            asyncio.run(engine.sleep())
            asyncio.run(engine.wake())
        found.append(play_many(engine, sampling))
    assert found[0] == found[1]


def test_a_closed_engine_answers_nobody() -> None:
    engine = Local().start(ModelWeights(make_model()), False, 1024)

    async def run() -> None:
        async with engine.conversation(Key(0, "a", "t", 0)) as sample:
            asked = asyncio.create_task(sample(prompt_of(1), Sampling(max_new_tokens=900)))
            await asyncio.sleep(0.05)
            await engine.close()
            for request in (asked, sample(prompt_of(1), Sampling(max_new_tokens=2))):
                with pytest.raises(EngineError, match="the engine is closed"):
                    await request

    asyncio.run(run())
    assert engine._kv_cache.own.keys == []
    assert engine._kv_cache.own.free == engine._kv_cache.own.count


def test_engines_import_no_library() -> None:
    """Settings and protocol alone; what runs a model is imported by `start`."""
    modules = "mtgrpo.engines, mtgrpo.engines.local, mtgrpo.engines.server"
    code = f"import sys, {modules}; sys.exit(', '.join({{'torch', 'transformers'}} & set(sys.modules)) or None)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


# --- requests ---


def test_a_turn_that_takes_too_long_is_given_up_and_the_conversation_can_go_on() -> None:
    model = make_model()
    prompt = prompt_of(1)

    async def run() -> tuple[Completion, int]:
        engine = Local().start(ModelWeights(model), False, 1024)
        async with engine.conversation(Key(0, "a", "t", 0)) as sample:
            with pytest.raises(TimeoutError, match=r"sampling\.timeout_s=0\.05"):
                await sample(prompt, Sampling(max_new_tokens=900, timeout_s=0.05))
            left = len(engine._scheduler.requests)
            return await sample([*prompt, 7], Sampling(max_new_tokens=5, timeout_s=60)), left

    completion, left = asyncio.run(run())
    assert left == 0
    expected = full_logprobs(model, [*prompt, 7], completion.tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) < 5e-4


def test_requests_with_settings_of_their_own_decode_together() -> None:
    model = make_model(DType.float64)
    settings = [
        Sampling(temperature=t, max_new_tokens=6, top_k=k) for t, k in ((0.0, 0), (0.5, 0), (1.0, 3), (2.0, 50))
    ]
    prompt = prompt_of(2)

    async def one(engine: LocalEngine, number: int) -> Completion:
        async with engine.conversation(Key(0, "a", "t", number)) as sample:
            return await sample(prompt, settings[number])

    async def run(numbers: list[int]) -> list[Completion]:
        engine = Local().start(ModelWeights(model), True, 1024)
        return await asyncio.gather(*(one(engine, number) for number in numbers))

    together = asyncio.run(run([0, 1, 2, 3]))
    assert [c.tokens for c in together] == [asyncio.run(run([number]))[0].tokens for number in range(4)]
    assert [len(tokens) for tokens in together[2].kept] == [3] * 6
    assert together[1].kept == []


# --- attention, for condensers ---


def test_attention_mass_is_that_of_the_models_own_attention() -> None:
    model = make_model()
    tokens = [20 + i * 7 % 900 for i in range(50)]
    spans = [(0, 10), (10, 33), (33, 50), (12, 12)]
    found = asyncio.run(Local().start(ModelWeights(model), True, 1024).attend(tokens, spans))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(torch.tensor([tokens]), output_attentions=True).attentions
    share = torch.stack([layer[0, :, -16:].mean((0, 1)) for layer in layers]).mean(0)
    assert found == pytest.approx([share[start:end].sum().item() for start, end in spans], abs=1e-5)
    assert sum(found) == pytest.approx(1)


def test_attention_to_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"span \[3, 9\) does not lie in the 5 tokens"):
        asyncio.run(Local().start(ModelWeights(make_model()), True, 1024).attend([1, 2, 3, 4, 5], [(3, 9)]))
