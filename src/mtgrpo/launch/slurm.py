"""A script for sbatch that starts a run on machines of Slurm: by torchrun, or with cluster=ray on a Ray cluster.

The run is in runs/NAME, of the recipe and now if no name is given, on a disk that all machines see. A job that Slurm
puts back into its queue goes on.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mtgrpo.config.compose import compose, parse
from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.launch.bundle import job_name

SBATCH = {  # options of sbatch that are passed on, and what they are for
    "time": "after which Slurm ends the job, as 24:00:00",
    "partition": "of the cluster",
    "account": "that pays",
    "cpus-per-task": "cores of each machine",
    "mem": "memory of each machine, as 200G",
}
OPTIONS = {"nodes": "1", "gpus": "1", "name": "", **dict.fromkeys(SBATCH, "")}
RAY = """\
srun --nodes=1 --ntasks=1 -w "$head" \\
    {python} -m ray.scripts.scripts start --head --node-ip-address="$head" --port="$port" --block &
sleep 20
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --nodes="$((SLURM_NNODES - 1))" --ntasks="$((SLURM_NNODES - 1))" --exclude="$head" \\
        {python} -m ray.scripts.scripts start --address="$head:$port" --block &
    sleep 20
fi
srun --overlap --nodes=1 --ntasks=1 -w "$head" {python} -m mtgrpo {run} cluster.address="$head:$port"
"""
TORCHRUN = """\
srun {python} -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node {each} \\
    --rdzv-backend c10d --rdzv-endpoint {at} --rdzv-id "$SLURM_JOB_ID" -m mtgrpo {run}
"""


def main(arguments: Sequence[str]) -> int:
    """Print the script, or write it to --out. Raises ConfigError for wrong settings of the run too."""
    parser = Arguments("mtgrpo launch slurm", description=__doc__)
    own = ", ".join(["nodes, gpus of each, name", *(f"{name}: {what}" for name, what in SBATCH.items())])
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=f"of the job ({own}), and of mtgrpo train")
    parser.add_argument("--python", default=sys.executable, help="that has mtgrpo, on all machines (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it; printed if not given")
    args = parser.parse_intermixed_args(arguments)
    text = script(args.words, args.python)
    if args.out is None:
        print(text, end="")
        return 0
    args.out.write_text(text)
    print(f"{args.out}; start it with sbatch {args.out}")
    return 0


def script(words: Sequence[str], python: str) -> str:
    """The script for these words of a job and its run. Raises ConfigError."""
    job = OPTIONS | {key: value for key, _, value in (word.partition("=") for word in words) if key in OPTIONS}
    ours = [word for word in words if word.partition("=")[0] not in OPTIONS]
    for name in ("nodes", "gpus"):
        if not re.fullmatch(r"\d+", job[name]) or (name == "nodes" and not int(job[name])):
            raise ConfigError(f"{name}={job[name]}: a whole number{', of each machine' if name == 'gpus' else ''}")
    if wrong := [name for name in ("name", *SBATCH) if not re.fullmatch(r"[\w.:,+@%/-]*", job[name])]:
        raise ConfigError(f"{wrong[0]}={job[wrong[0]]!r} is nothing for sbatch")
    composed = compose(parse(ours))
    experiment = composed.experiment
    experiment.check_training()
    job["name"] = job["name"] or job_name(composed)
    folder = [] if any(word.startswith("hydra.run.dir=") for word in ours) else [f"hydra.run.dir=runs/{job['name']}"]
    resumed = [] if any(word.startswith("resume=") for word in ours) else ["resume=true"]
    run = shlex.join(["train", *ours, *folder, *resumed])
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job['name']}",
        f"#SBATCH --nodes={job['nodes']}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job['gpus']}"] if int(job["gpus"]) else []),
        *(f"#SBATCH --{name}={job[name]}" for name in SBATCH if job[name]),
        "#SBATCH --requeue",
        "set -euo pipefail",
        '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 12000))  # of this job alone, as a machine may have several",
    ]
    program = shlex.quote(python)
    if experiment.cluster.places:
        body = RAY.format(python=program, run=run)
    else:
        at = '"$head:$port"' if int(job["nodes"]) > 1 else "localhost:0"  # a port that is free
        body = TORCHRUN.format(python=program, each=max(1, int(job["gpus"])), at=at, run=run)
    return "\n".join([*lines, body])
