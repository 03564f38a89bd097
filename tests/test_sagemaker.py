"""Training jobs of SageMaker: what is refused, the request, and what becomes of it in an AWS that moto pretends."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from moto.server import ThreadedMotoServer

from conftest import Run
from mtgrpo.config.compose import compose, parse, preset
from mtgrpo.engines.server import VLLM_VERSION
from mtgrpo.errors import ConfigError
from mtgrpo.launch import bundle, sagemaker, sagemaker_entry, sagemaker_jobs
from mtgrpo.launch.sizing import Machine, fit, machine

ROOT = Path(__file__).parents[1]
ROLE = "role=arn:aws:iam::123456789012:role/Training"
WHERE = ["launch", "sagemaker", "recipe=calculator", "instance=ml.m5.xlarge", ROLE, "bucket=my-bucket", "name=job-1"]
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAKEYTHATISSECRET", "AWS_SECRET_ACCESS_KEY": "the+secret+access+key"}
TOKEN = "hf_tokenofsomebody"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An AWS of this test alone, with a bucket; its address."""
    server = ThreadedMotoServer(port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        **SECRETS,
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3: Any = boto3.client("s3")
    s3.create_bucket(Bucket="my-bucket")
    yield f"http://{host}:{port}"
    server.stop()
    import moto.backends  # noqa: PLC0415  what a test left is not the next one's

    for service in ("s3", "sagemaker", "logs"):
        moto.backends.get_backend(service).reset()


def keys() -> list[str]:
    s3: Any = boto3.client("s3")
    return [entry["Key"] for entry in s3.list_objects_v2(Bucket="my-bucket").get("Contents", ())]


def test_a_dry_run_prints_the_request_without_boto3_and_credentials(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("boto3", "botocore"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOKEN", TOKEN)
    words = ["count=2", "--spot", "--dry-run", "env=[TOKEN]", "input.train=s3://other/folder", "seed=3"]
    code, out, err = run(*WHERE, *words)
    assert code == 0, err
    assert TOKEN not in out + err
    request = json.loads(out)
    assert request["TrainingJobName"] == "job-1" and request["RoleArn"] == ROLE.removeprefix("role=")
    assert request["ResourceConfig"] == {"InstanceType": "ml.m5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 200}
    assert json.loads(request["HyperParameters"]["words"]) == ["recipe=calculator", "seed=3"]
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 172800}
    assert request["EnableManagedSpotTraining"] and request["Environment"] == {"TOKEN": "***"}
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["code", "train"]
    assert "2 processes train" in err and "about $0.46 an hour" in err
    assert "'ml.m5.xlarge for spot training job usage' must be 2 or more" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("role=Training", "role=Training: a role is named as arn:aws:iam::"),
        ("role=arn:aws:iam::12:role/Training", "a role is named as"),
        ("role=", "role is not given"),
        ("bucket=s3://my-bucket", "the name of a bucket alone"),
        ("bucket=", "bucket is not given"),
        ("instance=ml.m5.xlarg", "did you mean ml.m5.xlarge"),
        ("instance=", "instance is not given"),
        ("count=0", "count=0: give a number of machines"),
        ("count=many", "count=many: give a number of machines"),
        ("name=a_job", "name=a_job: letters, digits and single hyphens"),
        ("run=s3://other", "run=s3://other: letters, digits and single hyphens"),
        ("hours=soon", "hours=soon: a number above 0"),
        ("env=[NOWHERE_SET]", "env: NOWHERE_SET is not set here"),
        ("input.code=s3://a/b", "under another name than code"),
        ("input.train=/data", "input.train=/data: s3://BUCKET/FOLDER"),
        ("resume=true", "the job has its run in /opt/ml/checkpoints/run"),
        ("hydra.run.dir=runs", "the job has its run in /opt/ml/checkpoints/run"),
        ("files=[gone.py]", "files: there is no file gone.py; nothing was uploaded"),
        ("task=jsonl task.path=gone.jsonl", "task.path: there is no file gone.jsonl; nothing was uploaded"),
        ("task=jsonl task.path=/etc/passwd", "task.path: /etc/passwd lies outside of the folder in which you type"),
        ("reward=gone.py:Mine", "gone.py"),
        ("recipe=gone.yaml", "gone.yaml"),
        ("task.system_prompt=file:gone.txt", "gone.txt"),
        ("optimizer.lr=-1", "optimizer.lr must be > 0"),
        (
            "batch.token_budget=4000000",
            "instance=ml.m5.xlarge count=1: model.name=tiny-calculator with batch.token_budget",
        ),
        (f"task.system_prompt={'x' * 2500}", "characters of words: SageMaker takes 2500; put them into a recipe"),
    ],
)
def test_a_wrong_job_is_refused_in_a_line_before_any_upload(
    words: str, said: str, run: Run, aws: str, place: Path
) -> None:
    kept = [word for word in WHERE if word.partition("=")[0] not in {w.partition("=")[0] for w in words.split()}]
    code, out, err = run(*kept, *words.split())
    assert (code, out) == (2, ""), (out, err)
    assert said in err and err.count("\n") == 1
    assert keys() == []


def test_too_little_memory_is_told_with_a_cure() -> None:
    experiment = preset("calculator", "batch.token_budget=4000000")
    with pytest.raises(
        ConfigError, match=r"instance=ml.m5.large count=1: .*needs [\d.]+ GB at its peak .*set batch.token_budget"
    ):
        fit(experiment, machine("ml.m5.large"), "1")


@pytest.mark.parametrize(
    ("kind", "count", "words", "hosts", "processes", "added"),
    [
        ("ml.m5.xlarge", "2", "", 2, 1, []),
        ("ml.g5.xlarge", "1", "", 1, 1, []),
        ("ml.g5.12xlarge", "1", "", 1, 1, ["devices.train.num=4"]),
        ("ml.g5.12xlarge", "auto", "", 1, 1, ["devices.train.num=4"]),
        ("ml.g5.12xlarge", "1", "devices.train.num=2", 1, 1, []),
        ("ml.g5.12xlarge", "2", "", 2, 4, []),
        ("ml.g5.12xlarge", "2", "devices.train.num=4", 2, 2, []),
        ("ml.g5.12xlarge", "2", "devices.rollout.num=1 engine=server engine.memory_fraction=0.5", 2, 3, []),
        (
            "ml.g5.12xlarge",
            "1",
            "rollout.max_staleness=1 engine=server engine.memory_fraction=0.5",
            1,
            1,
            ["devices.train.num=2"],
        ),
    ],
)
def test_ranks_are_placed_on_the_machines(
    kind: str, count: str, words: str, hosts: int, processes: int, added: list[str]
) -> None:
    fleet = fit(preset("calculator", *words.split()), machine(kind), count)
    assert (fleet.hosts, fleet.processes, fleet.words) == (hosts, processes, added)


@pytest.mark.real
def test_auto_takes_the_fewest_machines_that_hold_the_run(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 65536, "max_position_embeddings": 4096}
    about = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(about | sizes))
    few = ["batch.token_budget=1024", "engine.memory_fraction=0.05", "model.checkpointing=true", "model.dtype=float32"]
    experiment = preset("gsm8k", f"model.name={tmp_path}", *few)
    with pytest.raises(ConfigError, match=r"instance=small count=2: .* of 11.0 GB 10.1 can be used"):
        fit(experiment, Machine("small", 1, "x", 11.0, 64, 1.0, ""), "2")
    fleet = fit(experiment, Machine("small", 1, "x", 11.0, 64, 1.0, ""), "auto")
    assert fleet.hosts == 8 and "parallel=fsdp2 parallel.reshard=true; 8 on all machines" in fleet.told[0]


