"""vLLM 0.32: its interface for tokens in and out, and how it is started.

What a server must have that somebody else starts: VLLM_SERVER_DEV_MODE=1 (weights and versions over HTTP),
`--enable-scale-out` (tokens in and out), `--logprobs-mode processed_logprobs` (log-probabilities under the distribution
that is sampled from) and `--max-logprobs 1024`.
"""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import CONFIG_NAME

from mtgrpo.engines.server import MAX_NAMED_TOKENS, Server
from mtgrpo.engines.server.replica import ANSWER_TIMEOUT_S, FINISHES, HEAT, Answered, LostError, Replica
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.runtime.files import find_near
from mtgrpo.runtime.resources import SLEEP, memory_left
from mtgrpo.types import Sampling

NAME = "policy"  # of the model that a server of ours serves
ADAPTERS = "policy-"  # what names of our adapters begin with
EXTRA_TOKENS = 16  # tokens that may be as likely as the last that top-k keeps, and are kept too
COMPARED = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")  # of configurations
RESETS, RESET_S = 200, 0.05  # tries to reset the prefix cache, and the seconds between them
NOTHING = -9000.0  # vLLM writes -9999 for minus infinity
CPU_CACHE = 0.1  # of the memory, for the KV cache of a server without a GPU
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM can be told to expect


