"""Sinks of experiment trackers: what a run logs is read back with each tracker's own reader."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.config.compose import compose, parse
from mtgrpo.errors import ConfigError
from mtgrpo.log import Sink, chosen, open_sinks
from mtgrpo.parts import RunContext

SETTINGS = {"seed": "7", "algorithm.clip_high": "0.28", "model.name": "tiny"}
LEARNING = "reinforcement learning"


def log_run(options: Any, folder: Path, notes: list[str], first: int = 1, last: int = 3) -> None:
    """A run of a few steps, with a warm start where it begins at the first."""

    async def run() -> None:
        folder.mkdir(exist_ok=True)
        async with open_sinks(options, RunContext(folder, notes.append, os.environ, SETTINGS, first - 1)) as sinks:
            if first == 1:
                sinks.stage("warm start", 2)
                for step in (1, 2):
                    sinks.log({"sft/loss": 1 / step}, step)
                sinks.stage("evaluation", 1)
                sinks.log({"eval/success": 0.25, "eval/pass@8": 0.5}, 1)
            sinks.stage(LEARNING, 3)
            for step in range(first, last + 1):
                sinks.log({"reward/mean": step / 4, "policy/kl": float("nan")}, step)
            sinks.stage("evaluation", 1)
            sinks.log({"eval/success": 0.75, "eval/pass@8": 1.0}, 1)

    asyncio.run(run())


CURVES = {
    "sft/loss": [(1, 1.0), (2, 0.5)],
    "eval/success": [(0, 0.25), (3, 0.75)],
    "reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75)],
}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    log_run(["tensorboard"], tmp_path / "run", [])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert {name: found[name] for name in CURVES} == CURVES
    assert "policy/kl" not in found
    text = events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| algorithm.clip_high | 0.28 |" in text


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of sqlalchemy, in mlflow
def test_mlflow_reads_what_was_written_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    options = {"mlflow": {"tracking_uri": uri, "project": "mine", "name": "first"}}
    log_run(options, tmp_path / "run", [], last=2)
    log_run(options, tmp_path / "run", [], first=3)
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == ("first", "FINISHED", SETTINGS)
    found = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in CURVES}
    assert found == CURVES | {"eval/success": [(0, 0.25), (2, 0.75), (3, 0.75)]}
    assert run.data.metrics["eval/pass_at_8"] == 1.0


@pytest.fixture
def trackio_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Trackio has stored, below the folder of the test."""
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio.sqlite_storage as stored  # noqa: PLC0415
    import trackio.utils  # noqa: PLC0415

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(stored, "TRACKIO_DIR", tmp_path / "trackio")
    return stored.SQLiteStorage


def test_trackio_reads_what_was_written(tmp_path: Path, trackio_s: Any) -> None:
    log_run(["trackio"], tmp_path / "run", [])
    name = "/".join((tmp_path / "run").parts[-2:])
    rows = trackio_s.get_logs("mtgrpo", name)
    for metric, curve in CURVES.items():
        assert [(row["step"], row[metric]) for row in rows if metric in row] == curve


def test_runs_of_one_name_are_several_in_trackio_and_a_resumed_one_is_the_same(tmp_path: Path, trackio_s: Any) -> None:
    folders = [tmp_path / place / "runs" / "a" for place in ("mine", "other")]
    for folder in folders:
        folder.parent.mkdir(parents=True)
        log_run(["trackio"], folder, [], last=2)
    log_run(["trackio"], folders[0], [], first=3)
    records = trackio_s.get_run_records("mtgrpo")
    assert [record["name"] for record in records] == ["runs/a"] * 2
    rows = [trackio_s.get_logs("mtgrpo", run_id=(folder / "trackio.id").read_text()) for folder in folders]
    assert [[row["step"] for row in found if "reward/mean" in row] for found in rows] == [[1, 2, 3], [1, 2]]