RECIPE = "defaults: [calculator, mine/other.yaml, override /reward: own.py:Half]\n"
OWN = """
from dataclasses import dataclass
from mtgrpo.rewards import Reward

@dataclass
class Half(Reward):
    '''Half.'''
    def reward(self, trajectory):
        return 0.5

def add(a: int) -> int:
    '''A sum.'''
    return a
"""


def test_a_job_is_made_asked_for_and_fetched(run: Run, aws: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "shop.yaml": RECIPE,
        "mine/other.yaml": "seed: 4\n",
        "own.py": OWN,
        "prompt.txt": "Add.",
        "more.py": "",
    }.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    words = [word for word in WHERE if not word.startswith("recipe=")]
    words += ["recipe=shop.yaml", "task.system_prompt=file:prompt.txt", "environment.tools=[calculator,own.py:add]"]
    code, out, err = run(*words, "files=[more.py]", "env=[HF_TOKEN]")
    assert code == 0, err
    assert "job-1 was created" in out
    for secret in (*SECRETS.values(), TOKEN):
        assert secret not in out + err
    s3, asked = [boto3.client(name) for name in ("s3", "sagemaker")]  # type: ignore[call-overload]
    uploaded = {key.removeprefix("mtgrpo/job-1/code/") for key in keys()}
    files = {f"files/{name}" for name in ("shop.yaml", "mine/other.yaml", "own.py", "prompt.txt", "more.py")}
    assert uploaded == {"sagemaker_entry.py", "constraints.txt", bundle.WHEEL, *files}
    for key in keys():
        content: bytes = s3.get_object(Bucket="my-bucket", Key=key)["Body"].read()
        assert not any(secret.encode() in content for secret in (*SECRETS.values(), TOKEN)), key

    described = asked.describe_training_job(TrainingJobName="job-1")
    assert described["AlgorithmSpecification"]["ContainerEntrypoint"][1].endswith("/code/sagemaker_entry.py")
    code, out, err = run("launch", "status", "job-1")
    assert code == 0 and "job-1: Completed" in out and "1 x ml.m5.xlarge" in out
    code, _, err = run(*words)
    assert code == 2 and "there is a job of this name; give another, and run=job-1 to go on" in err
    again = [*words, "name=job-2", "run=job-1"]
    code, _, err = run(*again)
    assert code == 2 and "run=job-1: nothing is saved in s3://my-bucket/mtgrpo/job-1/checkpoints" in err
    assert not [key for key in keys() if "job-2" in key]

    code, _, err = run("launch", "fetch", "job-1")
    assert code == 2 and "has saved nothing yet" in err
    s3.put_object(Bucket="my-bucket", Key="mtgrpo/job-1/checkpoints/run/notes.txt", Body=b"said")
    assert run(*again)[0] == 0
    s3.put_object(Bucket="my-bucket", Key="mtgrpo/job-1/checkpoints/run/../../../escaped.txt", Body=b"bad")
    bucket, _, key = described["ModelArtifacts"]["S3ModelArtifacts"].removeprefix("s3://").partition("/")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("config.json"), io.BytesIO())
    s3.put_object(Bucket=bucket, Key=key, Body=packed.getvalue())
    code, out, err = run("launch", "fetch", "job-1")
    assert code == 0, err
    assert sorted(
        path.relative_to(place / "job-1").as_posix() for path in (place / "job-1").rglob("*") if path.is_file()
    ) == [
        "model/config.json",
        "run/notes.txt",
    ]
    assert not list(place.rglob("escaped.txt"))


