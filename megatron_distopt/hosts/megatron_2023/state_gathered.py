"""The gathered file of a running fork: gathered and written by the first data-parallel rank, read and scattered by it.

See formats/megatron_2023/gathered.py for the layout. A run with buckets of its own has another order than the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from torch import Tensor

from megatron_distopt.comm import Group, exchange, gather_to_first, raise_together, scatter_from_first
from megatron_distopt.formats.megatron_2023.gathered import (
    MAIN_IN_FILE,
    GatheredFile,
    experts_filename,
    gathered_state,
    moments_in_file,
    open_gathered,
)
from megatron_distopt.formats.megatron_2023.plain import Origin
from megatron_distopt.hosts.megatron_2023.buffers import GradBuffer
from megatron_distopt.hosts.megatron_2023.resplit import shards_of
from megatron_distopt.hosts.megatron_2023.state import (
    check_moments,
    check_step,
    install_state,
    updates_so_far,
)
from megatron_distopt.layout import Bucket, BufferLayout, ParamShard, Span
from megatron_distopt.optimizer import FlatParam, ShardedOptimizer, moments_of

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = ["load_gathered", "save_gathered"]

_REMEDY = (
    "Load a checkpoint of this model at the same tensor- and pipeline-parallel size, or start from its weights with "
    "--no-load-optim"
)
_PERMUTED = "Start from the weights with --no-load-optim, or convert the run before its first mixed save"


@dataclass(frozen=True)
class _Part:
    """What goes into one file: the buffers of one group of ranks.

    Args:
        filename: experts are not in the fork's layout and have a file of their own.
        group: ranks; the first one writes and reads.
        buffers: sharded over it.
    """

    filename: str
    group: Group
    buffers: tuple[GradBuffer, ...]


@torch.no_grad()
def save_gathered(optimizer: DistributedOptimizer, filename: str) -> None:
    """Collective: gathers this pipeline stage and tensor-parallel slice on its first rank, which writes the file.

    Raises:
        OSError: on the rank that cannot write; the others raise RanksDisagreeError instead of waiting for it.
    """
    parts = _parts(optimizer, filename)
    states = [_state_of(optimizer, part) for part in parts]
    raise_together(lambda: _write_all(parts, states), optimizer.everyone)


def _state_of(optimizer: DistributedOptimizer, part: _Part) -> dict[Any, Any]:
    buffers = {
        (buffer.plan.chunk, buffer.plan.dtype): _gather(optimizer, buffer, part.group) for buffer in part.buffers
    }
    return gathered_state(buffers, updates_so_far(optimizer), optimizer.sharded.num_skipped)


def _write_all(parts: Sequence[_Part], states: Sequence[Mapping[Any, Any]]) -> None:
    for part, state in zip(parts, states, strict=True):
        if part.group.rank == 0:
            _write(state, part.filename)


@torch.no_grad()
def load_gathered(optimizer: DistributedOptimizer, filename: str, head_step: int | None) -> None:
    """Collective: the first ranks read their files, every rank gets its shards; the params are not gathered yet.

    Args:
        optimizer: takes the state over.
        filename: as the fork names it.
        head_step: the update count that came with `load_state_dict`.

    Raises:
        CheckpointError: on a rank that cannot read its file, before anything is changed.
        RanksDisagreeError: on the others, with that rank's text.
    """
    parts, everyone = _parts(optimizer, filename), optimizer.everyone
    files = raise_together(lambda: [_read(optimizer, part) for part in parts], everyone)
    told = [exchange(_counts_in(file), part.group)[0] for file, part in zip(files, parts, strict=True)]
    known = head_step if head_step is not None else max((step for step, _ in told if step is not None), default=None)
    step = raise_together(lambda: check_step(optimizer, known), everyone)
    moments: dict[FlatParam, dict[str, Tensor]] = {flat: {} for flat in optimizer.sharded.flat_params}
    for part, file in zip(parts, files, strict=True):
        for buffer in part.buffers:
            _scatter(optimizer, buffer, part.group, file, moments)
    install_state(optimizer, moments, step)
    optimizer.sharded.num_skipped = max((num_skipped for _, num_skipped in told), default=0)


def _parts(optimizer: DistributedOptimizer, filename: str) -> list[_Part]:
    by_group: dict[Group, list[GradBuffer]] = {}
    for buffer in optimizer.grad_buffers:
        by_group.setdefault(buffer.plan.group, []).append(buffer)
    return [_Part(_name_for(filename, optimizer, group), group, tuple(buffers)) for group, buffers in by_group.items()]


def _name_for(filename: str, optimizer: DistributedOptimizer, group: Group) -> str:
    return filename if group == optimizer.start.data else experts_filename(filename, group.global_rank(0))


def _gather(optimizer: DistributedOptimizer, buffer: GradBuffer, group: Group) -> dict[str, Tensor] | None:
    keys = set().union(*exchange(_moment_keys(optimizer.sharded), group))
    moments = moments_in_file(keys, is_adam=optimizer.sharded.plan.choice.is_adam)
    carrier = _carrier(group)
    wholes = {
        key: gather_to_first(_shard(optimizer, buffer, key, carrier), carrier.group) for key in (MAIN_IN_FILE, *moments)
    }
    return {key: _in_file(whole.cpu(), buffer) for key, whole in wholes.items() if whole is not None} or None


def _moment_keys(optimizer: ShardedOptimizer) -> set[str]:
    """What the inner optimizer keeps for each element, as far as this rank can tell."""
    return {key for flat in optimizer.flat_params for key in moments_of(optimizer.inner, flat.main)}


def _shard(optimizer: DistributedOptimizer, buffer: GradBuffer, key: str, carrier: _Carrier) -> Tensor:
    """fp32 1-D [shard_numel]; padding is zero."""
    shard_tensor = carrier.empty_shard(buffer)
    for name, (flat, shard) in shards_of(optimizer.sharded).items():
        source = flat.main if key == MAIN_IN_FILE else moments_of(optimizer.sharded.inner, flat.main).get(key)
        if source is not None and buffer.holds(name):
            _place_of(shard, buffer, shard_tensor).copy_(flat.cut(source, shard))
    return shard_tensor


def _scatter(
    optimizer: DistributedOptimizer,
    buffer: GradBuffer,
    group: Group,
    file: GatheredFile | None,
    moments: Mapping[FlatParam, dict[str, Tensor]],
) -> None:
    tensors = None if file is None else _tensors_of(buffer, file)
    keys = exchange(tuple(tensors) if tensors is not None else (), group)[0]
    carrier = _carrier(group)
    for key in keys:
        shard_tensor = carrier.empty_shard(buffer)
        by_rank = None if tensors is None else _by_rank(tensors[key], buffer).to(shard_tensor.device)
        scatter_from_first(by_rank, shard_tensor, carrier.group)
        for name, (flat, shard) in shards_of(optimizer.sharded).items():
            if buffer.holds(name):
                is_main = key == MAIN_IN_FILE
                whole = flat.main if is_main else moments[flat].setdefault(key, torch.zeros_like(flat.main))
                flat.cut(whole, shard).copy_(_place_of(shard, buffer, shard_tensor))


def _place_of(shard: ParamShard, buffer: GradBuffer, shard_tensor: Tensor) -> Tensor:
    """Where a rank has it among its shards of all buckets, one after the other."""
    layout = buffer.plan.layout
    before = layout.buckets[shard.bucket].in_buffer.start // layout.num_shards
    return shard_tensor[shard.in_shard.moved_by(before).as_slice()]


def _in_file(whole: Tensor, buffer: GradBuffer) -> Tensor:
    """From the order of ranks, each with its shards of all buckets, to that of the fork's file."""
    layout = buffer.plan.layout
    file = torch.zeros(buffer.plan.file_layout.numel, dtype=whole.dtype)
    for bucket, values in _by_bucket(whole, layout):
        flat = values.flatten()
        for name, in_bucket in _slots_of(bucket, layout):
            file[buffer.plan.in_file[name].as_slice()] = flat[in_bucket.as_slice()]
    return file


