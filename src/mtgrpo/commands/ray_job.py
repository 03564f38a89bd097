"""`mtgrpo launch ray KEY=VALUE ...`: the run as a job of a Ray cluster, with the files of the working folder."""

import asyncio
import contextlib
import importlib.util
import io
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from hydra.core.override_parser.types import Quote, QuotedString

import mtgrpo
from mtgrpo.commands import experiments
from mtgrpo.errors import Arguments, ConfigError, RunError, program
from mtgrpo.parallel.cluster.ray import reach
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.runtime.resources import read_cpu_times
from mtgrpo.runtime.text import complain

NOT_SENT = ["outputs", "multirun", ".git", ".venv*", "__pycache__"]  # of the working folder
PORTS = {"http": 80, "https": 443}


def main(arguments: Sequence[str]) -> int:
    """Check the run here, submit it, and follow what it prints; its exit code is 0 where the job has succeeded.

    Raises ConfigError for what a run would refuse, and where no job server answers; RunError where the job fails.
    """
    parser = Arguments("mtgrpo launch ray", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="as for mtgrpo train")
    usual = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    parser.add_argument("--address", default=usual, help="of the dashboard, on the head (%(default)s)")
    parser.add_argument("--working-dir", default=".", help="whose files the job has; what git ignores is left out")
    parser.add_argument("--python", default="python", help="of the machines, which has what mtgrpo needs (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="check the run and print the command, submit nothing")
    args = parser.parse_intermixed_args(arguments)
    refuse_without_package("ray", "mtgrpo launch ray")
    parts, folder = urlsplit(args.address), Path(args.working_dir)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ConfigError(f"--address {args.address}: give http://HEAD:8265, where the dashboard of the cluster is")
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {folder}: there is no such folder")
    name = f"mtgrpo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    words = [*_missing(args.words, {"cluster": "ray", "cluster.address": "auto"}), *args.words]
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        experiments.main("train", "", [*words, "--dry-run"], read_cpu_times())
    if not args.dry_run:
        reach("--address", args.address, parts.hostname, parts.port or PORTS[parts.scheme])
    outputs = QuotedString(f"{Path.cwd()}/outputs/{name}", Quote.single)
    words += _missing(args.words, {"hydra.run.dir": outputs.with_quotes()})
    command = shlex.join([args.python, "-m", "mtgrpo", "train", *words])
    print(f"job {name}: {command}")
    if args.dry_run:
        return 0
    from mtgrpo.cluster.ray import follow  # noqa: PLC0415  a package that may be absent

    plugins = importlib.util.find_spec("hydra_plugins.mtgrpo_launcher")
    ours = [Path(mtgrpo.__file__).parent, *([Path(plugins.origin).parent] if plugins and plugins.origin else [])]
    environment = {"working_dir": ".", "excludes": NOT_SENT, "py_modules": [str(path) for path in ours]}
    try:
        status, said = asyncio.run(follow(args.address, name, command, environment))
    except KeyboardInterrupt:
        complain(f"the job goes on; to end it: ray job stop {name} --address {args.address}")
        return 130
    if status != "SUCCEEDED":
        again = f"{program()} launch ray with the same words, resume=true and hydra.run.dir"
        raise RunError(f"job {name} has ended as {status}: {said}; to go on: {again}")
    return 0


def _missing(words: Sequence[str], settings: dict[str, str]) -> list[str]:
    """The settings that the words leave out."""
    given = {word.partition("=")[0] for word in words}
    return [f"{key}={value}" for key, value in settings.items() if key not in given]
