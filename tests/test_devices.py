"""Which devices do what: settings, launcher and machine come to one plan, or are refused in a line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import Run
from mtgrpo.config.compose import compose, parse, preset
from mtgrpo.config.experiment import Experiment
from mtgrpo.errors import ConfigError
from mtgrpo.parallel import Parallel, zero3
from mtgrpo.parallel.auto import AutoParallel
from mtgrpo.parallel.ddp import DDP
from mtgrpo.parallel.fsdp2 import FSDP2
from mtgrpo.parallel.launch import DOOR, Launch, read_launch
from mtgrpo.parallel.none import NoParallel
from mtgrpo.parallel.placement import Placement, settle
from mtgrpo.parallel.zero3 import OURS, Zero3
from mtgrpo.runtime import resources
from mtgrpo.stages.budget import forecast

PROJECT = Path(__file__).resolve().parent.parent
ASYNC, SERVER, KL = "rollout.max_staleness=1", "engine=server", "kl.coef=0.1"


def made(*words: str) -> Experiment:
    return preset("calculator", *words)


def settled(words: str = "", gpus: int = 0, **launch: Any) -> tuple[Parallel, Placement]:
    return settle(made(*words.split()), Launch(**launch), gpus)


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed."""
    monkeypatch.setattr(zero3, "refuse_without_package", lambda *_: None)


# --- the plan ---

ALL = tuple(range(16))