class VLLM(Replica):
    """A vLLM server."""

    generates = "/inference/v1/generate"
    seeds = 2**63  # how many it tells apart
    _model = NAME  # or the adapter that is sampled with
    _adapter = ""  # that it has of us

    async def check(self, config: Mapping[str, Any], longest: int) -> None:
        """See `Replica.check`; a server without what we need of its interface is refused too."""
        models = (await self.ask("GET", "/v1/models"))["data"]
        for name in (model["id"] for model in models if model.get("parent")):
            if name.startswith(ADAPTERS):  # of a run before, or of this one before the server was lost
                await self._unload(name)
        served = next(model for model in models if not model.get("parent"))
        self._model, self._adapter, length = served["id"], "", served["max_model_len"]
        path = Path(served["root"]) / CONFIG_NAME
        theirs = json.loads(path.read_text()) if path.is_file() else config  # else the push finds out
        if differing := [name for name in COMPARED if theirs.get(name) != config.get(name)]:
            raise ConfigError(
                f"{self.name} serves another model, {served['root']}: its {differing[0]} is "
                f"{theirs.get(differing[0])}, and that of the model which is trained {config.get(differing[0])}"
            )
        self._check_length(length, longest, "--max-model-len")
        try:
            await self.ask("GET", "/weight_info")
        except EngineError as error:
            raise ConfigError(f"{self.name} takes no weights: start it with VLLM_SERVER_DEV_MODE=1 set") from error

    async def sample(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> Answered:
        settings: dict[str, Any] = {
            **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            "max_tokens": sampling.max_new_tokens,
            "seed": seed % self.seeds,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # the stop tokens are those above
            "logprobs": sampling.top_k + EXTRA_TOKENS if sampling.cuts else 0,
        }
        (choice,) = (await self._generate(tokens, settings))["choices"]
        listed = choice["logprobs"]["content"]
        kept = [_kept(entry) for entry in listed] if sampling.cuts else []
        return Answered(choice["token_ids"], [e["logprob"] for e in listed], kept, FINISHES[choice["finish_reason"]])

    async def likeliest(self, tokens: Sequence[int], count: int) -> list[dict[int, float]]:
        settings = {"max_tokens": 1, "prompt_logprobs": count, "temperature": HEAT, "logprobs": 0, "ignore_eos": True}
        answer = await self._generate(tokens, settings)
        rows = [{int(token): entry["logprob"] for token, entry in row.items()} for row in answer["prompt_logprobs"][1:]]
        (sampled,) = answer["choices"][0]["logprobs"]["content"]
        return [*rows, {sampled["token_id"]: sampled["logprob"]}]

    async def _generate(self, tokens: Sequence[int], settings: dict[str, Any]) -> Any:
        body = {"model": self._model, "token_ids": list(tokens), "sampling_params": {**settings, "detokenize": False}}
        answer = await self.ask("POST", self.generates, body, timeout_s=None)
        labels = {span["version"] for choice in answer["choices"] for span in choice["weight_versions"] or []}
        if labels - {self._label}:
            raise LostError(f"{self.name} sampled with weights {labels} instead of {self._label}: was it restarted?")
        return answer

    async def abort(self) -> None:
        await self.ask("POST", "/abort_requests", {}, ANSWER_TIMEOUT_S)

    async def reload(self, folder: Path) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.ask("POST", "/collective_rpc", call)

    async def reset_cache(self) -> None:
        for _ in range(RESETS):
            if (await self.ask("POST", "/reset_prefix_cache"))["success"]:
                return
            await asyncio.sleep(RESET_S)  # a request that was interrupted still holds some of it
        raise EngineError(f"{self.name} keeps the KV cache of older weights: it could not be reset {RESETS} times")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `Replica.load_adapter`; the one before is let go."""
        await self.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        before, self._model, self._adapter = self._adapter, name, name
        if before:
            await self._unload(before)

    async def _unload(self, name: str) -> None:
        await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, ANSWER_TIMEOUT_S)

    async def sleep(self) -> None:
        """See `Replica.sleep`: the weights go to the CPU's memory."""
        await self.ask("POST", "/sleep", level=1)

    async def wake(self) -> None:
        await self.ask("POST", "/wake_up")


def _kept(entry: Any) -> array[int]:
    """The tokens that have not been cut off, ascending."""
    left = {other["token_id"] for other in entry["top_logprobs"] if other["logprob"] > NOTHING}
    return array("i", sorted(left | {entry["token_id"]}))


def command(
    settings: Server, model: str, dtype: str, longest: int | None, place: Sequence[str], lora_rank: int = 0
) -> list[str]:
    """The words after the interpreter's name that start a server of `model`.

    longest: context in tokens, None for the model's own. place: more words, such as where it listens.
    """
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME, *place]
    words += ["--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log", "--dtype", dtype]
    words += ["--generation-config", "vllm", "--tensor-parallel-size", str(settings.tensor_parallel)]
    words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_NAMED_TOKENS + EXTRA_TOKENS)]
    words += ["--max-model-len", str(longest)] if longest else []
    if lora_rank:
        rank = next((rank for rank in RANKS if rank >= lora_rank), lora_rank)
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    if not torch.cuda.is_available():
        cache_bytes = int((settings.memory_fraction or CPU_CACHE) * memory_left()[1])
        words += ["--kv-cache-memory-bytes", str(cache_bytes)]
        words += ["--no-enable-chunked-prefill"]  # a prompt in parts and a seed of one's own end vLLM 0.32 on a CPU
    elif settings.fraction:
        words += ["--gpu-memory-utilization", str(settings.fraction)]
    if torch.cuda.is_available() and settings.shares_gpu:
        words += ["--enable-sleep-mode"]
    return [*words, *settings.arguments]


def environment(settings: Server, number: int) -> dict[str, str]:
    """The variables of server `number`.

    On a CPU it gets all cores, of which vLLM would leave one free, and Intel's OpenMP where it is there, whose idle
    threads sleep: on two cores this made a server of 30 M weights 1.8 times as fast (benchmarks/server.py).
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PYTHONSAFEPATH"] = "1"  # nothing of the working folder is imported; older interpreters lack the flag -P
    variables |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available():
        openmp = find_near(settings.python).parent.parent / "lib" / "libiomp5.so"
        preload = {"LD_PRELOAD": str(openmp.absolute())} if openmp.is_file() else {}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        variables = {"VLLM_CPU_OMP_THREADS_BIND": cores, **SLEEP, **preload, **variables}
    return variables | visible_gpus(settings, number)


def visible_gpus(settings: Server, number: int) -> dict[str, str]:
    """The variable by which server `number` sees its own GPUs alone; {} where it has none of its own."""
    if not settings.gpus:  # as this process counts them
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(settings.gpus) + 1)))
    mine = settings.gpus[number * settings.tensor_parallel :][: settings.tensor_parallel] or settings.gpus
    return {"CUDA_VISIBLE_DEVICES": ",".join(names.split(",")[gpu] for gpu in mine)}
