"""The local engine behind the paths of vLLM that are asked for, in a process of its own: no other program is needed."""

import os
from collections.abc import Sequence

import torch

from mtgrpo.engines.server import GPU_FRACTION, Server
from mtgrpo.engines.server.vllm import CPU_CACHE, VLLM, visible_gpus
from mtgrpo.runtime.resources import openmp_settings, threads_each


class Own(VLLM):
    """A server of the local engine: its tokens are those of the local engine, for the same keys."""

    seeds = 2**64

    async def sleep(self) -> None:
        """See `Replica.sleep`: it keeps what it has, as the memory plan says."""
        return

    async def wake(self) -> None:
        return


def command(
    settings: Server, model: str, dtype: str, longest: int | None, place: Sequence[str], lora_rank: int = 0
) -> list[str]:
    """See `vllm.command`; it reads what it serves when it is told to."""
    words = ["-P", "-m", "mtgrpo.engines.local.serve", "--dtype", dtype, *place]
    words += ["--max-model-len", str(longest)] if longest else []
    on_gpu = settings.fraction or GPU_FRACTION
    words += ["--memory-fraction", str(on_gpu if torch.cuda.is_available() else settings.memory_fraction or CPU_CACHE)]
    return [*words, *settings.arguments]


def environment(settings: Server, number: int) -> dict[str, str]:
    """The variables of server `number`."""
    return {**os.environ, **openmp_settings(threads_each(settings.replicas)), **visible_gpus(settings, number)}