def _by_rank(file: Tensor, buffer: GradBuffer) -> Tensor:
    """The inverse of `_in_file`, padded for this number of ranks."""
    layout = buffer.plan.layout
    whole = torch.zeros(layout.numel, dtype=torch.float32)
    for bucket, place in _by_bucket(whole, layout):
        values = torch.zeros(bucket.in_buffer.numel, dtype=torch.float32)
        for name, in_bucket in _slots_of(bucket, layout):
            values[in_bucket.as_slice()] = file[buffer.plan.in_file[name].as_slice()]
        place.copy_(values.view_as(place))
    return whole


def _by_bucket(whole: Tensor, layout: BufferLayout) -> Iterator[tuple[Bucket, Tensor]]:
    """[ranks, elements of a shard] of each bucket."""
    by_rank = whole.view(layout.num_shards, layout.shard_numel)
    for bucket in layout.buckets:
        start, stop = bucket.in_buffer.start // layout.num_shards, bucket.in_buffer.stop // layout.num_shards
        yield bucket, by_rank[:, start:stop]


def _slots_of(bucket: Bucket, layout: BufferLayout) -> Iterator[tuple[str, Span]]:
    for slot in layout.slots_of_bucket[bucket.index]:
        yield slot.name, slot.in_buffer.relative_to(bucket.in_buffer.start)


