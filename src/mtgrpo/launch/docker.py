"""A run in a container on this machine: an image is built from the Dockerfile of mtgrpo's source, and trains.

Folders have the names there that they have here: the working folder, which can only be read, and that of the run.
What is downloaded stays in Docker's volume mtgrpo-cache.
"""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

import mtgrpo
from mtgrpo.config.compose import compose, parse
from mtgrpo.errors import Arguments, ConfigError, RunError


def main(arguments: Sequence[str]) -> int:
    """Build the image and become its container; with --dry-run print both commands. Raises ConfigError, RunError."""
    parser = Arguments("mtgrpo launch docker", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="those of mtgrpo train")
    parser.add_argument("--gpus", metavar="all|NUMBER", help="that the container gets, with a torch for them")
    parser.add_argument("--extras", default="", metavar="NAME,...", help="of mtgrpo, such as data,search")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="a variable it gets; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="check the run and print the commands, start nothing")
    args = parser.parse_intermixed_args(arguments)
    words = parse(args.words)
    compose(words).experiment.check_training()
    source, here = Path(mtgrpo.__file__).parents[2], Path.cwd()
    if not (source / "Dockerfile").is_file():
        raise ConfigError(f"there is no Dockerfile in {source}: install mtgrpo from its source, pip install -e .")
    named = [word for word in words if word.key_or_group == "hydra.run.dir"]
    run = here / Path(str(named[-1].value()) if named else time.strftime("outputs/%Y-%m-%d/%H-%M-%S")).expanduser()
    torch, gpus = ("gpu", ["--gpus", args.gpus, "--ipc=host"]) if args.gpus else ("cpu", [])
    image = "-".join([f"mtgrpo:{torch}", *args.extras.split(",")]).rstrip("-")
    build = ["docker", "build", f"--build-arg=TORCH={torch}", f"--build-arg=EXTRAS={args.extras}", f"-t={image}"]
    start = ["docker", "run", "--rm", "--init", *gpus, *(f"--env={name}" for name in args.env)]
    start += [f"-v={here}:{here}:ro", f"-v={run}:{run}", "-v=mtgrpo-cache:/root/.cache", f"-w={here}", image, "train"]
    start += [str(word.input_line) for word in words if word not in named]
    start.append(f"hydra.run.dir={QuotedString(str(run), Quote.single).with_quotes()}")
    if args.dry_run:
        print(f"{shlex.join([*build, str(source)])}\n{shlex.join(start)}")
        return 0
    if not shutil.which("docker"):
        raise ConfigError("there is no docker on PATH: install it, or take what --dry-run prints to where it is")
    if code := subprocess.call([*build, source]):
        raise RunError(f"docker build ended with exit code {code}; what it printed says why")
    run.mkdir(parents=True, exist_ok=True)
    os.execvp("docker", start)
