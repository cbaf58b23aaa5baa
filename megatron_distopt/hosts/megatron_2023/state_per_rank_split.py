"""What a rank's file of per-rank files has of the params, out of what the rank updates, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan, GradBuffer
from megatron_distopt.hosts.megatron_2023.resplit import Place, fetch, send, stretches
from megatron_distopt.hosts.megatron_2023.state import shards_of
from megatron_distopt.hosts.megatron_2023.state_per_rank_facts import MAIN, Facts, Kind, kept, kind_of_flat, kinds
from megatron_distopt.hosts.megatron_2023.state_per_rank_positions import positions_in
from megatron_distopt.layout import ParamShard
from megatron_distopt.optimizer import FlatParam

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

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
                shard.name: {key: flat.cut(each, shard).clone() for key, each in kept(optimizer, flat).items()}
                for flat, shard in _owned_in(optimizer, buffer.plan)
            }
        else:
            values |= _sent(optimizer, buffer, facts)
    return values


def _sent(optimizer: DistributedOptimizer, buffer: GradBuffer, facts: Facts) -> dict[str, dict[str, Tensor]]:
    kind_of = kinds(optimizer)
    positions = list(positions_in(buffer.plan, kind_of))
    values: dict[str, dict[str, Tensor]] = {each.name: {} for each in positions}
    for key, dtype in _columns(buffer.plan, kind_of, facts):
        tensors = {flat: kept(optimizer, flat).get(key) for flat in optimizer.sharded.flat_params}
        mine = {flat: tensor for flat, tensor in tensors.items() if tensor is not None and tensor.dtype is dtype}
        part = send(_places(optimizer, buffer.plan, mine), buffer.plan, dtype, buffer.grad.device)
        for each in positions:
            if facts.keys.get(each.kind, {}).get(key) is dtype:
                values[each.name][key] = part[each.shard.in_shard.as_slice()].clone()
    return values


@torch.no_grad()
def from_files(optimizer: DistributedOptimizer, values: Values, facts: Facts) -> dict[FlatParam, dict[str, Tensor]]:
    """Collective where values travel: writes the main params, and returns the moments of every flat param.

    Args:
        optimizer: that takes the state.
        values: what this rank's file has.
        facts: that all ranks agreed on, with `keys` of what their files have.
    """
    taken: dict[FlatParam, dict[str, Tensor]] = {flat: {MAIN: flat.main} for flat in optimizer.sharded.flat_params}
    for buffer in optimizer.grad_buffers:
        if buffer.plan.is_in_place:
            for flat, shard in _owned_in(optimizer, buffer.plan):
                for key, tensor in values[shard.name].items():
                    flat.cut(_whole(taken, flat, key), shard).copy_(tensor)
        else:
            _fetch(optimizer, buffer, values, facts, taken)
    return {flat: {key: each for key, each in tensors.items() if key != MAIN} for flat, tensors in taken.items()}


def _fetch(
    optimizer: DistributedOptimizer,
    buffer: GradBuffer,
    values: Values,
    facts: Facts,
    taken: Mapping[FlatParam, dict[str, Tensor]],
) -> None:
    kind_of = kinds(optimizer)
    for key, dtype in _columns(buffer.plan, kind_of, facts):
        own = torch.zeros(buffer.plan.file_layout.shard_numel, dtype=dtype, device=buffer.grad.device)
        for each in positions_in(buffer.plan, kind_of):
            if key in values[each.name]:
                own[each.shard.in_shard.as_slice()] = values[each.name][key]
        into = {
            flat: _whole(taken, flat, key)
            for flat, _ in _owned_in(optimizer, buffer.plan)
            if key in facts.keys.get(kind_of_flat(flat), {})
        }
        fetch(own, _places(optimizer, buffer.plan, into), buffer.plan)


def _whole(taken: Mapping[FlatParam, dict[str, Tensor]], flat: FlatParam, key: str) -> Tensor:
    """Where a key of it is put; zeros at first, if it is none that the flat param has."""
    if key not in taken[flat]:
        taken[flat][key] = torch.zeros_like(flat.main)
    return taken[flat][key]


def _owned_in(optimizer: DistributedOptimizer, plan: BufferPlan) -> Iterator[tuple[FlatParam, ParamShard]]:
    return (owned for name, owned in shards_of(optimizer.sharded).items() if name in plan.params)


def _columns(plan: BufferPlan, kind_of: Mapping[str, Kind], facts: Facts) -> list[tuple[str, torch.dtype]]:
    """What travels by itself: the same on all ranks, in the same order."""
    wanted = dict.fromkeys(kind_of[name] for name in plan.params if name in kind_of)
    return list(dict.fromkeys(column for kind in wanted for column in facts.keys.get(kind, {}).items()))


def _places(optimizer: DistributedOptimizer, plan: BufferPlan, tensors: Mapping[FlatParam, Tensor]) -> list[Place]:
    """In all files, of what this rank owns of the flat params that are given."""
    return [
        Place(rank, in_file, flat.cut(tensors[flat], shard)[in_shard.as_slice()])
        for flat, shard in _owned_in(optimizer, plan)
        if flat in tensors
        for rank, in_file, in_shard in stretches(plan, shard)
    ]
