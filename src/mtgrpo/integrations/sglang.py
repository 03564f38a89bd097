"""SGLang by its own interface, `/generate`. Written against its published source, 2026-10; not tried against a server.

Log-probabilities of sampled tokens are those of the distribution at the temperature, before top-p, top-k and min-p:
these are refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtgrpo.engines.server.replica import ANSWER_TIMEOUT_S, FINISHES, HEAT, Answered, LostError, Replica
from mtgrpo.errors import EngineError
from mtgrpo.types import Sampling


class SGLang(Replica):
    """An SGLang server that is running already. It has no sleep here and takes no adapters."""

    generates = "/generate"

    async def check(self, config: Mapping[str, Any], longest: int) -> None:
        info = await self.ask("GET", "/get_server_info")
        self._check_length(info.get("context_length") or longest, longest, "--context-length")

    async def sample(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> Answered:
        settings = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": seed % 2**31,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # the stop tokens are those above
        }
        meta = await self._generate(tokens, settings)
        listed, finish = meta["output_token_logprobs"], FINISHES[meta["finish_reason"]["type"]]
        return Answered([entry[1] for entry in listed], [entry[0] for entry in listed], [], finish)

    async def likeliest(self, tokens: Sequence[int], count: int) -> list[dict[int, float]]:
        settings = {"max_new_tokens": 1, "temperature": HEAT, "ignore_eos": True}
        meta = await self._generate(tokens, settings, logprob_start_len=0, top_logprobs_num=count)
        rows = zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
        (sampled,) = meta["output_token_logprobs"]
        return [*({entry[1]: entry[0] for entry in (*top, own)} for own, top in rows), {sampled[1]: sampled[0]}]

    async def _generate(self, tokens: Sequence[int], settings: dict[str, Any], **more: Any) -> Any:
        body = {"input_ids": list(tokens), "sampling_params": settings, "return_logprob": True, **more}
        meta = (await self.ask("POST", self.generates, body, timeout_s=None))["meta_info"]
        if meta["weight_version"] != self._label:
            raise LostError(f"{self.name} sampled with weights {meta['weight_version']} instead of {self._label}")
        return meta

    async def abort(self) -> None:
        await self.ask("POST", "/abort_request", {"abort_all": True}, ANSWER_TIMEOUT_S)

    async def reload(self, folder: Path) -> None:
        """See `Replica.reload`; the caches are flushed with it."""
        answer = await self.ask("POST", "/update_weights_from_disk", {"model_path": str(folder)})
        if not answer["success"]:
            raise EngineError(f"{self.name} could not read {folder}: {answer['message']}")