@pytest.mark.parametrize(
    ("gpus", "words", "train", "rollout"),
    [
        # nothing is said: one GPU does everything, whatever else there is
        *((gpus, words, (0,), (0,)) for gpus in (1, 2, 8, 16) for words in ("", ASYNC, SERVER, f"{SERVER} {ASYNC}")),
        # a way to share the work: all GPUs train, and in step with them sample
        *((gpus, "parallel=fsdp2", ALL[:gpus], (0,)) for gpus in (1, 2, 3, 4, 8, 16)),
        *((gpus, f"parallel=fsdp2 {SERVER}", ALL[:gpus], ALL[:gpus]) for gpus in (1, 2, 3, 4, 8, 16)),
        # ahead of them others sample
        (1, f"parallel=ddp {SERVER} {ASYNC}", (0,), (0,)),
        (2, f"parallel=ddp {SERVER} {ASYNC}", (0,), (1,)),
        (3, f"parallel=ddp {SERVER} {ASYNC}", (0, 1), (2,)),
        *((gpus, f"parallel=ddp {SERVER} {ASYNC}", ALL[: gpus // 2], ALL[gpus // 2 : gpus]) for gpus in (4, 8, 16)),
        (8, f"devices.train.num=2 {SERVER} {ASYNC}", (0, 1), (2, 3, 4, 5, 6, 7)),
        (8, f"devices.train.num=2 {ASYNC}", (0, 1), (2,)),
        # numbers
        (4, "devices.train.num=2", (0, 1), (0,)),
        (4, f"devices.train.num=2 {SERVER}", (0, 1), (0, 1)),
        (3, "devices.train.num=2 devices.rollout.num=1", (0, 1), (2,)),
        (8, f"devices.train.num=4 devices.rollout.num=2 {SERVER} {ASYNC}", ALL[:4], (4, 5)),
        (8, f"parallel=fsdp2 devices.rollout.num=2 {SERVER}", ALL[:6], (6, 7)),
        (2, "devices.rollout.num=1", (0,), (0,)),
        # names
        (4, "devices.train.ids=[3,1]", (3, 1), (3,)),
        (4, "devices.train.ids=[0,1] devices.rollout.ids=[2]", (0, 1), (2,)),
        (4, f"devices.rollout.ids=[0] {SERVER}", (1,), (0,)),
        (4, f"parallel=fsdp2 devices.rollout.ids=[1,2] {SERVER} {ASYNC}", (0, 3), (1, 2)),
        (2, f"devices.train.num=2 devices.rollout.ids=[0,1] {SERVER}", (0, 1), (0, 1)),
        (2, "devices.rollout.ids=[1]", (1,), (1,)),
        # servers that run already
        (4, f"parallel=ddp {SERVER} engine.url=[http://127.0.0.1:1]", ALL[:4], ()),
    ],
)
@pytest.mark.parametrize("compares", [False, True])
def test_plans(gpus: int, words: str, train: tuple[int, ...], rollout: tuple[int, ...], compares: bool) -> None:
    _, plan = settled(f"{words} {KL if compares else ''}", gpus)
    assert plan == Placement(len(train), train, rollout)
    assert plan.shared is bool(set(train) & set(rollout))


@pytest.mark.parametrize(
    ("gpus", "words", "train", "rollout", "reference"),
    [
        (2, "devices.reference.num=1", (0,), (0,), (1,)),
        (3, "devices.reference.num=2", (0,), (0,), (1, 2)),
        (4, "devices.train.num=2 devices.reference.num=1 devices.rollout.num=1", (0, 1), (2,), (3,)),
        (8, "devices.train.num=2 devices.reference.num=2 devices.rollout.num=1", (0, 1), (2,), (3, 4)),
        *((n, "parallel=fsdp2 devices.reference.num=1", ALL[: n - 1], (0,), (n - 1,)) for n in (2, 3, 4, 8, 16)),
        (3, f"parallel=ddp {SERVER} {ASYNC} devices.reference.num=1", (0,), (1,), (2,)),
        (8, f"parallel=ddp {SERVER} {ASYNC} devices.reference.num=2", (0, 1, 2), (3, 4, 5), (6, 7)),
        (16, f"parallel=fsdp2 {SERVER} {ASYNC} devices.reference.num=4", ALL[:6], ALL[6:12], ALL[12:]),
        (8, f"parallel=fsdp2 {SERVER} devices.rollout.num=2 devices.reference.num=1", ALL[:5], (5, 6), (7,)),
        (4, "devices.reference.ids=[0]", (1,), (1,), (0,)),
        (4, "devices.train.ids=[3,1] devices.reference.ids=[2]", (3, 1), (3,), (2,)),
        (4, f"parallel=fsdp2 {SERVER} {ASYNC} devices.rollout.ids=[0] devices.reference.ids=[1]", (2, 3), (0,), (1,)),
    ],
)
def test_plans_with_a_reference_apart(
    gpus: int, words: str, train: tuple[int, ...], rollout: tuple[int, ...], reference: tuple[int, ...]
) -> None:
    _, plan = settled(f"{words} {KL}", gpus)
    assert plan == Placement(len(train), train, rollout, reference)


@pytest.mark.parametrize(
    ("launch", "gpus", "words", "train", "rollout"),
    [
        ({"ranks": 2, "local": 2}, 2, "", (0, 1), (0,)),
        ({"ranks": 2, "local": 2}, 4, f"{SERVER} {ASYNC}", (0, 1), (2, 3)),
        ({"ranks": 2, "local": 2}, 4, f"{SERVER} devices.rollout.ids=[3]", (0, 1), (3,)),
        ({"ranks": 16, "local": 8}, 8, SERVER, ALL[:8], ALL[:8]),
        ({"ranks": 16}, 8, "devices.train.num=16", ALL[:8], (0,)),  # the number on this machine is not known
        ({"ranks": 2}, 8, "", (0, 1), (0,)),
        ({"ranks": 3}, 0, "", (), ()),
    ],
)
def test_plans_of_what_a_launcher_started(
    launch: dict[str, Any], gpus: int, words: str, train: tuple[int, ...], rollout: tuple[int, ...]
) -> None:
    assert settled(words, gpus, **launch)[1] == Placement(launch["ranks"], train, rollout)


@pytest.mark.parametrize("words", ["devices.train.num=2", "devices.train.num=2 devices.rollout.num=1", "parallel=none"])
def test_without_a_gpu_devices_are_processes(words: str) -> None:
    parallel, plan = settled(words)
    assert plan == Placement(1 if "none" in words else 2) and plan.shared
    assert parallel == (NoParallel() if "none" in words else DDP())
    assert settled("devices.train.num=2 parallel=fsdp2")[0] == FSDP2(reshard=False)
    assert settled(f"devices.reference.num=2 {KL}")[1] == Placement(reference=(0, 1))


def test_a_settled_plan_is_settled_again_as_it_is() -> None:
    experiment = made("devices.rollout.ids=[0]", SERVER, "parallel=fsdp2")
    _, plan = settle(experiment, Launch(), 4)
    experiment.devices = plan.settled(experiment.devices, launched=False)
    assert experiment.devices.train.ids == [1, 2, 3] and settle(experiment, Launch(), 4)[1] == plan
    plan = Placement(2, (0, 1), (0, 1))
    assert plan.settled(made().devices, launched=False).rollout.count is None
    assert plan.settled(made().devices, launched=True).train.ids is None
    apart = Placement(1, (0,), (0,), (1,)).settled(made(KL, "devices.reference.num=1").devices, launched=False)
    assert (
        apart.reference.numbers == [1] and Placement().settled(made().devices, launched=False).reference.count is None
    )


def test_what_is_said_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Placement(2, (0, 1), (2,))
    assert plan.describe(FSDP2(True)) == (
        "devices: GPUs 0, 1 train (parallel=fsdp2 parallel.reshard=true), GPU 2 sample"
    )
    assert "; 16 on all machines)" in Placement(16, ALL[:8]).describe(DDP())
    assert (
        Placement(1, (0,), (1,), (2, 3))
        .describe(DDP())
        .endswith("(parallel=ddp), GPUs 2, 3 for the reference, GPU 1 sample")
    )
    assert Placement(reference=(0,)).describe(NoParallel()).endswith("(parallel=none), 1 with the reference")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(resources, "cores", lambda: 6)
    assert Placement(2).describe(DDP()) == "devices: 2 processes train on the CPU, threads of each: 3 (parallel=ddp)"


# --- what contradicts itself, the launcher or the machine ---


@pytest.mark.parametrize(
    ("words", "gpus", "launch", "said"),
    [
        ("devices.train.num=3", 2, {}, r"devices\.train\.num=3: this machine has 2 GPUs"),
        ("devices.train.num=2 devices.rollout.num=1", 2, {}, r"devices\.rollout\.num=1 beside 2 that train, .* 2 GPUs"),
        ("devices.train.ids=[0,2]", 2, {}, r"devices\.train\.ids=\[0, 2\]: there is no GPU 2, the last is 1"),
        (
            f"devices.train.ids=[0,1] devices.rollout.ids=[1] {SERVER} {ASYNC}",
            2,
            {},
            r"devices\.rollout\.ids=\[1\]: GPU 1 trains too, .* rollout\.max_staleness",
        ),
        (f"devices.reference.num=1 {KL}", 1, {}, r"devices\.reference\.num=1: 0 of the 1 GPUs .* neither train nor"),
        (
            f"devices.reference.ids=[0] devices.train.ids=[0] {KL}",
            2,
            {},
            r"reference\.ids=\[0\]: GPU 0 trains or samples",
        ),
        (f"devices.reference.ids=[2] {KL}", 2, {}, r"devices\.reference\.ids=\[2\]: there is no GPU 2, the last is 1"),
        (f"devices.reference.ids=[0] {KL}", 0, {}, r"has no GPU, .*: set devices\.reference\.num=1"),
        ("devices.rollout.num=2", 4, {}, r"devices\.rollout asks for 2 devices, and the engine samples in one process"),
        ("devices.train.num=1 devices.rollout.num=1", 2, {}, r"samples in the process that trains, on GPU 0"),
        (f"{SERVER} engine.url=[http://s] devices.rollout.num=1", 2, {}, r"servers that somebody else started: leave"),
        ("devices.train.num=3", 0, {"ranks": 2}, r"devices\.train asks for 3 ranks, .* WORLD_SIZE=2: leave"),
        ("devices.train.ids=[0,1]", 2, {"ranks": 2}, r"devices\.train\.ids=\[0, 1\]: .* LOCAL_RANK; leave it out"),
        ("", 2, {"ranks": 4, "local": 4}, r"the launcher started 4 processes on a machine with 2 GPUs"),
        ("parallel=none", 2, {"ranks": 2}, r"parallel=none trains in one process, and WORLD_SIZE=2 asks for 2"),
        ("parallel=fsdp2", 0, {"ranks": 2, "parallel": Zero3()}, r"parallel=fsdp2, and accelerate .* zero3: leave"),
        (
            "parallel=fsdp2 parallel.reshard=false",
            0,
            {"ranks": 2, "parallel": FSDP2(True)},
            r"parallel\.reshard=False, and accelerate launch is configured for True",
        ),
        (
            "model.dtype=float32",
            2,
            {"ranks": 2, "precision": "bf16"},
            r"mixed_precision=bf16, and model\.dtype=float32: set model\.dtype=bfloat16",
        ),
        (
            "",
            0,
            {"ranks": 2, "precision": "bf16"},
            r"model\.dtype=auto, which is float32 on a CPU: set model\.dtype=bf",
        ),
        ("", 2, {"ranks": 2, "precision": "fp16"}, r"model\.dtype=auto: set model\.dtype=float16, or mixed_precision"),
        ("", 2, {"ranks": 2, "max_grad_norm": 0.5}, r"gradient_clipping=0\.5, and optimizer\.max_grad_norm=1"),
        (
            "rollout.prompts_per_step=1 rollout.group_size=2 devices.train.num=4",
            4,
            {},
            r"prompts_per_step=1 x rollout\.group_size=2: 2 conversations for 4 ranks",
        ),
        (
            "optimizer.offload=true devices.train.num=2 parallel=fsdp2",
            2,
            {},
            r"optimizer\.offload=true steps whole weights on the host, and parallel=fsdp2 divides them: leave it out",
        ),
    ],
)
def test_contradictions_are_refused_in_a_line(words: str, gpus: int, launch: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        settled(words, gpus, **launch)
    assert "\n" not in str(refused.value)


def test_what_a_launcher_says_and_nothing_contradicts_is_taken(deepspeed: None) -> None:
    assert settled("", 2, ranks=2)[0] == AutoParallel(), "which memory settles"
    assert settled("", 2, ranks=2, parallel=FSDP2(False))[0] == FSDP2(False)
    assert settled("parallel=fsdp2", 2, ranks=2, parallel=FSDP2(True), precision="bf16")[0] == FSDP2(True)
    assert settled("parallel=ddp model.dtype=float16", 2, ranks=2, precision="fp16")[0] == DDP()
    assert settled("", 2, ranks=2, parallel=Zero3(""), max_grad_norm=1.0)[0] == Zero3()
    assert settled("", 2)[0] == NoParallel()


QUANTIZED = ("model.name=smollm2", "model.lora.rank=8", "model.quantization=nf4")


def test_what_needs_whole_weights_is_refused_where_they_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    small = ("devices.train.num=2", "optimizer.kind=adamw_8bit")
    with pytest.raises(ConfigError, match=r"adamw_8bit steps whole weights, which parallel=fsdp2 divides: set .*adamw"):
        settled(" ".join((*small, "parallel=fsdp2")))
    assert settled(" ".join((*small, "parallel=ddp")))[0] == DDP()
    quantized = preset("pretrained_lora", *QUANTIZED, "devices.train.num=2", "parallel=fsdp2")
    with pytest.raises(ConfigError, match=r"quantization=nf4 .* parallel=fsdp2 cannot divide .*: set parallel=ddp"):
        settle(quantized, Launch(), 2)


@pytest.mark.parametrize(
    "word", ["optimizer.kind=muon", "sft.optimizer.kind=muon", "kl.coef=0.1", "model.dtype=float64"]
)
def test_what_deepspeed_does_otherwise_is_refused(word: str, deepspeed: None) -> None:
    fits = ["sft.optimizer.kind=adamw", "optimizer.kind=adamw", "parallel=zero3", "devices.train.num=2"]
    compared = preset("calculator_from_scratch", *fits, KL, "devices.reference.num=1")
    assert settle(compared, Launch(), 0) == (Zero3(), Placement(2, reference=(0,)))
    assert settle(preset("calculator_from_scratch", *fits), Launch(), 0)[0] == Zero3()
    with pytest.raises(ConfigError, match=f"^{word} .* parallel=zero3: set another, or parallel=fsdp2"):
        settle(preset("calculator_from_scratch", *fits, word), Launch(), 0)


# --- launchers ---


def test_what_torchrun_says() -> None:
    assert read_launch({}) == Launch()
    assert read_launch({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}) == Launch(16, 8)
    assert read_launch({DOOR: "4 7 8"}) == Launch(4)
    alone = read_launch({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    assert settle(preset("calculator", "devices.train.num=4", "parallel=fsdp2"), alone, 0)[1] == Placement(4)
    assert settle(preset("calculator", "parallel=fsdp2"), alone, 4)[1].train == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="WORLD_SIZE=two is no number of processes"):
        read_launch({"WORLD_SIZE": "two"})


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, "MULTI_CPU: set it to MULTI_GPU"),
        (FSDP | {"FSDP_VERSION": "1"}, "FSDP_VERSION=1, which is not followed here: set fsdp_version: 2"),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "set fsdp_offload_params: false"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "model.checkpointing=true"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "ZERO_STAGE=2, .*: set zero_stage: 3"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "offload by deepspeed_config_file"),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "batch.token_budget"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "choose distributed_type"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "model.dtype"),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "1,0"}, "CLIPPING=1,0, which is no number: set gradient_clip"),
    ],
)
def test_settings_of_accelerate_that_cannot_be_followed_are_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_launch(variables)