def test_files_have_the_names_that_the_run_asks_for(place: Path) -> None:
    for name, text in {
        "real/x.jsonl": '{"prompt": "1 + 1?", "answer": "2"}\n',
        "rec/mine.yaml": "defaults: [calculator, other.yaml, {override /parallel: zero3}]  # as old.yaml\n"
        "parallel: {deepspeed_config: ds.yaml}\n",
        "rec/other.yaml": "seed: 4\n",
        "ds.yaml": "{}\n",
        "data/y.txt": "",
    }.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    (place / "link.jsonl").symlink_to("real/x.jsonl")
    (place / "data/x.jsonl").symlink_to("../real/x.jsonl")
    (place / "here").symlink_to(place)
    words = ["recipe=rec/mine.yaml", "task=jsonl", "task.path=link.jsonl"]
    more = ["data", f"{place}/here/real"]
    composed = compose(parse(words))
    found = set(bundle.user_files(composed, words, more))
    links = {"link.jsonl", "data/x.jsonl", "here/real/x.jsonl"}
    assert found == links | {"rec/mine.yaml", "rec/other.yaml", "ds.yaml", "data/y.txt"}
    (place / "data/o.txt").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=r"^files: data/o\.txt lies outside of the folder in which you type"):
        bundle.user_files(composed, words, more)


