"""The record of tokens: what it says of each is what was trained, and what a page of it shows was sent and sampled."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import zipfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo import preset
from mtgrpo.advantages import advantages
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.algorithms.correction import Reject
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.engines import Key
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.model.value import add_value_head
from mtgrpo.policy.step import at_once
from mtgrpo.policy.updater import PolicyUpdater, UpdateConfig
from mtgrpo.record import tokens
from mtgrpo.record.curve import Curve
from mtgrpo.record.settings import TokenSettings
from mtgrpo.record.tokens import FLAGS, TokenRecord, TokenRecorder, lay_out, read_tokens, recorded_steps, write_arrays
from mtgrpo.record.writing import trajectory_row
from mtgrpo.stages.trainer import train
from mtgrpo.types import Completion, Group, Sampling, Trajectory
from mtgrpo.viewer.tokens import forest
from test_agents import group_of, python, scripted
from test_policy import MODEL, REFERENCE, TEMPERATURE, Watched
from test_train import ENDING
from test_updater import CASES, CORRECTION, IDS, TRAJECTORIES, update_config

GROUPS = [Group(TRAJECTORIES[0].task, TRAJECTORIES[:2]), Group(TRAJECTORIES[0].task, TRAJECTORIES[2:])]


def updater_of(learning: UpdateConfig, lr: float = 5e-4) -> PolicyUpdater:
    model = copy.deepcopy(MODEL)
    if learning.algorithm.has_critic:
        add_value_head(model, torch.float64, Path("nowhere"))
    policy = Watched(model, lr=lr)
    return PolicyUpdater(policy, replace(learning, records=True), REFERENCE if learning.kl.coef else None)


def recorded(
    folder: Path, learning: UpdateConfig, groups: Sequence[Group] = GROUPS, most: int = 0
) -> tuple[TokenRecord, Batch, PolicyUpdater]:
    """The record of an update on `groups`, written and read back."""
    updater, trained = updater_of(learning), [t for group in groups for t in group.trajectories]
    batch = build_batch(trained)
    rewards = rewards_of(groups, learning.algorithm, batch.trajectory, batch.turn)
    at_once(updater.training(batch, rewards, version=3, seed=0))
    TokenRecorder(TokenSettings(groups=most), folder, pytest.fail).write(1, groups, trained, batch, updater.record)
    record = read_tokens(folder, 1)
    assert record is not None
    return record, batch, updater


def plain(model: PreTrainedModel, row: Sequence[int], count: int, temperature: float) -> Tensor:
    """Log-probabilities of the last `count` tokens of a row, by the model's own forward pass over it alone."""
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0].double() / temperature
    return logits.log_softmax(-1)[torch.arange(len(row) - 1), torch.tensor(row[1:])][-count:]


def rows_of(record: TokenRecord) -> list[tuple[list[int], range]]:
    """Of each turn the context with its output, and its entries."""
    token, first = record.arrays["forest_token"], record.first.tolist()
    return [(token[record.path(turn)].tolist(), range(first[turn], first[turn + 1])) for turn in range(len(first) - 1)]


def said(record: TokenRecord, name: str) -> np.ndarray:
    """A log-probability of each entry, put together again."""
    return record.arrays[name].astype(np.float64) + record.arrays["behaviour"]


def assert_close(found: np.ndarray, expected: Tensor, behaviour: np.ndarray) -> None:
    """As close as half precision of the difference to the sampling policy, and its own single precision, allow."""
    bound = 1e-7 + np.abs(expected.numpy() - behaviour) * 2**-11 + np.abs(behaviour) * 2**-24
    assert (np.abs(found - expected.numpy()) <= bound).all()


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_ratio_and_advantage_of_every_token_are_those_computed_anew(case: int, tmp_path: Path) -> None:
    learning = update_config(*CASES[case])
    record, batch, updater = recorded(tmp_path, learning)
    behaviour = record.arrays["behaviour"]
    assert np.array_equal(behaviour, batch.behaviour_logp.float().numpy())
    with_reference = copy.deepcopy(MODEL)
    with_reference.load_state_dict(REFERENCE.weights, strict=False)
    for name, model in (("before", MODEL), ("reference", with_reference)):
        logp = torch.cat([plain(model, row, len(places), TEMPERATURE) for row, places in rows_of(record)])
        known = ~np.isnan(said(record, name))
        assert known.any()
        assert_close(said(record, name)[known], logp[known], behaviour[known])
    assert not np.array_equal(record.arrays["last"], record.arrays["before"])  # three updates have moved the policy

    rewards = rewards_of(GROUPS, learning.algorithm, batch.trajectory, batch.turn)
    value = updater.record["value"].nan_to_num(0.0) if learning.algorithm.has_critic else None
    anew = advantages(learning.advantage, learning.algorithm, rewards, value)
    assert np.allclose(record.arrays["advantage"], anew.advantage.numpy(), rtol=1e-6, atol=1e-7)
    assert ("value" in record.arrays) is learning.algorithm.has_critic
    clipped = record.arrays["flags"] & 1 << FLAGS.index("clipped") > 0
    assert clipped.sum() == updater.record["clipped"].nansum()