def test_what_accelerate_does_not_use_says_nothing() -> None:
    assert read_launch({"FSDP_VERSION": "1", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}) == Launch()
    assert read_launch(DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}).max_grad_norm == 0.5


# In a process of its own, for accelerate imports what warns: prints the variables that it would start processes with.
ASKS_ACCELERATE = """
import json, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
said = {}
for path in sys.argv[1:]:
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "-m", "x"]))
    assert args.multi_gpu or args.use_fsdp or args.use_deepspeed, "else it starts one process"
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    variables = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    said[path] = {**variables, "WORLD_SIZE": str(args.num_processes)}
print(json.dumps(said))
"""


def test_the_files_for_accelerate_lead_where_their_names_say(
    deepspeed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    files = sorted((PROJECT / "configs/accelerate").glob("*.yaml"))
    command = [sys.executable, "-c", ASKS_ACCELERATE, *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = {Path(path).stem: variables for path, variables in json.loads(done.stdout).items()}
    monkeypatch.chdir(PROJECT)
    expected = {
        "ddp": (AutoParallel(), DDP()),
        "multi_cpu": (AutoParallel(), DDP()),
        "fsdp2": (FSDP2(True), FSDP2(True)),
        "zero3": (Zero3("configs/deepspeed/zero3.json"),) * 2,
    }
    assert said.keys() == expected.keys()
    for name, (on_gpus, on_cpu) in expected.items():
        launch = read_launch(said[name])
        assert settle(made(), launch, 2) == (on_gpus, Placement(2, (0, 1), (0,))), name
        assert settle(made(), launch, 0) == (on_cpu, Placement(2)), name


@pytest.mark.real
@pytest.mark.parametrize("name", ["ddp", "multi_cpu", "fsdp2"])
def test_accelerate_launch_starts_what_its_file_says(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "asks.py").write_text(
        "import os\nfrom mtgrpo.config.compose import preset\nfrom mtgrpo.parallel.launch import read_launch\n"
        "from mtgrpo.parallel.placement import settle\n"
        "print(*settle(preset('calculator'), read_launch(os.environ), 0), flush=True)\n"
    )
    file = PROJECT / f"configs/accelerate/{name}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port=0"]
    done = subprocess.run([*command, "asks.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    way = FSDP2(True) if name == "fsdp2" else DDP()
    assert done.stdout.count(f"{way} {Placement(2)}") == 2, done.stdout


# --- DeepSpeed's file ---


@pytest.mark.parametrize("path", sorted((PROJECT / "configs/deepspeed").glob("*.json")))
def test_the_files_for_deepspeed_are_taken_whole(path: Path) -> None:
    assert Zero3(str(path)).settings() == json.loads(path.read_text())


def test_a_file_keeps_what_is_deepspeeds() -> None:
    assert Zero3().settings() == {}


@pytest.mark.parametrize("key", OURS)
def test_what_mtgrpo_says_itself_is_not_taken_from_a_file(key: str, tmp_path: Path) -> None:
    path, zero = tmp_path / "zero3.json", {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True}
    setting, empty = OURS[key]
    for value in empty:
        path.write_text(json.dumps({"zero_optimization": zero, key: value, "steps_per_print": 1}))
        expected = {"zero_optimization": {"stage": 3, "overlap_comm": True}, "steps_per_print": 1}
        assert Zero3(str(path)).settings() == expected
    path.write_text(json.dumps({"zero_optimization": zero, key: {"enabled": True}}))
    with pytest.raises(ConfigError, match=rf"deepspeed_config=\S+ says {key}: .*, which {setting} says here: leave it"):
        Zero3(str(path)).settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "stage: 3, and says None"), ('{"zero_optimization": {"stage": 2}}', "says 2"), ("{", "cannot be read")],
)
def test_another_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "zero3.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Zero3(str(path)).settings()


