"""What a rank's file of A1 has of the params, out of what the rank updates, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_distopt.hosts.era_a.buffers import BufferPlan, GradBuffer
from megatron_distopt.hosts.era_a.resplit import Place, fetch, send, stretches
from megatron_distopt.hosts.era_a.state import shards_of
from megatron_distopt.hosts.era_a.state_a1_facts import MAIN, Facts, Kind, kept, kind_of_run, kinds
from megatron_distopt.hosts.era_a.state_a1_positions import positions_in
from megatron_distopt.layout import ParamShard
from megatron_distopt.optimizer import MainRun

if TYPE_CHECKING:
    from megatron_distopt.hosts.era_a.optimizer import DistributedOptimizer

__all__ = ["Values", "from_files", "to_files"]

#: By param name, then key: 1-D, what this rank's file has of it.
Values = Mapping[str, Mapping[str, Tensor]]


@torch.no_grad()
def to_files(optimizer: DistributedOptimizer, facts: Facts) -> dict[str, dict[str, Tensor]]:
    """Collective where values travel: what this rank's file has, each tensor with memory of its own.

    Args:
        optimizer: whose state it is.
        facts: that all ranks agreed on, with `keys_of` each.
    """
    values: dict[str, dict[str, Tensor]] = {}
    for buffer in optimizer.grad_buffers:
        if buffer.plan.is_in_place:
            # A view would be saved with everything that it is a view of.
            values |= {
                shard.name: {key: run.cut(each, shard).clone() for key, each in kept(optimizer, run).items()}
                for run, shard in _owned_in(optimizer, buffer.plan)
            }
        else:
            values |= _sent(optimizer, buffer, facts)
    return values


def _sent(optimizer: DistributedOptimizer, buffer: GradBuffer, facts: Facts) -> dict[str, dict[str, Tensor]]:
    kind_of = kinds(optimizer)
    positions = list(positions_in(buffer.plan, kind_of))
    values: dict[str, dict[str, Tensor]] = {each.name: {} for each in positions}
    for key, dtype in _columns(buffer.plan, kind_of, facts):
        tensors = {run: kept(optimizer, run).get(key) for run in optimizer.sharded.runs}
        mine = {run: tensor for run, tensor in tensors.items() if tensor is not None and tensor.dtype is dtype}
        part = send(_places(optimizer, buffer.plan, mine), buffer.plan, dtype, buffer.grad.device)
        for each in positions:
            if facts.keys.get(each.kind, {}).get(key) is dtype:
                values[each.name][key] = part[each.shard.in_shard.as_slice()].clone()
    return values


@torch.no_grad()
def from_files(optimizer: DistributedOptimizer, values: Values, facts: Facts) -> dict[MainRun, dict[str, Tensor]]:
    """Collective where values travel: writes the main params, and returns the moments of every run.

    Args:
        optimizer: that takes the state.
        values: what this rank's file has.
        facts: that all ranks agreed on, with `keys` of what their files have.
    """
    taken: dict[MainRun, dict[str, Tensor]] = {run: {MAIN: run.main} for run in optimizer.sharded.runs}
    for buffer in optimizer.grad_buffers:
        if buffer.plan.is_in_place:
            for run, shard in _owned_in(optimizer, buffer.plan):
                for key, tensor in values[shard.name].items():
                    run.cut(_whole(taken, run, key), shard).copy_(tensor)
        else:
            _fetch(optimizer, buffer, values, facts, taken)
    return {run: {key: each for key, each in tensors.items() if key != MAIN} for run, tensors in taken.items()}


def _fetch(
    optimizer: DistributedOptimizer,
    buffer: GradBuffer,
    values: Values,
    facts: Facts,
    taken: Mapping[MainRun, dict[str, Tensor]],
) -> None:
    kind_of = kinds(optimizer)
    for key, dtype in _columns(buffer.plan, kind_of, facts):
        own = torch.zeros(buffer.plan.file_layout.shard_numel, dtype=dtype, device=buffer.grad.device)
        for each in positions_in(buffer.plan, kind_of):
            if key in values[each.name]:
                own[each.shard.in_shard.as_slice()] = values[each.name][key]
        into = {
            run: _whole(taken, run, key)
            for run, _ in _owned_in(optimizer, buffer.plan)
            if key in facts.keys.get(kind_of_run(run), {})
        }
        fetch(own, _places(optimizer, buffer.plan, into), buffer.plan)


def _whole(taken: Mapping[MainRun, dict[str, Tensor]], run: MainRun, key: str) -> Tensor:
    """Where a key of it is put; zeros at first, if it is none that the run has."""
    if key not in taken[run]:
        taken[run][key] = torch.zeros_like(run.main)
    return taken[run][key]


def _owned_in(optimizer: DistributedOptimizer, plan: BufferPlan) -> Iterator[tuple[MainRun, ParamShard]]:
    return (owned for name, owned in shards_of(optimizer.sharded).items() if name in plan.params)


def _columns(plan: BufferPlan, kind_of: Mapping[str, Kind], facts: Facts) -> list[tuple[str, torch.dtype]]:
    """What travels by itself: the same on all ranks, in the same order."""
    wanted = dict.fromkeys(kind_of[name] for name in plan.params if name in kind_of)
    return list(dict.fromkeys(column for kind in wanted for column in facts.keys.get(kind, {}).items()))


def _places(optimizer: DistributedOptimizer, plan: BufferPlan, tensors: Mapping[MainRun, Tensor]) -> list[Place]:
    """In all files, of what this rank owns of the runs that are given."""
    return [
        Place(rank, in_file, run.cut(tensors[run], shard)[in_shard.as_slice()])
        for run, shard in _owned_in(optimizer, plan)
        if run in tensors
        for rank, in_file, in_shard in stretches(plan, shard)
    ]