def test_the_weights_add_up_to_the_loss(tmp_path: Path) -> None:
    """At ratio 1 it is minus the sum of weight times advantage: what each token was paid is all there is."""
    record, _, updater = recorded(tmp_path, UpdateConfig(GRPO(), CASES[0][1], length=7))
    paid = float((record.arrays["weight"].astype(float) * record.arrays["advantage"]).sum())
    assert updater.policy.metrics[0]["loss"] == pytest.approx(-paid, rel=1e-5)  # type: ignore[attr-defined]


def test_rejected_and_untrained_tokens_are_marked(tmp_path: Path) -> None:
    rejecting = replace(CORRECTION, reject=Reject.token, low=0.97, high=1.03)
    groups = [GROUPS[0], Group(GROUPS[1].task, [replace(t, reward=1.0, turn_rewards=[]) for t in TRAJECTORIES[2:]])]
    learning = UpdateConfig(GRPO(), CASES[0][1], correction=rejecting, length=7)
    record, batch, _ = recorded(tmp_path, learning, groups)
    marks = {name: record.arrays["flags"] & 1 << bit > 0 for bit, name in enumerate(FLAGS)}
    equal = (batch.trajectory >= 2).numpy()
    assert np.array_equal(marks["no advantage"], equal) and np.array_equal(marks["not trained"], equal)
    ratio = np.exp(record.arrays["before"].astype(float))
    assert marks["rejected"].any()
    assert np.array_equal(marks["rejected"], ~equal & ((ratio < 0.97) | (ratio > 1.03)))
    assert not record.arrays["weight"][marks["rejected"] | equal].any()


def test_the_groups_that_are_kept_differ_most_and_name_their_conversations(tmp_path: Path) -> None:
    task, rewards = TRAJECTORIES[0].task, [1.0, 1.0, 0.0, 5.0]
    changed = [replace(t, reward=reward, turn_rewards=[]) for t, reward in zip(TRAJECTORIES, rewards, strict=True)]
    failed = Trajectory(task)
    groups = [Group(task, [failed, *changed[:2]]), Group(task, changed[2:])]
    batch, trained = build_batch(changed), changed
    arrays = lay_out(groups, trained, batch, {}, most=1)
    assert arrays["line"].tolist() == [3, 4]  # of five conversations in the file
    assert arrays["whole"].tolist() == [round(batch.shared * len(batch.forest)), len(batch.forest)]
    write_arrays(tmp_path / "x.npz", arrays)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "x.npz").rename(tmp_path / "tokens" / "step_000004.npz")
    record = read_tokens(tmp_path, 4)
    assert record is not None and record.turns(1) is None
    for number, trajectory in enumerate(trained[2:]):
        turns = record.turns(3 + number)
        assert turns is not None and len(turns) == len(trajectory.turns)
        for turn, expected in zip(turns, range(len(trajectory.turns)), strict=True):
            row = arrays["forest_token"][record.path(turn)].tolist()
            assert row == trajectory.context(expected) + trajectory.turns[expected].output


def test_an_agents_conversations_are_recorded_too(tmp_path: Path) -> None:
    group = group_of(scripted(), tmp_path, python("with_openai"), size=3)
    arrays = lay_out([group], group.trajectories, build_batch(group.trajectories), {}, most=0)
    assert len(arrays["node"]) == sum(t.sampled_tokens for t in group.trajectories) > 0
    turns = [turn for trajectory in group.trajectories for turn in trajectory_row(trajectory, 0.0)["turns"]]
    assert turns and all(turn["ended_s"] > turn["asked_s"] > 0 for turn in turns)