def records(path: Path) -> Iterator[bytes]:
    """The records of an offline run's file: a header of seven bytes, then a log of LevelDB's format."""
    content, at, parts = path.read_bytes(), 7, b""
    while at < len(content):
        if 32_768 - at % 32_768 < 7:  # a block's end holds no header
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_writes_offline_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    folder = tmp_path / "run"
    options = {"wandb": {"mode": "offline", "project": "mine"}}
    log_run(options, folder, [], last=2)
    time.sleep(1.1)  # the folder of a session is named after its second
    log_run(options, folder, [], first=3)
    runs: list[Any] = []
    rows: list[dict[str, str]] = []

    def read(path: Path) -> list[Any]:
        return [wandb_internal_pb2.Record.FromString(data) for data in records(path)]

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for _ in range(200):  # a process of its own writes, and may be behind
            if any(record.HasField("exit") for record in read(path)):
                break
            time.sleep(0.05)
        for record in read(path):
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
    assert {(run.run_id, run.project) for run in runs} == {((folder / "wandb.id").read_text(), "mine")}
    assert {item.key: item.value_json for item in runs[0].config.update}["model.name"] == '"tiny"'
    found = [(row["train/step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert found == [("1", "0.25"), ("2", "0.5"), ("3", "0.75")]
    assert [(row["sft/step"], row["sft/loss"]) for row in rows if "sft/loss" in row] == [("1", "1"), ("2", "0.5")]


@dataclass
class Failing(Sink):
    """Fails at the second step of training, and again where it is closed."""

    at: int = 2

    def stage(self, name: str, total: int) -> None:
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "reward/mean" in metrics and step >= self.at:
            raise ConnectionError("the tracker is gone")

    def note(self, text: str) -> None:
        pass


def test_a_sink_that_fails_is_noted_once_and_the_others_go_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    log_run([f"{__file__}:Failing", "jsonl", "tensorboard"], tmp_path / "run", [])
    lines = (tmp_path / "run" / "notes.txt").read_text().splitlines()
    (said,) = lines
    assert said.startswith("the sink Failing failed and gets nothing more: ConnectionError: the tracker is gone (")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 7
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("reward/mean")] == [0.25, 0.5, 0.75]


@dataclass
class Vandal(Sink):
    """Empties a file at the second step of training."""

    path: str = ""

    def stage(self, name: str, total: int) -> None:
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "reward/mean" in metrics and step == 2:
            Path(self.path).write_bytes(b"")

    def note(self, text: str) -> None:
        pass


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of sqlalchemy, in mlflow
def test_two_trackers_at_once_of_which_one_loses_its_database(tmp_path: Path) -> None:
    pytest.importorskip("mlflow"), pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    mlflow = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    options = {
        f"{__file__}:Vandal": {"path": f"{tmp_path}/mlflow.db"},
        "mlflow": mlflow,
        "tensorboard": {},
        "jsonl": {},
    }
    log_run(options, tmp_path / "run", [])
    (said,) = (tmp_path / "run" / "notes.txt").read_text().splitlines()[:1]
    assert said.startswith("the sink MLflow failed and gets nothing more: ")
    assert (tmp_path / "run" / "notes.txt").read_text().count("gets nothing more") == 1
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("reward/mean")] == [0.25, 0.5, 0.75]


def test_the_evaluation_of_a_run_that_had_only_it_left_stands_at_its_last_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    log_run(["tensorboard"], tmp_path / "run", [], first=4)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/success")] == [(3, 0.75)]


def test_settings_of_sinks_come_from_the_command_line() -> None:
    words = ["log=[jsonl,trackio]", "log.trackio.project=mine"]
    jsonl, trackio = chosen(compose(parse(words)).experiment.log)
    assert (type(jsonl).__name__, type(trackio).__name__, vars(trackio)["project"]) == ("Jsonl", "Trackio", "mine")
    added = compose(parse(["log.tensorboard.name=first"])).experiment.log
    assert [type(sink).__name__ for sink in chosen(added)] == ["Console", "Jsonl", "TensorBoard"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["wandbb"], "there is no log named 'wandbb'"),
        ({"tensorboard": {"projct": "a"}}, "the sink tensorboard has no setting 'projct'; its settings: project, name"),
        ("wandb", "log must be a list of names"),
        ({"mlflow": {"tracking_uri": "nonsense://x"}}, "log=mlflow cannot begin: .*nonsense"),
        ({"wandb": {"mode": "ofline"}}, "log=wandb cannot begin: .*ofline"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(options: Any, said: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb"), pytest.importorskip("mlflow")
    with pytest.raises(ConfigError, match=said):
        log_run(options, tmp_path / "run", [])
