"""Jobs of SageMaker that were created: how they are, what they print, how they are stopped, what they leave."""

import sys
import tarfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.runtime.files import put_whole
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.runtime.text import show

LOGS = "/aws/sagemaker/TrainingJobs"
QUOTA = "ResourceLimitExceeded"
DONE = ("Completed", "Failed", "Stopped")
_TIMES = {"created": "CreationTime", "training since": "TrainingStartTime", "training until": "TrainingEndTime"}


def main(command: str, arguments: Sequence[str]) -> int:
    """Do what `command` says for a job. Raises ConfigError where AWS refuses, or knows no such job."""
    parser = Arguments(f"mtgrpo launch {command}", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="of the job")
    parser.add_argument("--region", help="of AWS; that of your own settings if not given")
    if command == "fetch":
        parser.add_argument("--out", type=Path, metavar="DIR", help="a folder that is not there yet; NAME if not given")
    args = parser.parse_args(arguments)
    sagemaker = client("sagemaker", args.region)
    job = describe(sagemaker, args.name)
    if job is None:
        raise ConfigError(f"there is no job {args.name} in {sagemaker.meta.region_name}: --region names another region")
    if command == "status":
        show(status(job))
    elif command == "logs":
        for line in log_lines(client("logs", args.region), args.name):
            show(line)
    elif command == "stop":
        with aws(f"{args.name} cannot be stopped"):
            sagemaker.stop_training_job(TrainingJobName=args.name)
        show(f"{args.name} is told to stop; it saves, within two minutes")
    else:
        show(fetch(client("s3", args.region), job, args.out or Path(args.name)))
    return 0


def client(service: str, region: str | None) -> Any:
    """What asks a service of AWS. Raises ConfigError without boto3."""
    refuse_without_package("boto3", "mtgrpo launch")
    import boto3  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    with aws(f"{service} cannot be asked"):
        return boto3.Session().client(service, region_name=region)  # pyright: ignore


@contextmanager
def aws(what: str) -> Generator[None]:
    """What AWS refuses within is a ConfigError, in a line that begins with `what`."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        said = " ".join(str(error).split())
        cure = "; ask for more in Service Quotas, SageMaker, as the line above names it" if QUOTA in said else ""
        raise ConfigError(f"{what} ({said}){cure}") from error


def describe(sagemaker: Any, name: str) -> Mapping[str, Any] | None:
    """What SageMaker says of a job; None where there is none."""
    from botocore.exceptions import ClientError  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    with aws(f"job {name} cannot be asked for"):
        try:
            return sagemaker.describe_training_job(TrainingJobName=name)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("ValidationException", "ResourceNotFound"):
                return None
            raise


def status(job: Mapping[str, Any]) -> str:
    """Lines for people: where it stands, on what, since when, what it measured last, and why it failed."""
    resources = job["ResourceConfig"]
    lines = [
        f"{job['TrainingJobName']}: {job['TrainingJobStatus']} ({job.get('SecondaryStatus', '')})",
        f"{resources['InstanceCount']} x {resources['InstanceType']}"
        + (", spot" if job.get("EnableManagedSpotTraining") else ""),
    ]
    lines += [f"{label}: {job[key]:%Y-%m-%d %H:%M:%S %Z}" for label, key in _TIMES.items() if job.get(key)]
    if job.get("BillableTimeInSeconds"):
        lines.append(f"billed: {job['BillableTimeInSeconds'] / 3600:.2f} hours of each machine")
    lines += [f"{metric['MetricName']}: {metric['Value']:g}" for metric in job.get("FinalMetricDataList") or ()]
    if job.get("FailureReason"):
        lines.append(f"failed: {job['FailureReason']}")
    return "\n".join(lines)


def log_lines(logs: Any, name: str) -> Generator[str]:
    """What the machines of a job have printed, as AWS orders it; each line begins with its machine."""
    with aws(f"job {name} has printed nothing yet, or its log cannot be read"):
        for page in logs.get_paginator("filter_log_events").paginate(logGroupName=LOGS, logStreamNamePrefix=f"{name}/"):
            for event in page["events"]:
                yield f"{event['logStreamName'].rpartition('/')[2]} {event['message']}"


def fetch(s3: Any, job: Mapping[str, Any], out: Path) -> str:
    """Put the run, as far as it is saved, into `out`/run and the model into `out`/model; says what is there."""
    if out.exists():
        raise ConfigError(f"--out {out}: it is there already; choose another name")
    fetched = list[str]()
    with put_whole(out) as partial, aws(f"what {job['TrainingJobName']} left cannot be read"):
        partial.mkdir()
        _download(s3, f"{job['CheckpointConfig']['S3Uri']}/run/", partial / "run")
        if (partial / "run").exists():
            fetched.append(f"its run: {out}/run (mtgrpo view {out}/run)")
        artifacts = (job.get("ModelArtifacts") or {}).get("S3ModelArtifacts", "")
        if artifacts and job["TrainingJobStatus"] in DONE:
            bucket, _, key = artifacts.removeprefix("s3://").partition("/")
            archive = partial / "model.tar.gz"
            try:
                s3.download_file(bucket, key, str(archive))
                with tarfile.open(archive) as content:
                    content.extractall(partial / "model", filter="data")
                archive.unlink()
                fetched.append(f"its model: {out}/model (mtgrpo eval model.name={out}/model recipe=...)")
            except (s3.exceptions.ClientError, tarfile.TarError) as error:
                print(f"no model: {artifacts} cannot be read: {error}", file=sys.stderr)
        if not fetched:
            raise ConfigError(f"{job['TrainingJobName']} has saved nothing yet: {job['CheckpointConfig']['S3Uri']}")
    return "\n".join(fetched)


def _download(s3: Any, uri: str, folder: Path) -> None:
    """Put what lies under `uri`, if anything, into `folder`. Keys that lead out of it are left out."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", ()):
            path = folder / entry["Key"].removeprefix(prefix)
            if path.resolve().is_relative_to(folder.resolve()) and not entry["Key"].endswith("/"):
                path.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(bucket, entry["Key"], str(path))
