"""`mtgrpo export CHECKPOINT --to hf|peft|merged --out DIR`: a checkpoint as a model for others, with a model card.

`mtgrpo export RUN --to atif|inspect --out DIR`: the conversations of a step, for the viewers of others.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtgrpo.commands.prompted import find_prompted, in_a_line, write_prompted
from mtgrpo.commands.trajectory_files import write_conversations
from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.model.settings import FROM_SCRATCH, SHIPPED
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.runtime.files import put_whole
from mtgrpo.runtime.text import show
from mtgrpo.stages.resume import final_results
from mtgrpo.weights.saved import STATE, TRAINING_FILES, Checkpoint, newest_of, read_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TO = {
    "hf": "all weights, for transformers and servers",
    "peft": "the adapter of a LoRA run alone",
    "merged": "the base with the adapter added to its weights",
}
OF_STEPS = {
    "atif": "the conversations of a step, a file each, in the Agent Trajectory Interchange Format",
    "inspect": "the conversations of a step as a log of inspect_ai",
}
_UNKNOWN = "\nWhat tools and prompts it was trained with is not known: its run's folder has no conversations.\n"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = (_ADAPTER_CONFIG, "adapter_model.safetensors")
_SHOWN = ("recipe", "task", "environment", "reward", "algorithm", "advantage", "seed", "optimizer.lr", "kl.coef")


def main(arguments: Sequence[str]) -> int:
    """Write the folder and say where it is. Raises ConfigError for a damaged checkpoint or one that does not fit."""
    parser = Arguments("mtgrpo export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step_000025, or RUN")
    forms = "; ".join(f"{name}: {what}" for name, what in {**TO, **OF_STEPS}.items())
    parser.add_argument("--to", choices=[*TO, *OF_STEPS], default="hf", help=forms)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that is not there yet")
    parser.add_argument(
        "--step", type=int, metavar="N", help="with --to atif or inspect: of training; default: the newest there are"
    )
    parser.add_argument("--dry-run", action="store_true", help="verify the checkpoint, write nothing")
    args = parser.parse_args(arguments)
    out: Path = args.out
    if out.exists():
        raise ConfigError(f"--out {out}: it is there already; choose another name")
    if args.step is not None and args.to not in OF_STEPS:
        raise ConfigError(f"--step {args.step} chooses conversations: with --to {args.to} name the checkpoint itself")
    if args.to in OF_STEPS:
        count = write_conversations(args.checkpoint, args.step, args.to, out, args.dry_run)
        print(f"{count} conversations: {out}" if not args.dry_run else f"{count} conversations would be written")
        return 0
    point = read_checkpoint(newest_of(args.checkpoint) or args.checkpoint)
    adapted = _ADAPTER_CONFIG in point.files
    if adapted != (args.to != "hf"):
        held, other = ("an adapter", "--to peft or --to merged") if adapted else ("all weights", "--to hf")
        raise ConfigError(f"--to {args.to}: {point.path} holds {held}; give {other}")
    try:
        about = card(point, args.to, out.name)
        tokenizer = load_tokenizer(str(point.path))
        settings = {key: str(value) for key, value in point.state["settings"].items()}
        found = find_prompted(point.path.parent.parent, tokenizer, settings)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{point.path}: its {STATE} is not that of a run") from error
    if args.dry_run:
        print(f"no fault found, and nothing was written; it would be {TO[args.to]}, of step {point.step}")
        return 0
    left_out = (*TRAINING_FILES, *(_ADAPTER if args.to == "merged" else ()))
    with put_whole(out) as partial:
        partial.mkdir()
        for name in point.files:
            if name not in left_out:
                shutil.copyfile(point.path / name, partial / name)
        if args.to == "merged":
            merged(point.path).save_pretrained(partial)
        use, left = write_prompted(partial, found, tokenizer, settings) if found else (_UNKNOWN, _UNKNOWN.strip())
        (partial / "README.md").write_text(about + use, encoding="utf-8")
    show("\n".join(filter(None, [f"{TO[args.to]}: {out}", left])))
    return 0


def merged(path: Path) -> PreTrainedModel:
    """The base model with the adapter in `path` added to its weights, in fp32. Raises ConfigError without its base."""
    import torch  # noqa: PLC0415  with the others it takes seconds, which no wrong word should
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from mtgrpo.model.lora import find_adapter  # noqa: PLC0415

    config = find_adapter(str(path))
    assert config is not None
    base = str(config.base_model_name_or_path)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter's base {base} cannot be loaded ({error}); put that model back") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        return PeftModel.from_pretrained(model, str(path)).merge_and_unload()  # pyright: ignore[reportCallIssue]


def card(point: Checkpoint, to: str, name: str) -> str:
    """The README.md of a model: what it was trained from, how, and how well it did."""
    settings, state = point.state["settings"], point.state
    base = str(settings.get("model.name", ""))
    lines = ["---", f"library_name: {'peft' if to == 'peft' else 'transformers'}", "pipeline_tag: text-generation"]
    of_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base)
    if of_hub and base not in (*FROM_SCRATCH, SHIPPED) and not Path(base).exists():
        lines.append(f"base_model: {base}")
    tags, how = "reinforcement-learning, grpo, mtgrpo", f"step {point.step} of reinforcement learning"
    if "stream" not in state:
        tags, how = "mtgrpo", f"step {int(state['sft']['step'])} of the warm start, supervised"
    lines += [f"tags: [{tags}]", "---", "", f"# {name}", ""]
    lines.append(f"{in_a_line(base) or 'A model'}, trained with mtgrpo: {how}.")
    success = {int(step): value for step, value in state["success"].items()}
    if after := final_results(point.path.parent.parent, point.step):  # measured when it was saved already
        success[point.step] = after["eval/success/after"]
    if success:
        lines += ["", "| step | held-out success |", "| --- | --- |"]
        lines += [f"| {step} | {value:.3f} |" for step, value in sorted(success.items()) if step <= point.step]
    if "eval/greedy/after" in after:
        lines += ["", f"Of its likeliest tokens alone: {after['eval/greedy/after']:.3f}."]
    lines += ["", "| setting | value |", "| --- | --- |"]
    folders = re.compile(r"(?!\s)[^,\[]*/(?=[^/]*\.(py:|yaml))")
    shown = {key: folders.sub("", settings.get(key, "")) for key in _SHOWN}
    lines += [f"| `{key}` | `{in_a_line(value)}` |" for key, value in shown.items() if value]
    return "\n".join(lines) + "\n"
