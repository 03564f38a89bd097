"""The local engine as a server, with those of vLLM's paths that are asked for: `python -m mtgrpo.engines.local.serve`.

It has no model before it is told to read one, and then refuses to sample. Whoever reaches it controls it, but for the
pages of a browser on this machine.
"""

import argparse
import asyncio
import itertools
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import PreTrainedModel

from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.decoder import copy_bytes
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.engines.local.kv_cache import memory_bytes
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import load_model
from mtgrpo.model.settings import DType, Head, ModelSettings
from mtgrpo.runtime.files import strict_json
from mtgrpo.runtime.http import names_one_of, served_as
from mtgrpo.runtime.resources import keep_freed_memory
from mtgrpo.types import Completion, Finish, Sampling
from mtgrpo.weights.source import ModelWeights

SAMPLES = "/inference/v1/generate"
MAX_BODY_BYTES = 2**26
EVERY = ("0.0.0.0", "::", "")  # addresses that stand for all of this machine


class LocalServer:
    """Answers for an engine that begins when its first weights are read."""

    def __init__(self, settings: Local, dtype: DType, head: Head, longest_context: int) -> None:
        self._settings, self._dtype, self._head, self._longest = settings, dtype, head, longest_context
        self._engine: LocalEngine | None = None
        self._label = ""  # of its weights, as it was told
        self._count = itertools.count()
        self._turn = asyncio.Lock()  # of reading weights

    def routes(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """What it answers, by method and path: from JSON to JSON."""
        return {
            "GET /health": self._nothing,
            "GET /weight_info": self._nothing,
            "GET /v1/models": self._models,
            f"POST {SAMPLES}": self._generate,
            "POST /abort_requests": self._abort,
            "POST /reset_prefix_cache": self._nothing,  # new weights have done so
            "POST /update_weight_version": self._name,
            "POST /collective_rpc": lambda body: self._read(body["kwargs"]["weights_path"]),
            "POST /v1/load_lora_adapter": lambda body: self._read(body["lora_path"]),
            "POST /v1/unload_lora_adapter": self._nothing,
        }

    async def _nothing(self, body: Any) -> Any:
        return {"success": True}

    async def _models(self, body: Any) -> Any:
        return {"data": [{"id": "policy", "root": "", "max_model_len": self._longest}]}

    async def _name(self, body: Any) -> Any:
        self._label = str(body["new_version"])

    async def _abort(self, body: Any) -> Any:
        if self._engine:
            self._engine.interrupt()

    async def _read(self, folder: str) -> Any:
        """Take over the weights in `folder`, which are a model or an adapter; the first make the engine."""
        settings = ModelSettings(folder, self._dtype, head=self._head)
        async with self._turn:
            model = await asyncio.to_thread(load_model, settings, 0)
            if self._engine is None:
                fraction, memory = self._settings.memory_fraction, memory_bytes(model.device)
                share = cache_share(fraction, model, memory, model.device.type)
                engine = replace(self._settings, memory_fraction=share).start(ModelWeights(model), False, self._longest)
                engine.shares_weights = False  # later ones are copied into its own
                self._engine = engine
            else:
                await self._engine.load_weights(ModelWeights(model))

    async def _generate(self, body: Any) -> Any:
        if self._engine is None:
            raise web.HTTPServiceUnavailable(text="it has no weights yet")
        tokens, asked = body["token_ids"], body["sampling_params"]
        settings = {name: asked[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in asked}
        settings |= {"max_new_tokens": asked["max_tokens"], "stop_ids": asked.get("stop_token_ids", [])}
        label, sampling = self._label, Sampling(**settings)
        if (length := len(tokens) + sampling.max_new_tokens) > self._longest:
            raise web.HTTPBadRequest(text=f"{length} tokens are more than --max-model-len {self._longest}")
        key = Key(0, "", "", next(self._count))
        completion = await self._engine.answer(key, tokens, sampling, asked.get("seed", 0))
        answer = {"choices": [_choice(completion, sampling, label)]}
        if count := asked.get("prompt_logprobs"):
            answer["prompt_logprobs"] = self._likeliest(tokens, count)
        return answer

    def _likeliest(self, tokens: Sequence[int], count: int) -> list[Any]:
        """Log-probabilities of each of `tokens` but the first, and of the `count` likeliest in its place."""
        assert self._engine is not None
        rows = self._engine.logprobs(tokens)[:-1]
        listed = rows.topk(min(count, rows.shape[-1]), -1).indices.tolist()
        each = zip(rows, listed, tokens[1:], strict=True)
        return [None, *({t: {"logprob": row[t].item()} for t in {*best, own}} for row, best, own in each)]


def _choice(completion: Completion, sampling: Sampling, label: str) -> dict[str, Any]:
    cut = completion.finish is Finish.LENGTH and len(completion.tokens) < sampling.max_new_tokens
    kept: Sequence[array[int]] = completion.kept or [array("i")] * len(completion.tokens)
    each = zip(completion.tokens, completion.logprobs, kept, strict=True)
    content = [
        {"token_id": t, "logprob": p, "top_logprobs": [{"token_id": other, "logprob": 0.0} for other in others]}
        for t, p, others in each
    ]
    return {
        "token_ids": completion.tokens,
        "logprobs": {"content": content},
        "finish_reason": "abort" if cut else completion.finish.value,
        "weight_versions": [{"version": label}],
    }


def cache_share(fraction: float | None, model: PreTrainedModel, memory: int, device_type: str) -> float | None:
    """What is left for the KV cache of `fraction` of a device's `memory` bytes; without a GPU it is all for that.

    Of a GPU the weights take their part twice, while new ones are read, and so does the copy to decode from. Raises
    ConfigError where nothing is left.
    """
    if fraction is None or device_type != "cuda":
        return fraction
    taken = 2 * sum(weight.nbytes for weight in model.parameters()) + copy_bytes(model, device_type)
    if (left := fraction - taken / memory) <= 0:
        raise ConfigError(
            f"engine.memory_fraction={fraction:g} of {memory / 1e9:.0f} GB leaves nothing for the KV cache beside the "
            f"weights, {taken / 1e9:.1f} GB while new ones are read: set it higher"
        )
    return left


async def serve(server: LocalServer, arguments: argparse.Namespace) -> None:
    """Listen, until the process is ended."""
    known = server.routes()
    every = arguments.uds or arguments.host in EVERY  # its names are not known
    hosts = frozenset[str]() if every else served_as(arguments.host, arguments.port)

    async def respond(request: web.Request) -> web.Response:
        if not (every or names_one_of(hosts, request)):
            raise web.HTTPMisdirectedRequest(text=f"it is served as {', '.join(sorted(hosts))} alone")
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="it answers no page of a browser")
        if request.can_read_body and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="a body is application/json")
        answer = known.get(f"{request.method} {request.path}")
        if answer is None:
            raise web.HTTPNotFound
        body = await request.json() if request.can_read_body else None
        return web.Response(body=strict_json(await answer(body)), content_type="application/json")

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", respond)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=75)
    await runner.setup()
    if arguments.uds:
        await web.UnixSite(runner, arguments.uds).start()
    else:
        await web.TCPSite(runner, arguments.host, arguments.port).start()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """Serve as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", type=Path, help="the socket on which it listens")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", choices=[dtype.name for dtype in DType], default=DType.auto.name)
    parser.add_argument("--head", choices=[head.name for head in Head], default=Head.auto.name)
    parser.add_argument("--max-model-len", type=int, required=True, help="tokens of the longest context")
    parser.add_argument("--memory-fraction", type=float, help="of a GPU's for all, else for the cache")
    parser.add_argument("--no-compiled", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        keep_freed_memory()
    settings = Local(arguments.memory_fraction, compiled=not arguments.no_compiled)
    server = LocalServer(settings, DType[arguments.dtype], Head[arguments.head], arguments.max_model_len)
    asyncio.run(serve(server, arguments))


if __name__ == "__main__":
    main()