def _read(optimizer: DistributedOptimizer, part: _Part) -> GatheredFile | None:
    """On the first rank of the part's group, checked; None elsewhere."""
    if part.group.rank != 0:
        return None
    what = f"optimizer file {part.filename}"
    file = open_gathered(part.filename, Origin(what, _REMEDY))
    is_adam = optimizer.sharded.plan.choice.is_adam
    for buffer in part.buffers:
        moments = _tensors_of(buffer, file).keys() - {MAIN_IN_FILE}
        # Adam's are there even before the first step, so a file without them has lost them.
        check_moments(optimizer, what, moments, may_be_none=not is_adam)
        file.check_order(is_mixed=_mixes_dtypes(optimizer, buffer), remedy=_PERMUTED)
    return file


def _tensors_of(buffer: GradBuffer, file: GatheredFile) -> dict[str, Tensor]:
    return file.tensors(buffer.plan.chunk, buffer.plan.dtype, buffer.plan.file_numel)


def _mixes_dtypes(optimizer: DistributedOptimizer, buffer: GradBuffer) -> bool:
    names = [{name for name in group.names if buffer.holds(name)} for group in optimizer.sharded.plan.groups]
    return any(
        len([sharded for sharded in buffer.sharded if any(sharded.holds(name) for name in group)]) > 1
        for group in names
    )


def _counts_in(file: GatheredFile | None) -> tuple[int | None, int]:
    """Updates, where they are counted, and steps that were skipped."""
    return (None, 0) if file is None else (file.step, file.num_skipped)


def _write(state: Mapping[Any, Any], filename: str) -> None:
    """Writes the file under another name and renames it, so that it is complete or not there."""
    unfinished = f"{filename}.unfinished"
    torch.save(state, unfinished)
    os.replace(unfinished, filename)


@dataclass(frozen=True)
class _Carrier:
    """Who moves the shards, and whether they have to be on the CPU for that."""

    group: Group
    on_cpu: bool

    def empty_shard(self, buffer: GradBuffer) -> Tensor:
        """fp32 zeros, 1-D [shard_numel]."""
        device = torch.device("cpu") if self.on_cpu else buffer.grad.device
        return torch.zeros(buffer.plan.layout.shard_numel, dtype=torch.float32, device=device)


def _carrier(group: Group) -> _Carrier:
    """The group itself, or the fork's gloo group of the same ranks, which needs no memory on the device."""
    if "gloo" in group.backend or group.size == 1:
        return _Carrier(group, on_cpu=True)
    gloo = getattr(mpu, "get_data_parallel_group_gloo", None)
    if gloo is not None and group == Group.of(mpu.get_data_parallel_group()):
        return _Carrier(Group.of(gloo()), on_cpu=True)
    return _Carrier(group, on_cpu=False)
