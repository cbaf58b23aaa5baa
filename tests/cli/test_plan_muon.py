"""`plan --optimizer muon` against what real runs allocate and send, against the host's own matrices, and its times."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.cli import plan_build
from megatron_distopt.cli.plan_choice import plan_stage
from megatron_distopt.cli.plan_model import AUTO, TP_MODES, Choice, GptSizes, ParallelSizes, StageParam, stage_params
from megatron_distopt.cli.plan_times import Assumed, Machine, update_times_of
from megatron_distopt.comm import shared_memory
from megatron_distopt.layout import MatrixSpec
from megatron_distopt.optimizer.owners.muon import Muon
from megatron_distopt.optimizer.owners.muon_options import TorchMuonOptions
from tests.cli.test_plan_figures import GPT, WireCounter, held_by, real_model
from tests.support.live_bytes import LiveBytes
from tests.support.plan_command import BUCKET, SIZES, Output, document, refused, run
from tests.support.spawn import run_ranks

TIED = replace(GPT, kv_heads=2)
#: Options of real runs on so many ranks.
RUNS: dict[str, tuple[DistOptConfig, torch.dtype, Choice]] = {
    name: (
        DistOptConfig(accelerator="torch", bucket_size=size),
        getattr(torch, dtype),
        Choice(ParallelSizes(dp=2), short, bucket_size=size, optimizer="muon"),
    )
    for name, size, dtype, short in (
        ("bf16", BUCKET, "bfloat16", "bf16"),
        ("fp32, one bucket", None, "float32", "fp32"),
        ("fp32, small buckets", 10_000, "float32", "fp32"),
    )
}


#: Models whose matrices are compared with those of the host.
SHAPES = {
    "tp 2": (TIED, ParallelSizes(dp=1, tp=2)),
    "as llama": (replace(TIED, is_gated=True, is_rms=True, has_bias=False, is_tied=False), ParallelSizes(dp=1, tp=2)),
    "one head of keys a head": (replace(GPT, is_gated=True), ParallelSizes(dp=2)),
    "experts, ep 2": (replace(GPT, experts=4, expert_ffn=48), ParallelSizes(dp=2, ep=2)),
}


@dataclass(frozen=True)
class Used:
    """What a real step held and sent on one rank, in bytes."""

    main_nbytes: int
    moment_nbytes: int
    travel_nbytes: int
    update_nbytes: int


def matrices_in(model: torch.nn.Module, params: tuple[StageParam, ...]) -> dict[Any, Any]:
    known = {param.spec.name: param.matrices for param in params if param.matrices is not None}
    return {param: known[name] for name, param in model.named_parameters() if name in known}


def used_by(config: DistOptConfig, dtype: torch.dtype, choice: Choice) -> Used:
    """Collective: Muon and AdamW take two steps on a model of megatron-core."""
    model = real_model(TIED, choice.cut).to(dtype)
    matrices = matrices_in(model, stage_params(TIED, choice.cut, 0, "bfloat16"))
    rest = [param for param in model.parameters() if param not in matrices]
    groups = [
        {"params": [param for param in rest if param.ndim > 1]},
        {"params": [param for param in rest if param.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = distribute(model, [Muon(list(matrices), matrices), torch.optim.AdamW(groups)], config)
    inner: Any = optimizer.sharded.inner
    step = inner._muon.step
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(param.float() ** 2).sum() for param in model.parameters()]).sum().backward()
        wire, live = WireCounter(choice.cut.dp), LiveBytes()
        inner._muon.step = partial(_watched, step, wire, live)
        optimizer.step()
    mains = [main for group in inner.param_groups for main in group["params"]]
    moments = [each for state in inner.state.values() for each in state.values() if torch.is_tensor(each)]
    main_nbytes = 0 if dtype is torch.float32 else held_by(mains)
    return Used(main_nbytes, held_by(moments), sum(wire.sent.values()), live.most)


def _watched(step: Callable[[Any], Any], wire: WireCounter, live: LiveBytes, closure: Any) -> Any:
    with wire, live:
        return step(closure)


def hosts_matrices(gpt: GptSizes, cut: ParallelSizes, mode: str) -> dict[str, MatrixSpec]:
    """Those that a run with our Muon in megatron-core has."""
    from megatron_distopt.hosts.megatron_core import muon

    model, request = real_model(gpt, cut), muon.MuonRequest(TorchMuonOptions(), "qkv", mode, is_hosts=False)
    named = [(name, param) for name, param in model.named_parameters() if muon._is_for_muon(name, param, request)]
    return {name: muon._matrices_of(name, param, request, [model]) for name, param in named}


def on_ranks(rank: int, size: int) -> dict[str, Any]:
    # What ranks of one machine hand each other through memory nobody can count; messages carry the same.
    shared_memory.may_share_memory = lambda: False
    found: dict[str, Any] = {name: used_by(*run) for name, run in RUNS.items()}
    pairs = itertools.product(SHAPES.items(), TP_MODES)
    return found | {f"{name}, {mode}": hosts_matrices(*shape, mode) for (name, shape), mode in pairs}


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, seconds=300.0)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("rank", [0, 1])
def test_plan_of_muon_when_compared_with_a_real_run_then_its_bytes_are_those(
    name: str, rank: int, real: list[dict[str, Any]]
) -> None:
    plan, used = plan_stage(TIED, RUNS[name][2], 0, rank), real[rank][name]
    assert plan.footprint.main_nbytes == used.main_nbytes
    assert plan.footprint.moment_nbytes == used.moment_nbytes
    assert plan.parts[0].work.sent_nbytes == used.travel_nbytes > 0
    assert plan.footprint.matrices_nbytes == used.update_nbytes


@pytest.mark.parametrize("mode", TP_MODES)
@pytest.mark.parametrize("name", SHAPES)
def test_plan_of_muon_when_compared_with_megatron_core_then_its_matrices_are_those(
    name: str, mode: str, real: list[dict[str, Any]]
) -> None:
    gpt, cut = SHAPES[name]
    known = {param.spec.name: param.matrices_over(cut.tp, mode) for param in stage_params(gpt, cut, 0, "float32")}
    planned = {name: spec for name, spec in known.items() if spec is not None}
    found = real[0][f"{name}, {mode}"]
    assert planned.keys() == found.keys()
    for each, spec in planned.items():
        assert _view(spec) == _view(found[each]), each
        # Stride, which says in what order a matrix is put together, changes no figure.
        assert spec.cut == (found[each].cut and replace(found[each].cut, stride=1)), each


def _view(spec: MatrixSpec) -> tuple[Any, ...]:
    return spec.rows, spec.cols, spec.sizes, spec.repeats


def test_plan_of_muon_when_a_rank_orthogonalizes_then_the_costliest_one_says_how_long() -> None:
    """On a machine whose links and memory take no time."""
    quick = Machine(device_bytes_per_second=1e30, flops_per_second=1e9)
    choice = Choice(ParallelSizes(dp=4), bucket_size=BUCKET, optimizer="muon")
    plans = [plan_stage(GPT, choice, 0, rank) for rank in range(4)]
    flops = [plan.parts[0].work.flops for plan in plans]
    whole = plan_stage(GPT, replace(choice, cut=ParallelSizes(dp=1)), 0)
    assert sum(flops) == whole.parts[0].work.flops
    seconds = [update_times_of(plan, Assumed(1e30, machine=quick)).seconds for plan in plans]
    assert seconds == pytest.approx([max(flops) / 1e9] * 4)


def test_plan_of_muon_when_the_link_is_slow_then_the_rank_that_sends_most_says_how_long() -> None:
    quick = Machine(device_bytes_per_second=1e30, flops_per_second=1e30)
    choice = Choice(ParallelSizes(dp=4), bucket_size=BUCKET, optimizer="muon")
    plans = [plan_stage(GPT, choice, 0, rank) for rank in range(4)]
    most = max(plan.parts[0].work.sent_nbytes for plan in plans)
    assert update_times_of(plans[0], Assumed(1e6, machine=quick)).seconds == pytest.approx(most / 1e6)
    assert plans[0].sent_nbytes - plans[0].parts[0].work.sent_nbytes == sum(
        each.sent_nbytes for _, each in plans[0].collectives
    )


def test_plan_of_muon_when_tensor_parallel_ranks_gather_matrices_then_each_does_all_of_the_work() -> None:
    one, joined, apart = (
        plan_stage(GPT, Choice(ParallelSizes(dp=2, tp=tp), optimizer="muon", muon_tp_mode=mode), 0).parts[0]
        for tp, mode in ((1, "duplicated"), (2, "duplicated"), (2, "blockwise"))
    )
    assert sum(each.cost for each in joined.owners.owners) == sum(each.cost for each in one.owners.owners)
    assert joined.work.gathered_nbytes > 0 == apart.work.gathered_nbytes
    assert apart.balance.most_cost < joined.balance.most_cost
    assert apart.work.blocks_nbytes < joined.work.blocks_nbytes


@pytest.mark.parametrize(
    ("choice", "rank"),
    [
        (Choice(ParallelSizes(dp=3, tp=2, pp=2), "fp16", bucket_size=BUCKET), 11),
        (Choice(ParallelSizes(dp=8, tp=2, ep=4), bucket_size=AUTO), 13),
        (Choice(ParallelSizes(dp=5), "fp32", bucket_size=BUCKET), 4),
    ],
)
def test_build_of_muon_when_a_rank_is_built_then_it_holds_what_was_planned(choice: Choice, rank: int) -> None:
    stage, data_rank = choice.cut.place_of(rank)
    plan = plan_stage(
        replace(GPT, experts=8 if choice.cut.ep > 1 else 0), replace(choice, optimizer="muon"), stage, data_rank
    )
    built = plan_build.build(plan, rank)
    for kind in ("param_nbytes", "grad_nbytes", "main_nbytes", "moment_nbytes", "num_flat_params"):
        assert getattr(built, kind) == getattr(plan.footprint, kind), kind
    adam = plan_stage(replace(GPT, experts=8 if choice.cut.ep > 1 else 0), choice, stage, data_rank)
    assert plan.footprint.moment_nbytes < adam.footprint.moment_nbytes


def test_command_when_both_optimizers_are_planned_then_each_has_a_row_and_muon_its_imbalance(
    config: Path, capsys: Output
) -> None:
    words = ("--config", config, "--dp", 4, "--optimizer", "adam", "muon", "--backward-ms", 1)
    adam, muon = document(capsys, *words)["choices"]
    assert (adam["optimizer"], muon["optimizer"]) == ("adam", "muon")
    assert adam["stages"][0]["matrices"] == []
    [found] = muon["stages"][0]["matrices"]
    assert 1 <= found["least_cost_imbalance"] <= found["cost_imbalance"] < 1.2
    status, lines, err = run(capsys, *words[:4], "--optimizer", "muon")
    assert (status, err) == (0, "")
    labels = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    assert {"matrices", "busiest rank", "orthogonalize", "for the update"} <= set(labels)


def test_command_when_muon_is_fitted_into_a_memory_then_its_one_form_is_tried(config: Path, capsys: Output) -> None:
    fits = document(capsys, "--config", config, "--dp", 2, "--optimizer", "adam", "muon", "--memory", 1)["fits"]
    [muon] = [fit for fit in fits if fit["optimizer"] == "muon"]
    assert (muon["fits"], muon["options"]) == (True, "--distopt-optimizer muon")
    assert len(fits) > 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((*SIZES, "--optimizer", "muon"), ("heads", "--heads")),
        ((*SIZES, "--heads", 4, "--optimizer", "muon", "--exp-avg-dtype", "bfloat16"), ("exp_avg bfloat16", "adam")),
        ((*SIZES, "--heads", 4, "--optimizer", "muon", "--offload-fraction", 0.5), ("0.5 on the host", "adam")),
    ],
)
def test_command_when_muon_cannot_be_planned_then_it_says_what_to_write(
    words: tuple[object, ...], named: tuple[str, ...], capsys: Output
) -> None:
    said = refused(capsys, *words)
    assert all(each in said for each in named)


def test_command_when_another_optimizer_is_asked_for_then_nobody_knows_what_it_keeps(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        run(capsys, *SIZES, "--optimizer", "torch.optim:Adafactor")
    assert "its class alone knows" in " ".join(capsys.readouterr().err.split())
