"""Checkpoints: whole or absent whenever the process dies, exact, verified, pruned."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from mtgrpo import checkpoint, preset
from mtgrpo.chat import ChatSettings, Tools, open_chat
from mtgrpo.chat.template import chatml
from mtgrpo.checkpoint import flatten, latest, load_state, save, unflatten, verify
from mtgrpo.config.experiment import CheckpointSettings
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import ModelSettings, load_model, load_tokenizer
from mtgrpo.stages.run import open_run
from mtgrpo.types import Message, ToolCall, ToolSpec

logging.disable_progress_bar()
TENSORS = {"0/exp_avg": torch.arange(6.0).reshape(2, 3).T, "rng": torch.arange(5, dtype=torch.uint8)}
STATE = {"step": 3, "task": {"epoch": 1, "names": ["a", None]}, "rate": 0.1 + 0.2, "odd": float("inf")}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(ModelSettings("tiny"), seed=0).cpu()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer("tiny")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


Save = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Save:
    def save_step(step: int, keep_last: int = 0, tensors: dict[str, Tensor] = TENSORS, **state: Any) -> Path:
        return save(tmp_path, step, model, tokenizer, tensors, {**STATE, **state}, keep_last)

    return save_step


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_was_saved_is_loaded_exactly(saved: Save, tmp_path: Path) -> None:
    path = saved(60)
    assert path == latest(tmp_path) == tmp_path / "checkpoints" / "step_000060"
    state, tensors = load_state(path)
    assert state == STATE
    assert list(tensors) == list(TENSORS)
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])


def test_a_checkpoint_is_a_model_folder(saved: Save, model: PreTrainedModel) -> None:
    path = saved(1)
    loaded = load_model(ModelSettings(str(path)), seed=1).cpu()
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert load_tokenizer(str(path)).get_vocab() == load_tokenizer("tiny").get_vocab()


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("template", ["chatml", "PATH", "auto"])
async def test_a_checkpoint_is_prompted_as_it_was_trained(template: str, rank: int, tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own.jinja"
    load_model(ModelSettings("tiny"), seed=0).save_pretrained(base)
    plain = load_tokenizer("tiny")
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain.chat_template = turns + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    plain.save_pretrained(base)
    own.write_text(chatml().replace("You may call these tools", "Tools"))
    chosen = str(own) if template == "PATH" else template
    words = [f"model.name={base}", f"model.lora.rank={rank}", f"chat.template={chosen}", "log=[jsonl]"]
    async with open_run(preset("calculator", *words), tmp_path / "run") as run:
        path = save(tmp_path, 1, run.model, run.tokenizer, {}, {})
    call = ToolCall("calculator", {"expression": "1 + 2"})
    messages = [Message("user", "What?"), Message("assistant", "I add.", "", (call, call))]
    messages += [Message("tool", "3", name="calculator"), Message("tool", "3", name="calculator")]
    tool = ToolSpec("calculator", "Evaluates an expression.", {"type": "object", "properties": {}})
    expected = run.chat.open(messages, [tool])
    function = {"name": "calculator", "arguments": call.arguments}
    dicts: list[dict[str, Any]] = [{"role": message.role, "content": message.content} for message in messages]
    dicts[1]["tool_calls"] = [{"type": "function", "function": function}] * 2
    saved: Any = AutoTokenizer.from_pretrained(path)
    prompted = saved.apply_chat_template(
        dicts,
        tools=[{"type": "function", "function": dataclasses.asdict(tool)}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert prompted == expected, "as transformers and vLLM prompt it"
    reopened = open_chat(load_tokenizer(str(path)), ChatSettings())
    assert reopened.open(messages, [tool]) == expected
    assert reopened.stop_ids == run.chat.stop_ids
    if template == "auto":
        again = open_chat(load_tokenizer(str(path)), ChatSettings(tools=Tools.prompt))
        assert again.template == reopened.template, "tools are not described twice"
    if not rank:
        assert GenerationConfig.from_pretrained(path).eos_token_id == list(run.chat.stop_ids)


def test_without_tensors(saved: Save) -> None:
    assert load_state(saved(1, tensors={}))[1] == {}


def test_nothing_is_pickled(saved: Save) -> None:
    assert {path.suffix for path in saved(1).iterdir()} <= {".json", ".safetensors", ".jinja"}


def test_latest_is_the_highest_step(saved: Save, tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (9, 1_000_000, 10):
        saved(step)
    (tmp_path / "checkpoints" / "step_9999999").touch()
    (tmp_path / "checkpoints" / "step_best").mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step_1000000"


def test_pruning_keeps_the_newest(saved: Save, tmp_path: Path) -> None:
    for step in range(1, 6):
        saved(step, keep_last=2)
    assert steps(tmp_path) == ["step_000004", "step_000005"]


def test_pruning_never_removes_what_was_just_saved(saved: Save, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        saved(step)
    saved(15, keep_last=2)  # resumed from step 10 in the same folder
    assert steps(tmp_path) == ["step_000015", "step_000020", "step_000030"]


def test_all_are_kept_on_request(saved: Save, tmp_path: Path) -> None:
    for step in range(1, 6):
        saved(step, keep_last=0)
    assert len(steps(tmp_path)) == 5


def test_saving_a_step_again_replaces_it(saved: Save, tmp_path: Path) -> None:
    saved(7, run="first")
    path = saved(7, keep_last=1, run="second")
    assert load_state(path)[0]["run"] == "second"
    assert steps(tmp_path) == ["step_000007"]


class Killed(BaseException):
    """The process is gone."""


class Kill:
    """Dies in the middle of the `at`-th call that changes a file; nothing changes a file any more after that."""

    def __init__(self, at: int, patch: pytest.MonkeyPatch) -> None:
        self.left = at
        patch.setattr(os, "replace", self.during(os.replace, lambda *_: None))
        patch.setattr(os, "fsync", self.during(os.fsync, lambda *_: None))
        patch.setattr(shutil, "rmtree", self.during(shutil.rmtree, self.half_removed))
        patch.setattr(Path, "mkdir", self.during(Path.mkdir, lambda *_: None))
        patch.setattr(checkpoint, "save_file", self.during(save_file, lambda _, path: self.half_written(path)))
        half_model: Any = lambda _, __, folder: self.half_written(folder / "model.safetensors")  # noqa: E731
        patch.setattr(checkpoint, "save_model", self.during(checkpoint.save_model, half_model))

    def during(self, real: Callable[..., Any], half: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left > 0:
                return real(*args, **kwargs)
            if self.left == 0:
                half(*args)
            raise Killed

        return call

    @staticmethod
    def half_written(path: Path) -> None:
        path.write_bytes(b"\x10\0\0")

    @staticmethod
    def half_removed(folder: Path) -> None:
        if folder.is_dir():
            (folder / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(saved: Save, tmp_path: Path, again: bool) -> None:
    step = 2 if again else 3
    deaths = 0
    while True:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        saved(1)
        saved(2, run="before")
        try:
            with pytest.MonkeyPatch.context() as patch:
                Kill(deaths + 1, patch)
                saved(step, keep_last=1, run="after")
            break
        except Killed:
            deaths += 1
        found = latest(tmp_path)
        assert found is not None
        assert load_state(found)[0]["run"] in ("before", "after")
        for path in (tmp_path / "checkpoints").glob("step_*"):
            if ".replaced" not in path.name:
                verify(path)  # half a checkpoint is never seen
        saved(4, keep_last=1, run="resumed")
        assert steps(tmp_path) == ["step_000004"]  # what the kill left is cleared away
    assert deaths > 10
    assert steps(tmp_path) == [f"step_{step:06d}"]


@pytest.mark.parametrize("part", ["save_model", "save_file", "_fingerprint", "_write_synced", "_put"])
def test_an_error_while_saving_leaves_nothing_behind(saved: Save, tmp_path: Path, part: str) -> None:
    saved(1)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(checkpoint, part, full)
        saved(2, keep_last=1)
    assert steps(tmp_path) == ["step_000001"]


def test_every_kind_of_damage_is_found_and_named(saved: Save, tmp_path: Path) -> None:
    whole = saved(1)
    verify(whole)
    files = sorted(path.name for path in whole.iterdir())
    assert {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"} <= set(files)
    for name in files:
        for damage in (_remove, _truncate, _flip_a_bit):
            copy = tmp_path / "copy"
            shutil.copytree(whole, copy)
            damage(copy / name)
            with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
                load_state(copy)
            shutil.rmtree(copy)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        load_state(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["[]", "{}", '{"sha256": 1, "files": 3}', "\xff"])
def test_a_strange_state_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json"):
        verify(tmp_path)


@pytest.mark.parametrize("setting", ["every_steps", "keep_last"])
def test_negative_settings(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"`{setting}`.*-1"):
        CheckpointSettings(**{setting: -1})


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.integers(0, 3).map(lambda n: torch.full((n,), float(n), dtype=torch.float64))
)
NAMES = st.text(st.characters(exclude_characters="/"), min_size=1) | st.sampled_from(["$tensor", "$tuple", "$items"])
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_flatten_then_unflatten_is_the_same(state: Any) -> None:
    tensors, rest = flatten(state)
    assert_same(unflatten(tensors, json.loads(json.dumps(rest))), state)


def test_flatten_refuses_what_it_cannot_restore() -> None:
    with pytest.raises(TypeError, match="a/1 is a set"):
        flatten({"a": [1, {2}]})
    with pytest.raises(TypeError, match="two tensors are called a/b"):
        flatten({"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)})


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda model: torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.8, 0.95), amsgrad=True, foreach=True
    ),
    "muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_to_the_last_digit(name: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = _training(OPTIMIZERS[name])
    _steps(model, optimizer, scheduler, range(3))
    before = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    tensors, rest = flatten(before)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "tensors.safetensors")
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    restored = unflatten(load_file(tmp_path / "tensors.safetensors"), json.loads(json.dumps(rest)))
    assert_same(restored, before)
    resumed, resumed_optimizer, resumed_scheduler = _training(OPTIMIZERS[name])
    resumed.load_state_dict(weights)
    resumed_optimizer.load_state_dict(restored["optimizer"])
    resumed_scheduler.load_state_dict(restored["scheduler"])

    _steps(model, optimizer, scheduler, range(3, 6))
    _steps(resumed, resumed_optimizer, resumed_scheduler, range(3, 6))
    assert_same(resumed.state_dict(), dict(model.state_dict()))
    assert_same(resumed_optimizer.state_dict(), optimizer.state_dict())
    assert resumed_scheduler.get_last_lr() == scheduler.get_last_lr() != [optimizer.defaults["lr"]]


def _training(make: Make) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))
    optimizer = make(model)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, seeds: range) -> None:
    for seed in seeds:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        scheduler.step()


def assert_same(found: Any, expected: Any) -> None:
    """Equal in value, type and order of keys, all the way down."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(expected) and found == expected
