"""Builds on the meta device what training would build on one rank, by the same code.

The groups are those of torch's fake process group, so this process can be any rank of any number. Building asks no
other rank. The moments come with the first update.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from rich.console import RenderableType
from torch.nn import Parameter

from megatron_distopt.buffers import ShardedBuffer, allocate_grads, move_into_buffer
from megatron_distopt.cli.plan_choice import PlannedBuffer, StagePlan, layout_of, plan_stage
from megatron_distopt.cli.plan_model import Choice, GptSizes, ParallelSizes, StageParam
from megatron_distopt.cli.show import counted, rows, size_text, time_text, titled
from megatron_distopt.comm import Group, fake_group, fake_world
from megatron_distopt.config import DistOptConfig
from megatron_distopt.layout import BufferLayout
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner import InParts
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.owners.muon_options import TorchMuonOptions
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, choose_muon
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan, measure_memory
from megatron_distopt.optimizer.step import advance, write_model

_META = torch.device("meta")
#: Other sources of Adam have kernels for real devices alone; it holds what the fused one holds.
_CONFIG = DistOptConfig(adam="torch_foreach", accelerator="torch")


@dataclass(frozen=True)
class Seconds:
    """The time that each part of building took.

    Args:
        groups: joining torch's fake process group and making the data-parallel groups of the rank.
        params: making the params of the rank, which in training the model does.
        layout: putting them into buffers and buckets.
        optimizer: buffers, flat params and the inner optimizer.
        update: its first step, which makes the moments.
    """

    groups: float
    params: float
    layout: float
    optimizer: float
    update: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.groups + self.params + self.layout + self.optimizer + self.update


@dataclass(frozen=True)
class Built:
    """The measurements of one rank that was built.

    Args:
        num_params: tensors that the model registers.
        numel: elements in them.
        num_flat_params: flat params, which the inner optimizer updates.
        seconds: how long building took.
        process_nbytes: how much building raised the peak memory of this process.
        param_nbytes, grad_nbytes, main_nbytes, moment_nbytes: read off the tensors that were built.
    """

    num_params: int
    numel: int
    num_flat_params: int
    seconds: Seconds
    process_nbytes: int
    param_nbytes: int
    grad_nbytes: int
    main_nbytes: int
    moment_nbytes: int

    @property
    def lasting_nbytes(self) -> int:
        """The sum over the kinds."""
        return self.param_nbytes + self.grad_nbytes + self.main_nbytes + self.moment_nbytes


def build(plan: StagePlan, rank: int, clock: Callable[[], float] = time.perf_counter) -> Built:
    """Builds the rank that was planned, measures it, and frees it.

    Args:
        plan: the plan of the rank.
        rank: its number among all ranks.
        clock: returns seconds since any moment.

    Raises:
        ConfigError: torch.distributed is initialised already.
    """
    _warm_up()
    return _build(plan, rank, clock)


def _build(plan: StagePlan, rank: int, clock: Callable[[], float]) -> Built:
    before, start = _peak_nbytes(), clock()
    with fake_world(rank, plan.choice.cut.num_ranks) as everybody:
        groups = [_group_of(part, plan.choice.cut, rank) for part in plan.parts]
        optimizers, marks = _optimizers(plan, groups, everybody, clock)
    seconds = Seconds(*(stop - begin for begin, stop in itertools.pairwise([start, *marks])))
    return _built(plan, optimizers, seconds, _peak_nbytes() - before)


def _group_of(part: PlannedBuffer, cut: ParallelSizes, rank: int) -> Group:
    """Returns the data-parallel group, or the group of ranks that hold the same experts."""
    return fake_group(cut.data_ranks(rank) if part.layout.num_shards == cut.dp else cut.expert_ranks(rank))


def _optimizers(
    plan: StagePlan, groups: Sequence[Group], everybody: Group, clock: Callable[[], float]
) -> tuple[list[ShardedOptimizer], list[float]]:
    """Returns one optimizer for each buffer, and the times at which each part of building was done."""
    marks = [clock()]
    named = [{param.spec.name: _meta_param(param) for param in part.params} for part in plan.parts]
    marks.append(clock())
    layouts = [layout_of(part.params, plan.choice, group.size) for part, group in zip(plan.parts, groups, strict=True)]
    marks.append(clock())
    buffers = [_buffer(*each, plan.choice) for each in zip(groups, named, layouts, strict=True)]
    steps = [_step_plan(part, plan.choice, group, everybody) for part, group in zip(plan.parts, groups, strict=True)]
    optimizers = [ShardedOptimizer([buffer], step) for buffer, step in zip(buffers, steps, strict=True)]
    marks.append(clock())
    for optimizer, part in zip(optimizers, plan.parts, strict=True):
        if isinstance(optimizer.inner, InParts):  # no matrix can travel over torch's fake process group
            optimizer.inner.leave_out(part.matrices)
        optimizer.attach_grads()
        advance(optimizer, 1.0)
        write_model(optimizer)
    return optimizers, [*marks, clock()]


@cache
def _warm_up() -> None:
    """torch imports a good part of itself when the first optimizer is made, which takes more than a second."""
    _build(plan_stage(GptSizes(layers=1, hidden=64, vocab=128), Choice(ParallelSizes(dp=1)), 0), 0, time.perf_counter)


def _built(plan: StagePlan, optimizers: Sequence[ShardedOptimizer], seconds: Seconds, process_nbytes: int) -> Built:
    held = [measure_memory(optimizer) for optimizer in optimizers]
    return Built(
        len(plan.params),
        plan.numel,
        sum(len(optimizer.flat_params) for optimizer in optimizers),
        seconds,
        process_nbytes,
        param_nbytes=sum(each.param_nbytes for each in held),
        grad_nbytes=sum(each.grad_nbytes for each in held),
        main_nbytes=sum(each.main_nbytes for each in held),
        moment_nbytes=sum(each.moment_nbytes for each in held),
    )


def _buffer(data: Group, params: dict[str, Parameter], layout: BufferLayout, choice: Choice) -> ShardedBuffer:
    grad_dtype = torch.float32 if choice.has_fp32_grads else next(iter(params.values())).dtype
    param = move_into_buffer(params, layout)
    grad, _ = allocate_grads(params, layout, grad_dtype)
    return ShardedBuffer(layout, data.rank, grad, param)


def _step_plan(part: PlannedBuffer, choice: Choice, data: Group, everybody: Group) -> StepPlan:
    config = replace(
        _CONFIG,
        main_params_dtype=choice.main_params_dtype,
        exp_avg_dtype=choice.exp_avg_dtype,
        exp_avg_sq_dtype=choice.exp_avg_sq_dtype,
    )
    inner, scale = choose_inner(config, _META.type), make_loss_scale(config, _META)
    if part.matrices:
        # Its parts of a matrix that others share stand for the whole of it: nothing that lasts depends on that.
        inner = choose_muon(inner, Matrices(part.matrices, lambda name: data), config, ())
    return StepPlan(_groups(part), inner, config, scale, lambda: everybody, data.size)


def _groups(part: PlannedBuffer) -> tuple[ParamGroup, ...]:
    """Returns the param groups of Megatron: matrices decay, vectors do not; and those of Muon."""
    muon = vars(TorchMuonOptions())
    options = {(True, False): {}, (False, False): {"weight_decay": 0.0}, (True, True): muon}
    names = {key: tuple(name for name, of in part.group_of.items() if of == key) for key in options}
    return tuple(ParamGroup(options[key], names[key]) for key in options if names[key])


def _meta_param(param: StageParam) -> Parameter:
    dtype: torch.dtype = getattr(torch, param.spec.dtype)
    return Parameter(torch.empty(param.spec.shape, dtype=dtype, device=_META))


def _peak_nbytes() -> int:
    """Returns the peak memory of this process. Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def described(rank: int, plan: StagePlan, built: Built) -> RenderableType:
    """Compares a rank that was built with its plan, for people."""
    cut = plan.choice.cut
    stage, data_rank = cut.place_of(rank)
    where = f"stage {stage}, data-parallel rank {data_rank} of {cut.dp}"
    title = f"built without memory: rank {rank} of {cut.num_ranks:,} ({where})"
    groups = f"torch's fake process group of {counted(cut.num_ranks, 'rank')}, data-parallel ones of {cut.dp:,}"
    updated = f"the inner optimizer updates {counted(built.num_flat_params, 'flat param')}"
    cells = [
        ("groups", groups),
        ("tensors", f"{counted(built.num_params, 'param')} of {built.numel:,} elements; {updated}"),
    ]
    for kind in ("param", "grad", "main", "moment"):
        found, planned = getattr(built, f"{kind}_nbytes"), getattr(plan.footprint, f"{kind}_nbytes")
        said = "as planned" if found == planned else f"planned were {planned:,}"
        cells.append((f"{kind} bytes", f"{found:,}: {said}"))
    seconds = built.seconds
    steps = {"groups": seconds.groups, "params": seconds.params, "layout": seconds.layout}
    steps |= {"buffers and optimizer": seconds.optimizer, "first update": seconds.update}
    text = ", ".join(f"{name} {time_text(each)}" for name, each in steps.items())
    cells.append(("time", f"{time_text(seconds.total)}: {text}"))
    cells.append(("memory", f"the peak of this process rose by {size_text(built.process_nbytes)}"))
    return titled(title, rows(cells))