# ---------------------------------------------------------------- whole runs

WORDS = ["model.dtype=float64", "sft.steps=2", "sft.batch_size=4", "trainer.steps=2", "rollout.prompts_per_step=2"]
WORDS += ["rollout.group_size=3", "sampling.max_new_tokens=12", "eval.tasks=2", "eval.samples=1", "log=[jsonl]"]
WORDS += ["checkpoint.every_steps=1", "optimizer.lr=1e-3", "reward=length", "reward.budget_tokens=0"]
WORDS += [ENDING]


def ran(folder: Path, *words: str) -> None:
    asyncio.run(train(preset("calculator_from_scratch", *WORDS, *words), folder, Curve()))


def test_what_a_run_records_is_what_its_checkpoints_say_and_its_engine_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[list[int], list[int]]] = []
    real = LocalEngine.conversation

    @asynccontextmanager
    async def conversation(engine: LocalEngine, key: Key) -> AsyncGenerator[Any]:
        async with real(engine, key) as sample:

            async def spied(given: Sequence[int], sampling: Sampling) -> Completion:
                completion = await sample(given, sampling)
                if key.scope.startswith("train/2/"):
                    sent.append((list(given), completion.tokens))
                return completion

            yield spied

    monkeypatch.setattr(LocalEngine, "conversation", conversation)
    ran(tmp_path, "record.tokens.after=true")
    assert recorded_steps(tmp_path) == [1, 2]
    record = read_tokens(tmp_path, 2)
    assert record is not None
    shown = [(row[: len(row) - len(places)], row[len(row) - len(places) :]) for row, places in rows_of(record)]
    assert sorted(shown) == sorted(sent) and len(sent) >= 6

    behaviour = record.arrays["behaviour"]
    trained = record.arrays["flags"] & 1 << FLAGS.index("not trained") == 0
    assert trained.any()
    for name, step in (("before", 1), ("after", 2)):
        model = load_model(ModelSettings(f"{tmp_path}/checkpoints/step_{step:06d}", DType.float64), 0)
        logp = torch.cat([plain(model, row, len(places), 1.0) for row, places in rows_of(record)])
        assert_close(said(record, name)[trained], logp[trained], behaviour[trained])
    rows = [json.loads(line) for line in (tmp_path / "trajectories" / "step_000002.jsonl").read_text().splitlines()]
    assert [row["group"] for row in rows] == [0] * 3 + [1] * 3


def test_a_recorder_that_fails_ends_no_run_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, arrays: Mapping[str, Any]) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tokens, "write_arrays", full)
    ran(tmp_path)
    notes = (tmp_path / "notes.txt").read_text()
    assert notes.count("the record of tokens failed and goes on no more: OSError: no space left") == 1
    assert recorded_steps(tmp_path) == []


# ---------------------------------------------------------------- what is kept, and hostile files


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (TokenSettings(last=2, every=3), [3, 6, 7, 8]),
        (TokenSettings(last=0, every=4), [4, 8]),
        (TokenSettings(last=1, every=0), [8]),
        (TokenSettings(last=0, every=0), []),
    ],
)
def test_the_newest_steps_stay_and_each_nth(settings: TokenSettings, steps: list[int], tmp_path: Path) -> None:
    recorder, batch = TokenRecorder(settings, tmp_path, pytest.fail), build_batch(TRAJECTORIES)
    for step in range(1, 9):
        recorder.write(step, GROUPS, TRAJECTORIES, batch, {})
    assert recorded_steps(tmp_path) == steps


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="`groups=3` has no effect: set `last` or `every` above 0"):
        TokenSettings(last=0, every=0, groups=3)