def test_what_aws_refuses_is_told_in_a_line(run: Run, aws: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in WHERE if not word.startswith("bucket=")]
    code, _, err = run(*words, "bucket=nobodys-bucket")
    assert code == 2 and "bucket=nobodys-bucket: there is none that you may use" in err
    assert len(err.splitlines()[-1]) < 300 and keys() == []
    for command in ("status", "logs", "stop", "fetch"):
        code, _, err = run("launch", command, "no-job")
        assert code == 2 and "there is no job no-job in us-east-1" in err
    for name in SECRETS:
        monkeypatch.delenv(name)
    code, _, err = run(*WHERE)
    assert code == 2 and "Unable to locate credentials" in err and "Traceback" not in err


def test_a_job_is_stopped_and_its_log_is_read(run: Run, aws: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*WHERE)[0] == 0
    logs: Any = boto3.client("logs")
    logs.create_log_group(logGroupName=sagemaker_jobs.LOGS)
    began_ms = int(time.time() * 1000)
    for host in ("algo-1", "algo-2"):
        stream = {"logGroupName": sagemaker_jobs.LOGS, "logStreamName": f"job-1/{host}-1700000000"}
        logs.create_log_stream(**stream)
        events = [{"timestamp": began_ms + n, "message": f"line {n}"} for n in range(3)]
        logs.put_log_events(**stream, logEvents=events)
    code, out, err = run("launch", "logs", "job-1")
    assert code == 0, err
    assert out.splitlines() == [f"{host}-1700000000 line {n}" for host in ("algo-1", "algo-2") for n in range(3)]

    asked: Any = boto3.client("sagemaker")
    with Stubber(asked) as stub:
        stub.add_response("describe_training_job", {**asked_for("job-1"), "TrainingJobStatus": "InProgress"})
        stub.add_response("stop_training_job", {}, {"TrainingJobName": "job-1"})
        stub.add_response("describe_training_job", asked_for("job-1"))
        stub.add_client_error("stop_training_job", "ValidationException", "The job has ended")
        monkeypatch.setattr(sagemaker_jobs, "client", lambda *_: asked)
        code, out, err = run("launch", "stop", "job-1")
        assert code == 0 and "job-1 is told to stop" in out, err
        code, out, err = run("launch", "stop", "job-1")
        assert code == 2 and "job-1 cannot be stopped (" in err and "The job has ended" in err
        stub.assert_no_pending_responses()


