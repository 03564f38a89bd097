"""`mtgrpo launch WHAT`: a server here, or a run in a container or on machines of others.

`vllm --model MODEL` is a vLLM server as `engine=server 'engine.url=[http://HOST:PORT]'` needs it.
`local` is one of the local engine, for `engine.kind=local`: it reads the model that the run sends.
"""

import importlib
import os
from collections.abc import Sequence

from mtgrpo.engines.server import OWN, PYTHON, VLLM, Server
from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.launch import sagemaker_jobs
from mtgrpo.runtime.processes import supervise

RUNS = {"docker": "launch.docker", "ray": "commands.ray_job", "sagemaker": "launch.sagemaker", "slurm": "launch.slurm"}
JOBS = ("status", "logs", "stop", "fetch")  # of SageMaker
WHAT = (VLLM, OWN, *RUNS, *JOBS)


def main(arguments: Sequence[str]) -> int:
    """Do what the first word says. Raises ConfigError."""
    what, *words = arguments or [""]
    if what in RUNS:
        return importlib.import_module(f"mtgrpo.{RUNS[what]}").main(words)
    return sagemaker_jobs.main(what, words) if what in JOBS else serve(arguments)


def serve(arguments: Sequence[str]) -> int:
    """Become the server in the foreground, its log on the terminal, until Ctrl-C; `--dry-run` alone returns.

    Raises ConfigError where there is no interpreter for it.
    """
    parser = Arguments("mtgrpo launch", description=__doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--model", required=True, help="the folder or name of the model that is trained")
    parser.add_argument("--python", default=PYTHON, help="of the environment that has vLLM (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens; whoever reaches it controls it")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32 or that of the model's files (auto)")
    parser.add_argument(
        "--max-length", type=int, help="tokens of the longest conversation; of vllm the model's by default"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs")
    parser.add_argument("--memory-fraction", type=float, help="of each GPU's memory")
    parser.add_argument("--lora-rank", type=int, default=0, help="of adapters that are trained")
    parser.add_argument("--argument", action="append", default=[], help="another word for the server; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the command, start nothing")
    args = parser.parse_args(arguments)
    settings = Server(
        kind=args.what,
        python=args.python if args.what == VLLM else PYTHON,
        tensor_parallel=args.tensor_parallel,
        memory_fraction=args.memory_fraction,
        arguments=args.argument,
    ).placed((), shared=False)
    if args.what == OWN and not args.max_length:
        raise ConfigError("--max-length is missing: such a server has no model yet that would say it")
    program = args.python if args.dry_run and args.what == VLLM else settings.program
    from mtgrpo.engines.server.engine import STARTED  # noqa: PLC0415  it imports torch
    from mtgrpo.engines.server.replica import GRACE_S  # noqa: PLC0415

    command, environment = STARTED[args.what]
    place = ["--host", args.host, "--port", str(args.port)]
    words = command(settings, args.model, args.dtype, args.max_length, place, args.lora_rank)
    if args.dry_run:
        print(" ".join([program, *words]))
        return 0
    variables = environment(settings, 0)
    supervised = supervise([program, *words], variables, parent=os.getppid(), grace_s=GRACE_S)
    os.execve(supervised[0], supervised, variables)