def changed(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({name: np.asarray(change(arrays[name]))})


@pytest.mark.parametrize(
    "spoil",
    [
        changed("node", lambda node: node + 10**6),
        changed("node", lambda node: node[1:]),
        changed("node", lambda node: node.astype(object)),
        changed("forest_subtree_end", lambda end: end * 0),
        changed("turn_tokens", lambda counts: -counts),
        changed("turn_trajectory", lambda trajectory: trajectory[::-1]),
        changed("turn_trajectory", lambda trajectory: np.r_[trajectory[-2::-1], trajectory[-1:]].astype(np.uint32)),
        changed("behaviour", lambda logp: logp.astype(str)),
        changed("flags", lambda flags: flags.astype(np.float32)),
        changed("version", lambda version: version.astype(np.float32)),
        changed("whole", lambda whole: whole * np.nan),
        changed("forest_token", lambda token: token.astype(np.int64) - 2**31),
        changed("forest_token", lambda token: token.astype(np.int64) + 2**32),
        changed("forest_token", lambda token: token + np.uint64(2**63)),
        changed("node", lambda node: node * 0),  # fewer tokens than were sampled
        lambda arrays: arrays.pop("flags"),
        lambda arrays: arrays.pop("turn_tokens"),
        lambda arrays: arrays.update(more=np.zeros(3)),
    ],
)
def test_a_file_that_is_no_record_is_refused(spoil: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    arrays = lay_out(GROUPS, TRAJECTORIES, build_batch(TRAJECTORIES), {}, most=0)
    spoil(arrays)
    (tmp_path / "tokens").mkdir()
    np.savez(tmp_path / "tokens" / "step_000001.npz", **arrays)
    with pytest.raises(ConfigError, match="is no record of tokens"):
        read_tokens(tmp_path, 1)


def test_whole_numbers_may_have_any_type(tmp_path: Path) -> None:
    arrays = lay_out(GROUPS, TRAJECTORIES, build_batch(TRAJECTORIES), {}, most=0)
    wide = {name: array if array.dtype.kind == "f" else array.astype(np.int64) for name, array in arrays.items()}
    wide |= {name: wide[name].astype(np.uint64) for name in ("turn_tokens", "turn_trajectory", "node", "flags")}
    (tmp_path / "tokens").mkdir()
    for step, content in enumerate((arrays, wide), 1):
        np.savez(tmp_path / "tokens" / f"step_{step:06d}.npz", **content)
    shown = [forest(tmp_path, step) for step in (1, 2)]
    assert shown[0] is not None and shown[0] == shown[1]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x93NUMPY" + bytes(200)])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "step_000001.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="is no record of tokens"):
        read_tokens(tmp_path, 1)


def test_a_file_with_damaged_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    path = tmp_path / "tokens" / "step_000001.npz"
    np.savez_compressed(path, **lay_out(GROUPS, TRAJECTORIES, build_batch(TRAJECTORIES), {}, most=0))
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(byte ^ 255 for byte in whole[100:300]) + whole[300:])
    with pytest.raises(ConfigError, match="is no record of tokens"):
        read_tokens(tmp_path, 1)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("node.npy", bytes(1000))
    path.write_bytes(path.read_bytes().replace(b"\x5d\x00\x00\x80\x00", b"\xff" * 5))
    with pytest.raises(ConfigError, match="is no record of tokens"):
        read_tokens(tmp_path, 1)


def test_a_file_that_unpacks_to_more_than_a_machine_holds_is_refused(tmp_path: Path) -> None:
    claimed = io.BytesIO()
    np.lib.format.write_array_header_1_0(claimed, {"descr": "<f4", "fortran_order": False, "shape": (2**50,)})
    (tmp_path / "tokens").mkdir()
    path = tmp_path / "tokens" / "step_000001.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("node.npy", claimed.getvalue())
    with pytest.raises(ConfigError, match="is no record of tokens"):
        read_tokens(tmp_path, 1)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("node.npy", "w") as file:
        for _ in range(65):
            file.write(bytes(1 << 24))
    with pytest.raises(ConfigError, match="unpacks to 1,090,519,040 bytes"):
        read_tokens(tmp_path, 1)


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_SPARE", 2**60)
    notes: list[str] = []
    recorder = TokenRecorder(TokenSettings(), tmp_path, notes.append)
    for step in (1, 2):
        recorder.write(step, GROUPS, TRAJECTORIES, build_batch(TRAJECTORIES), {})
    (note,) = notes
    assert "GiB for tokens and its disk has" in note and recorded_steps(tmp_path) == []