def asked_for(name: str) -> dict[str, Any]:
    """What SageMaker says at least of a job."""
    image = {"TrainingImage": "image", "TrainingInputMode": "File"}
    arns = {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"}
    resources = {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1}
    rest = {
        "StoppingCondition": {},
        "CreationTime": 0,
        "SecondaryStatus": "Stopping",
        "ModelArtifacts": {"S3ModelArtifacts": ""},
    }
    return {
        "TrainingJobName": name,
        "TrainingJobStatus": "Stopped",
        "AlgorithmSpecification": image,
        "ResourceConfig": resources,
        **arns,
        **rest,
    }


def test_status_says_why_a_job_failed_and_what_it_measured() -> None:
    job = asked_for("job-1") | {"FailureReason": "AlgorithmError: mtgrpo: no", "BillableTimeInSeconds": 5400}
    job |= {"FinalMetricDataList": [{"MetricName": "reward/mean", "Value": 0.5}]}
    told = sagemaker_jobs.status(job)
    assert "failed: AlgorithmError: mtgrpo: no" in told and "billed: 1.50 hours" in told and "reward/mean: 0.5" in told


def test_little_time_and_a_small_disk_are_rounded_up() -> None:
    made = sagemaker.prepare([*WHERE[2:], "hours=0.0001", "wait_hours=0.0001", "volume_gb=0.5"], spot=True).request
    assert made["StoppingCondition"] == {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}
    assert made["ResourceConfig"]["VolumeSizeInGB"] == 1


def test_metrics_are_read_from_what_the_job_prints() -> None:
    row = "mtgrpo-metrics step=3 reward/mean=-1.5e-05 reward/success=0.25"
    job = sagemaker.prepare(WHERE[2:], spot=False)
    found = {
        metric["Name"]: match[1]
        for metric in job.request["AlgorithmSpecification"]["MetricDefinitions"]
        if (match := re.search(metric["Regex"], row))
    }
    assert found == {"reward/mean": "-1.5e-05", "reward/success": "0.25"}


def test_the_wheel_has_all_of_the_package() -> None:
    with zipfile.ZipFile(io.BytesIO(bundle.build_wheel())) as wheel:
        names = set(wheel.namelist())
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {name.removeprefix("src/") for name in tracked} <= names
    assert not any(re.match(r"(torch|nvidia|mtgrpo)", line) for line in bundle.versions().splitlines())


def test_every_command_of_the_page_is_accepted(run: Run, place: Path) -> None:
    page = (ROOT / "docs/sagemaker.md").read_text()
    lines = [
        line.split("  #")[0]
        for block in re.findall(r"^```console\n(.*?)^```$", page, flags=re.M | re.S)
        for line in block.splitlines()
    ]
    commands = [shlex.split(line)[1:] for line in lines if re.match("mtgrpo launch (docker|sagemaker|slurm)", line)]
    assert len(commands) >= 6
    for words in commands:
        words = [word.replace("Qwen/Qwen3-1.7B", "tiny") for word in words]
        code, _, err = run(*words, *(["--dry-run"] if "slurm" not in words and "--dry-run" not in words else []))
        assert code == 0, (words, err)


def test_the_tuner_of_the_page_takes_the_parts_of_a_job(aws: str, place: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/sagemaker.md").read_text(), flags=re.M | re.S)
    exec(compile(block, "sagemaker.md", "exec"), {})
    sagemaker_client: Any = boto3.client("sagemaker")
    made = sagemaker_client.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName="tune-1")
    assert made["TrainingJobDefinition"]["StaticHyperParameters"]["words"] == '["recipe=calculator"]'
    assert "mtgrpo/tune-1/code/sagemaker_entry.py" in keys()


def test_the_run_is_started_as_the_job_says() -> None:
    parameters = {"words": '["seed=1"]', "processes": "8", "vllm": "0.32.0", "optimizer.lr": "0.1", "_objective": "x"}
    alone = sagemaker_entry.Hosts(["algo-1"], "algo-1", "eth0")
    words = ["seed=1", "optimizer.lr=0.1", "engine.python=/opt/mtgrpo-vllm/bin/python"]
    words += ["hydra.run.dir=/opt/ml/checkpoints/run", "resume=true"]
    assert sagemaker_entry.command(parameters, alone) == [sys.executable, "-m", "mtgrpo", "train", *words]
    second = sagemaker_entry.Hosts(["algo-1", "algo-2"], "algo-2", "eth0")
    started = " ".join(sagemaker_entry.command(parameters, second)[1:])
    torchrun = "-m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 8"
    assert started == f"{torchrun} --master-addr algo-1 --master-port 29500 -m mtgrpo train {' '.join(words)}"
    found = sagemaker_entry.variables(second, parameters)
    assert (
        found["SM_CURRENT_HOST_RANK"] == "1" and found["NCCL_SOCKET_IFNAME"] == "eth0" and found["SM_HOST_COUNT"] == "2"
    )


def test_the_end_of_a_job_may_be_told_when_its_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker_entry, "CODE", tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert sagemaker_entry.train([sys.executable, "-c", "print(1)"], os.environ) == (0, False, ["1"])
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("left", "taken"),
    [
        (["step_000001", "step_000002", "step_000002.replaced"], "step_000002"),
        (["step_000001", "step_000002.replaced"], "step_000002.replaced"),
    ],
)
def test_the_model_of_a_job_is_its_newest_checkpoint(
    left: list[str], taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a crash left one beside its replacement, or alone."""
    for name in left:
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    monkeypatch.setattr(sagemaker_entry, "RUN", tmp_path / "run")
    monkeypatch.setattr(sagemaker_entry, "MODEL", tmp_path)
    with pytest.raises(sagemaker_entry.JobError, match=f"checkpoints/{taken} is not a checkpoint: it has no state"):
        sagemaker_entry.publish()


@pytest.mark.parametrize(
    ("words", "version"),
    [
        ("", ""),
        ("engine=server", VLLM_VERSION),
        ("engine=auto", VLLM_VERSION),
        ("engine=server engine.url=[http://a:1]", ""),
    ],
)
def test_vllm_is_installed_where_servers_are_started(words: str, version: str) -> None:
    made = sagemaker.prepare([*WHERE[2:], *words.split()], spot=False)
    assert made.request["HyperParameters"].get("vllm", "") == version