# --- the command ---


def typed(run: Run, *words: str) -> Sequence[str]:
    code, out, err = run("train", "--dry-run", *words)
    assert code == 0, err
    return out.splitlines()


def test_a_dry_run_says_who_trains(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "devices: 2 processes train on the CPU, threads of each: 1 (parallel=fsdp2 parallel.reshard=false)"
    assert line in typed(run, "parallel=fsdp2", "devices.train.num=2")
    assert not any("devices:" in line for line in typed(run))


def test_a_forecast_is_for_the_engine_that_a_run_would_choose() -> None:
    """It is the local one for a small model: of two GPUs that are free one samples."""
    ahead = preset("calculator_from_scratch", ASYNC, "engine=auto", "devices.train.num=2")
    said = forecast(ahead, Launch(), 4, 80 * 10**9)
    assert said[0] == "devices: GPUs 0, 1 train (parallel=ddp), GPU 2 sample"
    assert said[2].startswith("on each GPU that samples:\n") and len(said) == 3


def test_a_forecast_for_a_model_that_is_elsewhere_says_who_does_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = forecast(preset("gsm8k", "model.name=nobody/nothing", "engine=auto"), Launch(), 1, 80 * 10**9)
    assert said[0] == "devices: GPU 0 train (parallel=none), GPU 0 sample"
    assert said[1].startswith("memory: not planned, for model.name=nobody/nothing")


def test_what_is_measured_uses_no_devices_that_train(run: Run, place: Path) -> None:
    code, _, err = run("eval", "--dry-run", "model.name=smollm2", "parallel=ddp", "devices.train.num=2")
    assert code == 2 and "for training, and nothing is trained here" in err


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetCount_v2(self, count: Any) -> None:
            count._obj.value = 4

        def nvmlShutdown(self) -> None: ...

    monkeypatch.setattr(resources.ctypes, "CDLL", lambda _: Driver())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    counts = {None: 4, "": 0, "-1": 0, "2": 1, "3,GPU-8932f937": 2, "0,1,-1,2": 2}
    for named, count in counts.items():
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert resources.count_gpus() == count, named


# --- the page about them ---

PAGE = (PROJECT / "docs/many_devices.md").read_text()
CONSOLE = "".join(re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.M | re.S))


def test_the_commands_of_the_page_are_accepted(
    deepspeed: None, monkeypatch: pytest.MonkeyPatch, data_folder: Path
) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    monkeypatch.chdir(PROJECT)
    lines = CONSOLE.splitlines()
    assert len(lines) == 9
    for line in lines:
        launcher, _, words = re.split(r"\s+#", line)[0].partition("mtgrpo train")
        launch = {"": Launch(), "torchrun": Launch(2, 2), "accelerate": Launch(2, 2, Zero3())}
        started = launch[(launcher.split() or [""])[0]]
        recipe = [] if "recipe=" in words else ["recipe=calculator"]
        experiment = compose(parse([*recipe, *shlex.split(words)])).experiment
        assert settle(experiment, started, 8)[1].ranks == started.ranks or not started.ranks, line
        if file := re.search(r"--config_file (\S+)", launcher):
            assert (PROJECT / file[1]).is_file()


def test_what_the_page_says_is_printed_is() -> None:
    (line,) = re.findall(r"^    (devices: .*)$", PAGE, flags=re.M)
    assert line == Placement(4, (0, 1, 2, 3), (4, 5)).describe(FSDP2(True))
