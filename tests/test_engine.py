"""The local engine: its log-probabilities are those of a full forward pass, its tokens depend on the seed alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from mtgrpo.engines import Key
from mtgrpo.engines.local import Local, LocalEngine
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.types import Completion, EngineError, Sampling

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
    rng = random.Random(f"{key}")
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
                        engine, Key(7, "train/1", str(task), sibling), task, sampling, 1 + (task + sibling) % 4, delays
                    )
                    for task in range(tasks)
                    for sibling in range(siblings)
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
@pytest.mark.parametrize(("dtype", "worst", "mean"), [(DType.float64, 1e-9, 1e-9), (DType.float32, 5e-4, 1e-5)])
def test_logprobs_equal_a_full_forward_at_every_turn(
    dtype: DType, worst: float, mean: float, temperature: float
) -> None:
    model = make_model(dtype)
    sampling = Sampling(temperature=temperature, max_new_tokens=12, stop_ids=[STOP])
    found = differences(model, play_many(Local().start(model, True), sampling), temperature)
    assert len(found) > 200
    assert max(found) <= worst
    assert sum(found) / len(found) <= mean


def test_same_seed_same_digits_however_slow_the_tools_are() -> None:
    sampling = Sampling(max_new_tokens=10, stop_ids=[STOP])
    model = make_model()
    runs = [play_many(Local().start(model, True), sampling, delay_seed=seed) for seed in (None, 1, 2)]
    assert runs[0] == runs[1] == runs[2]


def test_a_conversation_does_not_depend_on_the_others() -> None:
    sampling = Sampling(max_new_tokens=10, stop_ids=[STOP])
    model = make_model(DType.float64)
    together = play_many(Local().start(model, False), sampling)
    engine = Local().start(model, False)
    alone = asyncio.run(converse(engine, Key(7, "train/1", "2", 1), 2, sampling, 4))
    assert [c.tokens for c in together[2 * 3 + 1].completions] == [c.tokens for c in alone.completions]


def test_another_seed_scope_task_sibling_or_turn_gives_other_tokens() -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=12)
    keys = [Key(7, "a", "t", 0), Key(8, "a", "t", 0), Key(7, "b", "t", 0), Key(7, "a", "u", 0), Key(7, "a", "t", 1)]

    async def run() -> list[Played]:
        engine = Local().start(model, True)
        return [await converse(engine, key, 0, sampling, 1) for key in keys]

    outputs = [tuple(played.completions[0].tokens) for played in asyncio.run(run())]
    assert len(set(outputs)) == len(keys)


def test_greedy_equals_generate() -> None:
    model = make_model()
    prompt = prompt_of(3)

    async def run() -> list[int]:
        async with Local().start(model, True).conversation(Key(0, "eval", "t", 0)) as sample:
            return (await sample(prompt, Sampling(temperature=0, max_new_tokens=20))).tokens

    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert asyncio.run(run()) == expected[0, len(prompt) :].tolist()


def test_new_weights_in_mid_conversation_drop_what_was_cached() -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=8)

    async def run() -> tuple[list[int], Completion]:
        engine = Local().start(model, True)
        async with engine.conversation(Key(0, "train/1", "t", 0)) as sample:
            first = await sample(prompt_of(1), sampling)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.02)
            engine.version = 5
            context = prompt_of(1) + first.tokens + [33, 34]
            return context, await sample(context, sampling)

    context, second = asyncio.run(run())
    assert second.versions == [5] * len(second.tokens)
    expected = full_logprobs(model, context, second.tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(second.logprobs, expected, strict=True)) < 5e-5


def test_an_error_in_decoding_reaches_every_conversation_and_the_engine_goes_on() -> None:
    model = make_model()
    engine = Local().start(model, True)
    sampling = Sampling(max_new_tokens=5)

    async def ask(sibling: int, token: int) -> Completion:
        async with engine.conversation(Key(0, "train/1", "t", sibling)) as sample:
            return await sample([token, 5, 6], sampling)

    async def run() -> tuple[list[object], Completion]:
        broken = await asyncio.gather(ask(0, 10**9), ask(1, 7), return_exceptions=True)
        return list(broken), await ask(2, 7)

    broken, after = asyncio.run(run())
    assert all(isinstance(result, EngineError) for result in broken)
    assert len(after.tokens) == 5


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_error_among_more_conversations_than_before_is_survived(deterministic: bool) -> None:
    engine = Local().start(make_model(), deterministic)
    sampling = Sampling(max_new_tokens=5)

    async def ask(sibling: int, token: int) -> Completion:
        async with engine.conversation(Key(0, "train/1", "t", sibling)) as sample:
            return await sample([token, 5, 6], sampling)

    async def run() -> tuple[list[object], list[Completion]]:
        before = await asyncio.gather(ask(0, 7), ask(1, 8))
        broken = await asyncio.gather(*(ask(sibling, 10**9) for sibling in range(5)), return_exceptions=True)
        assert before == await asyncio.gather(ask(0, 7), ask(1, 8))
        return list(broken), list(await asyncio.gather(*(ask(sibling, 7) for sibling in range(5))))

    broken, after = asyncio.run(run())
    assert [str(error) for error in broken] == ["decoding failed: IndexError: index out of range in self"] * 5
    assert [len(completion.tokens) for completion in after] == [5] * 5


def test_a_conversation_that_has_not_spoken_yet_survives_the_end_of_another() -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=5)

    async def run() -> Completion:
        engine = Local().start(model, False)
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


@pytest.mark.parametrize("length", [63, 64, 65, 128])
def test_siblings_share_a_prompt_of_any_length(length: int) -> None:
    """Also one that fills the buffers exactly."""
    model = make_model()
    prompt = [20 + number % 900 for number in range(length)]

    async def ask(engine: LocalEngine, sibling: int) -> Completion:
        async with engine.conversation(Key(0, "train/1", "t", sibling)) as sample:
            return await sample(prompt, Sampling(max_new_tokens=5))

    async def run() -> list[Completion]:
        engine = Local().start(model, True)
        return list(await asyncio.gather(*(ask(engine, sibling) for sibling in range(3))))

    for completion in asyncio.run(run()):
        expected = full_logprobs(model, prompt, completion.tokens, 1.0)
        assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) < 5e-4


def test_conversations_that_come_and_go_keep_their_own_past() -> None:
    """Slots are given away and moved while others go on."""
    model = make_model(DType.float64)
    sampling = Sampling(max_new_tokens=6, stop_ids=list(range(200)))
    places = asyncio.Semaphore(4)

    async def one(engine: LocalEngine, number: int) -> Played:
        async with places:
            return await converse(engine, Key(7, "train/1", str(number), 0), number, sampling, 1 + number * 7 % 5)

    async def run() -> list[Played]:
        engine = Local().start(model, False)
        return list(await asyncio.gather(*(one(engine, number) for number in range(14))))

    assert max(differences(model, asyncio.run(run()), 1.0)) <= 1e-9


def test_a_conversation_goes_on_after_an_error() -> None:
    model = make_model()

    async def run() -> Completion:
        engine = Local().start(model, True)
        async with engine.conversation(Key(0, "train/1", "t", 0)) as sample:
            with pytest.raises(EngineError):
                await sample([*prompt_of(1), 10**9], Sampling(max_new_tokens=5))
            return await sample([*prompt_of(1), 7], Sampling(max_new_tokens=5))

    completion = asyncio.run(run())
    expected = full_logprobs(model, [*prompt_of(1), 7], completion.tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) < 5e-4


@pytest.mark.parametrize("cancelled", ["asking", "silent"])
def test_a_cancelled_conversation_is_neither_waited_for_nor_played_on(cancelled: str) -> None:
    model = make_model()
    sampling = Sampling(max_new_tokens=5)

    async def run() -> tuple[list[int], Completion]:
        engine = Local().start(model, True)
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
