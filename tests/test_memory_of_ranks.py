"""The memory plan of several devices: what is divided among ranks, what is not, and which way that leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from mtgrpo.engines import Phase
from mtgrpo.engines.server import Server
from mtgrpo.errors import ConfigError
from mtgrpo.memory import Plan, estimate, plan, plan_reference, plan_sampling, planned
from mtgrpo.model.skeleton import Skeleton
from mtgrpo.parallel import Parallel
from mtgrpo.parallel.auto import AutoParallel
from mtgrpo.parallel.ddp import DDP
from mtgrpo.parallel.fsdp2 import FSDP2
from mtgrpo.parallel.none import NoParallel
from mtgrpo.parallel.placement import Placement
from mtgrpo.parallel.zero3 import Zero3
from test_memory import GB, SIZES, experiment, named, row

MODEL = ("model.checkpointing=false", "kl.coef=0.1", "optimizer.kind=adamw")
APART = Placement(4, (0, 1, 2, 3), (4,))  # no GPU both trains and samples


def of(folder: Path, parallel: Parallel, placement: Placement = APART, *words: str) -> Plan:
    made = replace(experiment(folder, *MODEL, *words), parallel=parallel)
    return estimate(made, 80 * GB, "cuda", placement=placement)


def test_what_is_divided_and_what_is_whole(tmp_path: Path) -> None:
    alone = of(tmp_path, NoParallel(), Placement(1, (0,), (1,)))
    names = ("weights", "optimiser state", "reference", "gradients")
    amounts = {name: row(alone, name).bytes for name in names if name != "weights"}
    whole = next(r.bytes for r in alone.rows if r.name == "weights")
    assert of(tmp_path, DDP()).rows == alone.rows, "each rank has everything"
    for way in (FSDP2(True), FSDP2(False), Zero3()):
        found = of(tmp_path, way)
        assert next(r.bytes for r in found.rows if r.name == "weights") == whole // 4
        for name, amount in amounts.items():
            more = whole if isinstance(way, Zero3) and name == "optimiser state" else 0  # it steps a copy
            assert row(found, name).bytes == (amount + more) // 4, name
        unchanged = [r for r in alone.rows if r.name.startswith(("activations", "head", "keys", "libraries"))]
        assert unchanged and all(r in found.rows for r in unchanged)


def test_what_deepspeed_offloads_is_not_on_the_device(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 22, "num_attention_heads": 32}
    large = named(tmp_path / "large", LlamaConfig(**SIZES | sizes, architectures=["LlamaForCausalLM"]))
    words = (f"model.name={large}", "model.checkpointing=true", "batch.token_budget=1024")
    made = experiment(tmp_path, *words, "environment.max_context_length=1024", "optimizer.kind=adamw")
    path = Path(__file__).resolve().parent.parent / "configs" / "deepspeed" / "zero3_offload.json"
    ways = [replace(made, parallel=Zero3(deepspeed_config=file)) for file in ("", str(path))]
    kept, offloaded = (estimate(made, 24 * GB, "cuda", placement=APART) for made in ways)
    held = ("weights", "optimiser state", "gradients")
    assert not kept.fits and offloaded.fits and offloaded.loading > 18 * GB
    assert {row.name for row in kept.rows} - {row.name for row in offloaded.rows} == {*held}
    on_cpu = [estimate(made, 24 * GB, "cpu", placement=APART).rows for made in ways]
    assert on_cpu[0] == on_cpu[1]


def test_weights_that_are_put_together_are_counted_while_a_rank_trains(tmp_path: Path) -> None:
    together = "weights and gradients put together"
    unsharded, sharded = row(of(tmp_path, FSDP2(False)), together), row(of(tmp_path, FSDP2(True)), together)
    skeleton = Skeleton(experiment(tmp_path, *MODEL).model, "cuda")
    whole = sum(weight.nbytes for weight in skeleton.model.parameters())
    assert unsharded.bytes == 2 * whole - whole // 2, "with the share, weights and gradients are whole"
    layers = {name: w.nbytes for name, w in skeleton.model.named_parameters() if ".layers." in name}
    layer = sum(size for name, size in layers.items() if ".layers.0." in name)
    assert sharded.bytes == 2 * (whole - sum(layers.values())) + 3 * layer
    assert unsharded.phases == sharded.phases == (Phase.training,)
    assert not any(r.name == together for r in of(tmp_path, FSDP2(True), Placement(1, (0,), (1,))).rows)


def test_the_first_device_also_holds_what_samples_beside_the_ranks(tmp_path: Path) -> None:
    both, apart = of(tmp_path, DDP(), Placement(2, (0, 1), (0,))), of(tmp_path, DDP(), Placement(2, (0, 1), (2,)))
    whole = next(r.bytes for r in apart.rows if r.name == "weights")
    assert row(both, "weights, to sample").bytes == whole and row(both, "KV cache").bytes > 0
    assert not any(r.name.startswith(("weights, to sample", "KV")) for r in apart.rows)
    alone = of(tmp_path, NoParallel(), Placement(1, (0,), (0,)))
    assert not any(r.name == "weights, to sample" for r in alone.rows), "it samples from the trained tensors themselves"


def test_memory_settles_how_ranks_share(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
    large = f"model.name={named(tmp_path / 'large', LlamaConfig(**SIZES | sizes, architectures=['LlamaForCausalLM']))}"

    def ways(gigabytes: float, parallel: Parallel) -> Parallel:
        made = replace(experiment(tmp_path, *MODEL, large), parallel=parallel)
        return plan(made, int(gigabytes * GB), "cuda", placement=APART).experiment.parallel

    peaks = [of(tmp_path, way, APART, large).peak / 0.92 / GB for way in (DDP(), FSDP2(False), FSDP2(True))]
    ddp, unsharded, sharded = peaks
    assert sharded < unsharded < ddp
    less, least = (ddp + unsharded) / 2, (unsharded + sharded) / 2
    assert ways(1.01 * ddp, AutoParallel()) == DDP()
    assert ways(less, AutoParallel()) == ways(less, FSDP2()) == FSDP2(False)
    assert ways(least, AutoParallel()) == ways(least, FSDP2()) == FSDP2(True)
    with pytest.raises(ConfigError, match=r"can be used: set parallel=fsdp2 \(\d\.\d\d GB\)"):
        ways(less, DDP())
    with pytest.raises(ConfigError, match=r"can be used: set parallel\.reshard=true \(\d\.\d\d GB\)"):
        ways(least, FSDP2(False))
    with pytest.raises(ConfigError, match=r"choose a smaller model; .*, or divide it: parallel=fsdp2 on more GPUs"):
        ways(1.0, AutoParallel())


def test_what_cannot_be_divided_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(experiment(tmp_path, *MODEL), parallel=AutoParallel())

    def refuse(*_: object) -> None:
        raise ConfigError("it cannot")

    monkeypatch.setattr(FSDP2, "check_ranks", refuse)
    with pytest.raises(ConfigError, match=r"needs .* GB at its peak"):
        plan(made, GB, "cuda", placement=APART)
    assert plan(made, 80 * GB, "cuda", placement=APART).experiment.parallel == DDP()


def test_a_device_that_samples_alone_has_a_plan_of_its_own(tmp_path: Path) -> None:
    made = replace(experiment(tmp_path, *MODEL), parallel=AutoParallel())
    settled, said = planned(made, APART, 80 * GB)
    assert settled.parallel == DDP() and len(said) == 3
    assert said[0] == "devices: GPUs 0, 1, 2, 3 train (parallel=ddp), GPU 4 sample"
    assert "KV cache" not in said[1] and said[2].startswith("on each GPU that samples:") and "KV cache" in said[2]
    with pytest.raises(ConfigError, match="to sample, and of 1"):
        plan_sampling(settled, GB)
    assert len(planned(made, Placement(2, (0, 1), (0,)), 80 * GB)[1]) == 2


def test_a_reference_on_gpus_of_its_own_is_planned_there(tmp_path: Path) -> None:
    made = replace(experiment(tmp_path, *MODEL), parallel=FSDP2(True))
    apart = replace(APART, reference=(5, 6))
    assert not any(r.name == "reference" for r in of(tmp_path, FSDP2(True), apart).rows)
    whole = sum(w.nbytes for w in Skeleton(made.model, "cuda").model.parameters())
    one, two = (plan_reference(made, 80 * GB, devices) for devices in (1, 2))
    for found, shares in ((one, 1), (two, 2)):
        assert next(r for r in found.rows if r.name == "weights").bytes == whole // shares
        assert found.loading == (10**9 + whole) * (shares > 1)
        assert not any(r.name.startswith(("gradients", "optimiser")) for r in found.rows)
    scoring = row(one, f"activations, {made.batch.tokens:,} tokens").bytes
    training = of(tmp_path, DDP(), APART)
    assert 0 < scoring < row(training, f"activations, {made.batch.tokens:,} tokens").bytes
    assert planned(made, apart, 80 * GB)[1][2].startswith("on each GPU for the reference:\nGB ")
    with pytest.raises(ConfigError, match=r"GB for the reference, and of .*: set batch\.token_budget lower, or leave"):
        plan_reference(made, int(one.peak / 0.93), 1)


def test_a_server_on_gpus_of_its_own_must_have_room_for_its_weights(tmp_path: Path) -> None:
    made = experiment(tmp_path, *MODEL, "engine=server", "engine.memory_fraction=null")
    served = replace(made, engine=made.engine.placed((1, 2), False), parallel=DDP())
    assert row(plan_sampling(served, 80 * GB), "server's weights and KV cache").bytes == 72 * GB
    skeleton = Skeleton(made.model, "cuda")
    least = 2 * sum(weight.numel() for weight in skeleton.model.parameters())
    with pytest.raises(
        ConfigError, match=r"does not hold a server's weights, .*: set it higher, or engine\.tensor_par"
    ):
        plan_sampling(served, int(least / 0.91))
    halved = replace(served, engine=Server(tensor_parallel=2).placed((1, 2), False))
    with pytest.raises(ConfigError, match="to sample"):  # the weights are no longer what is too much
        plan_sampling(halved, int(least / 0.91))


def test_a_model_must_fit_whole_before_it_is_divided(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 24}
    name = named(tmp_path / "deep", LlamaConfig(**SIZES | sizes, architectures=["LlamaForCausalLM"]))
    small = ("batch.token_budget=256", "environment.max_context_length=256", "model.checkpointing=true")
    words = (f"model.name={name}", *small)
    placement = Placement(64, tuple(range(64)), (64,))
    found = of(tmp_path, FSDP2(True), placement, *words)
    weights = sum(w.nbytes for w in Skeleton(found.experiment.model, "cuda").model.parameters())
    assert found.loading == 10**9 + weights > found.peak
    assert of(tmp_path, DDP(), placement, *words).loading == 0
    assert plan(found.experiment, int(found.loading / 0.91), "cuda", placement=placement).fits
    with pytest.raises(ConfigError, match=r"is loaded whole before parallel=fsdp2 divides it, in \d\.\d\d GB, and of"):
        plan(found.experiment, int(found.loading / 0.93), "cuda", placement=placement)
