"""A run as a training job of SageMaker: what is checked, the request, and what is uploaded for it.

The request is a dictionary, and all but the upload needs neither boto3 nor credentials.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtgrpo.config.compose import compose, parse
from mtgrpo.engines.server import VLLM_VERSION
from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.launch import bundle, sagemaker_entry
from mtgrpo.launch.sagemaker_jobs import aws, client, describe
from mtgrpo.launch.sizing import Fleet, Machine, fit, machine
from mtgrpo.parts import Reach
from mtgrpo.runtime.text import show

OPTIONS = {  # of the job; all other words are those of `mtgrpo train`
    "instance": ("", "the kind of machine, such as ml.p5.48xlarge"),
    "count": ("1", "of machines; auto: the fewest that hold the run, by the memory plan"),
    "role": ("", "arn:aws:iam::ACCOUNT:role/NAME, with which the job runs"),
    "bucket": ("", "of S3: what is uploaded, checkpoints and the model"),
    "name": ("", "of the job; mtgrpo-RECIPE-TIME if not given"),
    "run": ("", "the name of an earlier job, whose checkpoints the job goes on from"),
    "region": ("", "of AWS; AWS_REGION, AWS_DEFAULT_REGION or us-east-1 if not given"),
    "image": ("public.ecr.aws/deep-learning-containers/pytorch:2.11-cu130-amzn2023-sagemaker", "of the container"),
    "hours": ("24", "after which the job is stopped"),
    "wait_hours": ("48", "with --spot: for machines and the run together"),
    "volume_gb": ("200", "of disk, of each machine"),
    "extras": ("[]", "of mtgrpo, such as [search,mcp]"),
    "files": ("[]", "files and folders that the run reads and no option names, such as [shop_prices.py]"),
    "env": ("[]", "names of environment variables that the job gets as they are here, such as [HF_TOKEN]"),
}
INPUT = "input."  # input.NAME=s3://... is there as /opt/ml/input/data/NAME
REFUSED = {"hydra.run.dir", "resume"}  # the job has its own
ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
MOST_CHARS = 2500  # of a hyperparameter
CODE = "code"  # the channel of what is uploaded
NUMBER = r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)"


@dataclass(frozen=True)
class Job:
    """A training job that was checked."""

    request: dict[str, Any]
    files: dict[str, bytes | Path]  # by their names in the channel
    told: list[str]  # to the user
    bucket: str
    region: str

    @property
    def name(self) -> str:
        """That it has in AWS."""
        return self.request["TrainingJobName"]


def main(arguments: Sequence[str]) -> int:
    """Check a job, upload what it needs and create it; with --dry-run print the request. Raises ConfigError."""
    lines = [f"  {name + '=':<12}{what}{f' ({usual})' if usual else ''}" for name, (usual, what) in OPTIONS.items()]
    about = "\n".join([__doc__ or "", *lines])
    form = argparse.RawDescriptionHelpFormatter
    parser = Arguments("mtgrpo launch sagemaker", description=about, formatter_class=form)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="those of the job, and of mtgrpo train")
    parser.add_argument("--spot", action="store_true", help="on machines that AWS may take back; the job then goes on")
    parser.add_argument("--dry-run", action="store_true", help="print the request; needs no boto3 and no credentials")
    args = parser.parse_intermixed_args(arguments)
    job = prepare(args.words, args.spot)
    for line in job.told:
        print(line, file=sys.stderr)
    if args.dry_run:
        shown = job.request | {"Environment": dict.fromkeys(job.request["Environment"], "***")}
        show(json.dumps(shown, indent=2))
        return 0
    submit(job)
    show(f"{job.name} was created; mtgrpo launch status|logs|stop|fetch {job.name}")
    return 0


def prepare(words: Sequence[str], spot: bool) -> Job:
    """The job that words describe. Raises ConfigError for whatever can be known to be wrong without asking AWS."""
    own, inputs, ours = _split(words)
    kind = machine(own["instance"])
    composed = compose(parse(ours))
    composed.experiment.check_training()
    name = own["name"] or bundle.job_name(composed)
    for key, value in {"name": name, "run": own["run"] or name}.items():
        if not NAME.fullmatch(value):
            raise ConfigError(f"{key}={value}: letters, digits and single hyphens between them, 63 at most")
    named = bundle.user_files(composed, ours, _listed(own["files"]))
    fleet, engine = fit(composed.experiment, kind, own["count"]), composed.experiment.engine
    files: dict[str, bytes | Path] = {
        Path(sagemaker_entry.__file__).name: Path(sagemaker_entry.__file__),
        bundle.WHEEL: bundle.build_wheel(),
        "constraints.txt": bundle.versions().encode(),
        **{f"files/{path}": found for path, found in named.items()},
    }
    hyperparameters = {
        "words": json.dumps([*ours, *fleet.words]),
        "processes": str(fleet.processes),
        "extras": ",".join(_listed(own["extras"])),
        "vllm": VLLM_VERSION if engine.reaches is Reach.program and engine.most_devices != 0 else "",  # that it starts
    }
    for key, value in hyperparameters.items():
        if len(value) > MOST_CHARS:
            raise ConfigError(f"{len(value)} characters of {key}: SageMaker takes {MOST_CHARS}; put them into a recipe")
    request = _request(own, name, hyperparameters, fleet, spot)
    request["InputDataConfig"] += [_channel(channel, uri) for channel, uri in inputs.items()]
    told = [*fleet.told, f"uploaded are {', '.join(sorted(files))}", *_cost(kind, fleet, own, spot)]
    return Job(request, files, told, own["bucket"], own["region"])


def _split(words: Sequence[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """What the words say of the job, of its channels and of the run. Raises ConfigError."""
    own, inputs, ours = {name: default for name, (default, _) in OPTIONS.items()}, dict[str, str](), list[str]()
    for word in words:
        key, _, value = word.partition("=")
        if key in OPTIONS:
            own[key] = value
        elif key.startswith(INPUT):
            inputs[key.removeprefix(INPUT)] = value
        elif key in REFUSED:
            raise ConfigError(f"{word}: the job has its run in /opt/ml/checkpoints/run, and resumes it; leave it out")
        else:
            ours.append(word)
    own["region"] = own["region"] or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    if missing := [name for name in ("instance", "role", "bucket") if not own[name]]:
        raise ConfigError(f"{missing[0]} is not given: {missing[0]}={OPTIONS[missing[0]][1]}")
    if not ROLE.fullmatch(own["role"]):
        raise ConfigError(f"role={own['role']}: a role is named as arn:aws:iam::123456789012:role/NAME")
    if not BUCKET.fullmatch(own["bucket"]):
        raise ConfigError(f"bucket={own['bucket']}: the name of a bucket alone, without s3:// and without folders")
    for name in ("hours", "wait_hours", "volume_gb"):
        if not re.fullmatch(r"\d+(\.\d+)?", own[name]) or not float(own[name]):
            raise ConfigError(f"{name}={own[name]}: a number above 0")
    for name in _listed(own["env"]):
        if name not in os.environ:
            raise ConfigError(f"env: {name} is not set here: export it, or leave it out")
    for name, uri in inputs.items():
        if name == CODE or not re.fullmatch(r"s3://[^/]+(/.*)?", uri):
            raise ConfigError(f"{INPUT}{name}={uri}: s3://BUCKET/FOLDER, under another name than {CODE}")
    return own, inputs, ours


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.strip("[]").split(",") if name.strip()]


def _request(own: dict[str, str], name: str, given: dict[str, str], fleet: Fleet, spot: bool) -> dict[str, Any]:
    """As `create_training_job` takes it."""
    home, seconds = f"s3://{own['bucket']}/mtgrpo", math.ceil(float(own["hours"]) * 3600)
    waiting = {"MaxWaitTimeInSeconds": max(seconds, math.ceil(float(own["wait_hours"]) * 3600))} if spot else {}
    return {
        "TrainingJobName": name,
        "RoleArn": own["role"],
        "AlgorithmSpecification": {
            "TrainingImage": own["image"],
            "TrainingInputMode": "File",
            "EnableSageMakerMetricsTimeSeries": True,
            "ContainerEntrypoint": ["python3", f"/opt/ml/input/data/{CODE}/sagemaker_entry.py"],
            "MetricDefinitions": [
                {"Name": metric, "Regex": rf"{sagemaker_entry.MARK}.* {re.escape(metric)}={NUMBER}"}
                for metric in sagemaker_entry.METRICS
            ],
        },
        "HyperParameters": {key: value for key, value in given.items() if value},
        "InputDataConfig": [_channel(CODE, f"{home}/{name}/{CODE}/")],
        "OutputDataConfig": {"S3OutputPath": f"{home}/{name}/output"},
        "CheckpointConfig": {"S3Uri": f"{home}/{own['run'] or name}/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ResourceConfig": {
            "InstanceType": own["instance"],
            "InstanceCount": fleet.hosts,
            "VolumeSizeInGB": math.ceil(float(own["volume_gb"])),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": seconds, **waiting},
        "EnableManagedSpotTraining": spot,
        "Environment": {variable: os.environ[variable] for variable in _listed(own["env"])},
        "Tags": [{"Key": "mtgrpo", "Value": name}],
    }


def _channel(name: str, uri: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def _cost(kind: Machine, fleet: Fleet, own: dict[str, str], spot: bool) -> list[str]:
    hourly = fleet.hosts * kind.dollars
    usage = f"{kind.name} for {'spot ' if spot else ''}training job usage"
    return [
        f"cost: {fleet.hosts} x {kind.name}, about ${hourly:,.2f} an hour on demand in us-east-1 (as of {kind.as_of}, "
        f"from memory), at most ${hourly * float(own['hours']):,.0f} for hours={own['hours']}",
        f"quota: {usage!r} must be {fleet.hosts} or more in {own['region']} (Service Quotas, SageMaker)",
    ]


def submit(job: Job) -> None:
    """Upload what the job needs, and create it. Raises ConfigError where AWS refuses, or there is a job of its name."""
    sagemaker = client("sagemaker", job.region)
    if describe(sagemaker, job.name) is not None:
        raise ConfigError(f"name={job.name}: there is a job of this name; give another, and run={job.name} to go on")
    upload(job)
    with aws("the job was refused"):
        sagemaker.create_training_job(**job.request)


def upload(job: Job) -> None:
    """Upload what the job needs. Raises ConfigError where AWS refuses, or the run that it goes on from is not there."""
    s3, kept = client("s3", job.region), job.request["CheckpointConfig"]["S3Uri"]
    with aws(f"bucket={job.bucket}: there is none that you may use; make it, or name another"):
        s3.head_bucket(Bucket=job.bucket)
        saved = s3.list_objects_v2(Bucket=job.bucket, Prefix=f"{kept.split('/', 3)[3]}/", MaxKeys=1)["KeyCount"]
    if f"/{job.name}/" not in kept and not saved:
        raise ConfigError(f"run={kept.split('/')[-2]}: nothing is saved in {kept}; name the job that began the run")
    with aws(f"bucket={job.bucket}: what the job needs could not be uploaded"):
        for name, content in job.files.items():
            body = content.read_bytes() if isinstance(content, Path) else content
            s3.put_object(Bucket=job.bucket, Key=f"mtgrpo/{job.name}/{CODE}/{name}", Body=body)
