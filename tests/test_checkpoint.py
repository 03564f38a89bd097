"""Checkpoints: whole or absent whenever the process dies, exact, verified, pruned."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from mtgrpo import preset
from mtgrpo.chat import ChatSettings, Tools, open_chat
from mtgrpo.chat.template import chatml
from mtgrpo.config.experiment import CheckpointSettings
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.stages.checks import check
from mtgrpo.stages.run import open_run
from mtgrpo.types import Message, ToolCall, ToolSpec
from mtgrpo.weights import checkpoint
from mtgrpo.weights.checkpoint import (
    ModelSnapshot,
    flatten,
    read_training,
    tokenizer_files,
    unflatten,
    write,
)
from mtgrpo.weights.saved import digest_of, find_newest, read_checkpoint, sha256_of
from saving import save_model

logging.disable_progress_bar()
TENSORS = {"0/exp_avg": torch.arange(6.0).reshape(2, 3).T, "rng": torch.arange(5, dtype=torch.uint8)}
STATE = {"step": 3, "task": {"epoch": 1, "names": ["a", None]}, "rate": 0.1 + 0.2, "odd": float("inf")}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(ModelSettings("tiny"), seed=0).cpu()


@pytest.fixture(scope="module")
def tokenizer() -> dict[str, bytes]:
    return tokenizer_files(load_tokenizer("tiny"))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


Save = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path, model: PreTrainedModel, tokenizer: dict[str, bytes]) -> Save:
    def save_step(
        step: int, keep_last: int = 0, training: Any = TENSORS, best: Sequence[int] = (), **state: Any
    ) -> Path:
        copied = ModelSnapshot(model, training)
        return write(tmp_path, step, copied, {**STATE, **state}, tokenizer, keep_last, best)

    return save_step


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_was_saved_is_loaded_exactly(saved: Save, tmp_path: Path) -> None:
    path = saved(60)
    found = find_newest(tmp_path, print)
    assert found is not None and path == found.path == tmp_path / "checkpoints" / "step_000060"
    assert (found.step, found.state) == (60, STATE)
    tensors = read_training(path)
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
    async with open_run(preset("calculator_from_scratch", *words), tmp_path / "run") as run:
        path = write(tmp_path, 1, run.trainer.snapshot(), {}, tokenizer_files(run.tokenizer))
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
    assert read_training(saved(1, training={})) == {}


def test_nothing_is_pickled(saved: Save) -> None:
    assert {path.suffix for path in saved(1).iterdir()} <= {".json", ".safetensors", ".jinja"}


def test_latest_is_the_highest_step(saved: Save, tmp_path: Path) -> None:
    assert find_newest(tmp_path, print) is None
    for step in (9, 1_000_000, 10):
        saved(step)
    (tmp_path / "checkpoints" / "step_9999999").touch()
    (tmp_path / "checkpoints" / "step_best").mkdir()
    found = find_newest(tmp_path, print)
    assert found is not None and found.path == tmp_path / "checkpoints" / "step_1000000"


def test_pruning_keeps_the_newest(saved: Save, tmp_path: Path) -> None:
    for step in range(1, 6):
        saved(step, keep_last=2)
    assert steps(tmp_path) == ["step_000004", "step_000005"]


def test_pruning_keeps_the_best_too(saved: Save, tmp_path: Path) -> None:
    for step in range(1, 6):
        saved(step, keep_last=1, best=[2, 3][:step])
    assert steps(tmp_path) == ["step_000002", "step_000003", "step_000005"]


def test_what_changes_after_the_copy_is_not_saved(
    tmp_path: Path, model: PreTrainedModel, tokenizer: dict[str, bytes]
) -> None:
    changing = {"a": torch.ones(3)}
    weight = next(iter(model.parameters()))
    before = weight.detach().clone()
    copied = ModelSnapshot(model, changing)
    with torch.no_grad():
        changing["a"].mul_(2)
        weight.mul_(2)
    path = write(tmp_path, 1, copied, {}, tokenizer)
    with torch.no_grad():
        weight.copy_(before)
    assert read_training(path)["a"].tolist() == [1, 1, 1]
    loaded = load_model(ModelSettings(str(path)), seed=1).cpu()
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


def test_the_memory_of_the_copy_before_is_used_again(model: PreTrainedModel) -> None:
    changing = {"a": torch.ones(3), "moved": torch.ones(2)}
    last = ModelSnapshot(model, changing)
    before = {name: tensor.data_ptr() for name, tensor in (last.weights | last.tensors).items()}
    changing["a"].mul_(2)
    changing["moved"] = torch.full((4,), 5.0)
    copied = ModelSnapshot(model, changing, last)
    after = {name: tensor.data_ptr() for name, tensor in (copied.weights | copied.tensors).items()}
    assert {name for name in after if after[name] != before[name]} == {"moved"}
    assert (copied.tensors["a"].tolist(), copied.tensors["moved"].tolist()) == ([2.0] * 3, [5.0] * 4)
    assert all(torch.equal(copied.weights[name], tensor) for name, tensor in ModelSnapshot(model, {}).weights.items())


@pytest.mark.parametrize("where", ["weights", "training"])
def test_what_is_not_finite_is_refused_and_nothing_is_pruned(
    where: str, saved: Save, tmp_path: Path, model: PreTrainedModel, tokenizer: dict[str, bytes]
) -> None:
    saved(1)
    copied = ModelSnapshot(model, {"a": torch.ones(3)})
    next(iter((copied.weights if where == "weights" else copied.tensors).values()))[0] = torch.nan
    with pytest.raises(RuntimeError, match=r"after step 2 .* is not finite: not saved"):
        write(tmp_path, 2, copied, {}, tokenizer, keep_last=1)
    assert steps(tmp_path) == ["step_000001"]


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
    assert read_checkpoint(path).state["run"] == "second"
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
        half_model: Any = lambda _, folder, __: self.half_written(folder / "model.safetensors")  # noqa: E731
        patch.setattr(checkpoint, "save_weights", self.during(checkpoint.save_weights, half_model))

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
        found = find_newest(tmp_path, print)
        assert found is not None and found.state["run"] in ("before", "after")
        for path in (tmp_path / "checkpoints").glob("step_*"):
            if ".replaced" not in path.name:
                read_checkpoint(path)  # half a checkpoint is never seen
        saved(4, keep_last=1, run="resumed")
        assert steps(tmp_path) == ["step_000004"]  # what the kill left is cleared away
    assert deaths > 10
    assert steps(tmp_path) == [f"step_{step:06d}"]


@pytest.mark.parametrize("part", ["save_weights", "save_file", "sha256_of", "digest_of", "put_whole"])
def test_an_error_while_saving_leaves_nothing_behind(saved: Save, tmp_path: Path, part: str) -> None:
    saved(1)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(checkpoint, part, full)
        saved(2, keep_last=1)
    assert steps(tmp_path) == ["step_000001"]


def test_what_a_kill_left_makes_room_for_the_next(
    saved: Save, tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(1)
    left = tmp_path / "checkpoints" / ".step_000002.partial"
    left.mkdir()
    asked: list[tuple[bool, int]] = []
    monkeypatch.setattr(checkpoint, "check_disk", lambda folder, needed: asked.append((left.exists(), needed)))
    saved(2, training={})
    distinct = {weight.data_ptr(): weight.nbytes for weight in model.state_dict().values()}
    assert asked == [(False, sum(distinct.values()))]


def test_every_kind_of_damage_is_found_and_named(saved: Save, tmp_path: Path) -> None:
    whole = saved(1)
    files = sorted(path.name for path in whole.iterdir())
    assert {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"} <= set(files)
    for name in files:
        for damage in (_remove, _truncate, _flip_a_bit):
            copy = tmp_path / "copy"
            shutil.copytree(whole, copy)
            damage(copy / name)
            with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
                read_checkpoint(copy)
            shutil.rmtree(copy)


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 10))])
def test_five_hundred_damaged_checkpoints_are_all_refused_by_name(saved: Save, tmp_path: Path, part: int) -> None:
    """Cut, flipped and lost files, 50 in each part: as a model, to go on from, and to be measured."""
    whole, draw = saved(1), random.Random(part)
    made = preset("calculator_from_scratch")
    sizes = {path.name: path.stat().st_size for path in sorted(whole.iterdir())}
    for number in range(50):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy, copy_function=os.link)
        name = draw.choice(list(sizes))
        content = bytearray((copy / name).read_bytes())
        (copy / name).unlink()
        where = draw.randrange(sizes[name])
        if number % 3:
            content[where] ^= 1 << draw.randrange(8)
        if number % 5 or name == "state.json":  # else it is lost
            (copy / name).write_bytes(content if number % 3 else content[:where])
        as_model = dataclasses.replace(made, model=dataclasses.replace(made.model, name=str(copy)))
        with pytest.raises(ConfigError, match=re.escape(name)):
            check(as_model if number % 2 else dataclasses.replace(made, resume=str(copy)))
        shutil.rmtree(copy)


def test_a_missing_weight_is_not_drawn_at_random(tmp_path: Path, model: PreTrainedModel) -> None:
    save_model(model, load_tokenizer("tiny"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").unlink()
    assert lost.numel()
    with pytest.raises(ConfigError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelSettings(str(tmp_path)), seed=0)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelSettings(str(tmp_path)), seed=0)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        read_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["[]", "{}", '{"sha256": 1, "files": 3}', "\xff", "[" * 100_000])
def test_a_strange_state_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json"):
        read_checkpoint(tmp_path)


def forge(path: Path, **changes: Any) -> None:
    """Change what `state.json` says, with the right checksum; None = left out."""
    content = json.loads((path / "state.json").read_text())
    del content["sha256"]
    content = {name: value for name, value in {**content, **changes}.items() if value is not None}
    (path / "state.json").write_text(json.dumps({"sha256": digest_of(content), **content}))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"config.json": 5}},
        {"files": {"config.json": {"bytes": 5}}},
        {"files": []},
        {"step": None},
        {"step": "many"},
        {"state": None},
        {"state": 5},
        {"training": None},
    ],
)
def test_a_hostile_state_file_is_one_line(changes: dict[str, Any], saved: Save) -> None:
    path = saved(1)
    forge(path, **changes)
    with pytest.raises(ConfigError, match=r"state\.json.*it cannot be read"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "sub/x", "..", ""])
def test_a_checkpoint_names_no_file_outside_its_folder(name: str, saved: Save, tmp_path: Path) -> None:
    path = saved(1)
    (tmp_path / "x").write_bytes(b"x")
    (path / "sub").mkdir()
    (path / "sub" / "x").write_bytes(b"x")
    forge(path, files={name: {"bytes": 1, "sha256": sha256_of(tmp_path / "x")}})
    with pytest.raises(ConfigError, match=r"not in its folder|is missing"):
        read_checkpoint(path)


def test_what_cannot_be_read_now_is_left_where_it_is(
    saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's disk may come back: the run must not go on from the checkpoint before."""
    saved(1)
    path = saved(2)

    def broken(_: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("mtgrpo.weights.saved.sha256_of", broken)
    with pytest.raises(ConfigError, match=r"cannot be read now: .*step_000002.*: Stale file handle; try again"):
        find_newest(tmp_path, print)
    assert path.is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_never_begins_anew(saved: Save, tmp_path: Path) -> None:
    (saved(1) / "state.json").write_text("{")
    for _ in range(2):  # also once it is put aside
        with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
            find_newest(tmp_path, print)


def test_a_link_in_the_place_of_a_checkpoint_is_removed_alone(saved: Save, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    saved(1).rename(elsewhere)
    (tmp_path / "checkpoints/step_000001").symlink_to(elsewhere)
    (tmp_path / "checkpoints/.step_notes").touch()
    saved(2)
    saved(3, keep_last=2)
    assert steps(tmp_path) == ["step_000002", "step_000003"]
    assert (elsewhere / "state.json").is_file()


@pytest.mark.parametrize("setting", ["every_steps", "keep_last", "keep_best"])
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


def test_a_tensor_that_is_there_twice_is_saved_once(saved: Save) -> None:
    shared, same_shape = torch.arange(4.0), torch.arange(4.0)
    path = saved(1, training={0: {"qmap": shared}, 1: {"qmap": shared[:], "own": same_shape}})
    tensors, _ = flatten([shared, shared, torch.empty(0), torch.empty(0)])
    assert list(tensors) == ["0", "2", "3"]
    found = read_training(path)
    assert found[0]["qmap"] is found[1]["qmap"] and torch.equal(found[1]["qmap"], shared)
    assert torch.equal(found[1]["own"], same_shape)


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
