"""Values on their way between two splits of one grad buffer: that of the run, and that of the fork's files.

In the files each rank has one part of the whole buffer, in the fork's order, which a per-rank file holds and a gathered
file has one after the other. A run with the fork's one bucket has the same split, and nothing travels. With other
buckets each rank lays its values into zeros, at their places in all parts, and a reduce-scatter adds them up; as
integers, so that every bit arrives. The way back is an all-gather, of which each rank takes its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.comm import exchange
from megatron_distopt.comm.collectives import all_gather, reduce_scatter
from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan, GradBuffer
from megatron_distopt.hosts.megatron_2023.built import BuiltOptimizer
from megatron_distopt.layout import BufferLayout, ParamShard, Span, owned_shards
from megatron_distopt.optimizer.inner import moments_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: Elements that travel at once, all ranks' together, so that it takes little memory.
PIECE_NUMEL = 1 << 26
#: By param name, then key: 1-D, what this rank's file has of it.
Values = Mapping[str, Mapping[str, Tensor]]


class Kind(NamedTuple):
    """What tells which keys a param has: the number of its group, and whether it has a main param."""

    group: int
    has_main: bool


@dataclass(frozen=True)
class Facts:
    """What a rank knows of the whole state.

    Args:
        keys: dtypes by kind and key.
        step: updates so far; None where they are not counted.
        groups: as they were saved, without params, by number of the run's group.
    """

    keys: Mapping[Kind, Mapping[str, torch.dtype]]
    step: int | None
    groups: Mapping[int, Mapping[str, Any]]


def shards_of(optimizer: ShardedOptimizer) -> dict[str, tuple[FlatParam, ParamShard]]:
    """By param name what this rank owns; at most one shard a param, because each lies in one bucket."""
    return {shard.name: (flat, shard) for flat in optimizer.flat_params for shard in flat.plan.shards}


def agree(optimizer: BuiltOptimizer, facts: Facts) -> Facts:
    """Collective where values travel: the facts of all ranks together. Elsewhere a rank needs no facts but its own."""
    if all(buffer.plan.is_in_place for buffer in optimizer.grad_buffers):
        return facts
    return joined(exchange(facts, optimizer.start.data))


def joined(by_rank: Sequence[Facts]) -> Facts:
    """The facts of all ranks together."""
    keys: dict[Kind, dict[str, torch.dtype]] = {}
    groups: dict[int, Mapping[str, Any]] = {}
    for each in by_rank:
        for kind, dtypes in each.keys.items():
            keys.setdefault(kind, {}).update(dtypes)
        groups = {**each.groups, **groups}
    # A rank without anything has counted nothing.
    step = max((each.step for each in by_rank if each.keys and each.step is not None), default=None)
    return Facts(keys, step, dict(sorted(groups.items())))


def keys_of(optimizer: BuiltOptimizer, *, with_all_mains: bool = False) -> dict[Kind, dict[str, torch.dtype]]:
    """What this rank keeps for each element of params of each kind.

    Args:
        optimizer: whose state it is.
        with_all_mains: whether the files have fp32 params too, which are their own main params.
    """
    keys: dict[Kind, dict[str, torch.dtype]] = {}
    for flat in optimizer.sharded.flat_params:
        dtypes = {key: tensor.dtype for key, tensor in kept(optimizer, flat).items()}
        if not (flat.owns_memory or with_all_mains):
            del dtypes[MAIN]
        keys.setdefault(kind_of_flat(flat), {}).update(dtypes)
    return keys


def kinds(optimizer: BuiltOptimizer) -> dict[str, Kind]:
    """The kind of every param that is updated, on this rank or another, by name."""
    named = optimizer.start.named
    return {
        name: Kind(number, named[name].dtype is not torch.float32)
        for number, group in enumerate(optimizer.sharded.plan.groups)
        for name in group.names
    }


def kind_of_flat(flat: FlatParam) -> Kind:
    """The kind of its params."""
    return Kind(flat.plan.key.group, flat.owns_memory)


def kept(optimizer: BuiltOptimizer, flat: FlatParam) -> dict[str, Tensor]:
    """What this rank keeps of a flat param, by key; 1-D, as long as it."""
    return {MAIN: flat.main.detach(), **moments_of(optimizer.sharded.inner, flat.main)}


def positions_in(plan: BufferPlan, kind_of: Mapping[str, Kind]) -> Iterator[tuple[Kind, ParamShard]]:
    """What this rank's part of one buffer in the files has, in its order, as shards of the split of the files.

    Args:
        plan: of the run.
        kind_of: `kinds` of the optimizer.
    """
    for shard in owned_shards(plan.file_layout, plan.group.rank):
        if shard.name in plan.params and shard.name in kind_of:
            yield kind_of[shard.name], shard


@torch.no_grad()
def to_files(optimizer: BuiltOptimizer, facts: Facts) -> dict[str, dict[str, Tensor]]:
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
                shard.name: {
                    key: flat.cut(each, shard).clone()
                    for key, each in kept(optimizer, flat).items()
                    if key in facts.keys[kind_of_flat(flat)]
                }
                for flat, shard in owned_in(optimizer, buffer.plan)
            }
        else:
            values |= _sent(optimizer, buffer, facts)
    return values


def _sent(optimizer: BuiltOptimizer, buffer: GradBuffer, facts: Facts) -> dict[str, dict[str, Tensor]]:
    kind_of = kinds(optimizer)
    positions = list(positions_in(buffer.plan, kind_of))
    values: dict[str, dict[str, Tensor]] = {shard.name: {} for _, shard in positions}
    for key, dtype in _columns(buffer.plan, kind_of, facts):
        part = _send(_kept_places(optimizer, buffer.plan, key, dtype), buffer.plan, dtype, buffer.grad.device)
        for kind, shard in positions:
            if facts.keys.get(kind, {}).get(key) is dtype:
                values[shard.name][key] = part[shard.in_shard.as_slice()].clone()
    return values


def part_in_file(optimizer: BuiltOptimizer, buffer: GradBuffer, key: str, facts: Facts, device: torch.device) -> Tensor:
    """Collective where values travel: what this rank's part has of one key; fp32, with zeros where nothing is kept.

    Args:
        optimizer: whose state it is.
        buffer: one of its grad buffers.
        key: of a tensor that is kept for each element.
        facts: that all ranks agreed on, with `keys_of` each.
        device: of what is returned.
    """
    plan, kind_of = buffer.plan, kinds(optimizer)
    part = torch.zeros(plan.file_layout.shard_numel, dtype=torch.float32, device=device)
    if plan.is_in_place:
        for flat, shard in owned_in(optimizer, plan):
            tensor = kept(optimizer, flat).get(key)
            if tensor is not None:
                part[shard.in_shard.as_slice()] = flat.cut(tensor, shard).to(device)
        return part
    for dtype in (dtype for each, dtype in _columns(plan, kind_of, facts) if each == key):
        sent = _send(_kept_places(optimizer, plan, key, dtype), plan, dtype, buffer.grad.device).to(device)
        for kind, shard in positions_in(plan, kind_of):
            if facts.keys.get(kind, {}).get(key) is dtype:
                part[shard.in_shard.as_slice()] = sent[shard.in_shard.as_slice()]
    return part


def take_part(optimizer: BuiltOptimizer, buffer: GradBuffer, part: Tensor, into: Mapping[FlatParam, Tensor]) -> None:
    """Collective where values travel: the inverse of `part_in_file`.

    Args:
        optimizer: that takes the state.
        buffer: one of its grad buffers.
        part: this rank's part; fp32, on any device.
        into: the tensors that take the values, of all flat params of the buffer.
    """
    if not buffer.plan.is_in_place:
        _fetch(part.to(buffer.grad.device), _places(optimizer, buffer.plan, into), buffer.plan)
        return
    for flat, shard in owned_in(optimizer, buffer.plan):
        flat.cut(into[flat], shard).copy_(part[shard.in_shard.as_slice()])


@torch.no_grad()
def from_files(optimizer: BuiltOptimizer, values: Values, facts: Facts) -> dict[FlatParam, dict[str, Tensor]]:
    """Collective where values travel: writes the main params, and returns the moments of every flat param.

    Args:
        optimizer: that takes the state.
        values: what this rank's file has.
        facts: that all ranks agreed on, with `keys` of what their files have.
    """
    taken: dict[FlatParam, dict[str, Tensor]] = {flat: {MAIN: flat.main} for flat in optimizer.sharded.flat_params}
    for buffer in optimizer.grad_buffers:
        if buffer.plan.is_in_place:
            for flat, shard in owned_in(optimizer, buffer.plan):
                for key, tensor in values[shard.name].items():
                    flat.cut(_whole(taken, flat, key), shard).copy_(tensor)
        else:
            _take(optimizer, buffer, values, facts, taken)
    return {flat: {key: each for key, each in tensors.items() if key != MAIN} for flat, tensors in taken.items()}


def _take(
    optimizer: BuiltOptimizer,
    buffer: GradBuffer,
    values: Values,
    facts: Facts,
    taken: Mapping[FlatParam, dict[str, Tensor]],
) -> None:
    kind_of = kinds(optimizer)
    for key, dtype in _columns(buffer.plan, kind_of, facts):
        own = torch.zeros(buffer.plan.file_layout.shard_numel, dtype=dtype, device=buffer.grad.device)
        for _, shard in positions_in(buffer.plan, kind_of):
            if key in values[shard.name]:
                own[shard.in_shard.as_slice()] = values[shard.name][key]
        into = {
            flat: _whole(taken, flat, key)
            for flat, _ in owned_in(optimizer, buffer.plan)
            if key in facts.keys.get(kind_of_flat(flat), {})
        }
        _fetch(own, _places(optimizer, buffer.plan, into), buffer.plan)


def _whole(taken: Mapping[FlatParam, dict[str, Tensor]], flat: FlatParam, key: str) -> Tensor:
    """The tensor that takes a key of a flat param; zeros at first, where the flat param lacks the key."""
    if key not in taken[flat]:
        taken[flat][key] = flat.zeros()
    return taken[flat][key]


def owned_in(optimizer: BuiltOptimizer, plan: BufferPlan) -> Iterator[tuple[FlatParam, ParamShard]]:
    """What this rank owns of one buffer."""
    return (owned for name, owned in shards_of(optimizer.sharded).items() if name in plan.params)


def _columns(plan: BufferPlan, kind_of: Mapping[str, Kind], facts: Facts) -> list[tuple[str, torch.dtype]]:
    """Keys and dtypes, each of which travels by itself; the same on all ranks, in the same order."""
    wanted = dict.fromkeys(kind_of[name] for name in plan.params if name in kind_of)
    return list(dict.fromkeys(column for kind in wanted for column in facts.keys.get(kind, {}).items()))


def _kept_places(optimizer: BuiltOptimizer, plan: BufferPlan, key: str, dtype: torch.dtype) -> list[_Place]:
    """`_places` of what this rank keeps under a key, in one dtype."""
    tensors = {flat: kept(optimizer, flat).get(key) for flat in optimizer.sharded.flat_params}
    mine = {flat: tensor for flat, tensor in tensors.items() if tensor is not None and tensor.dtype is dtype}
    return _places(optimizer, plan, mine)


def _places(optimizer: BuiltOptimizer, plan: BufferPlan, tensors: Mapping[FlatParam, Tensor]) -> list[_Place]:
    """Where the files have what this rank owns of the given flat params."""
    return [
        _Place(rank, in_file, flat.cut(tensors[flat], shard)[in_shard.as_slice()])
        for flat, shard in owned_in(optimizer, plan)
        if flat in tensors
        for rank, in_file, in_shard in _stretches(plan, shard)
    ]


@dataclass(frozen=True, eq=False)
class _Place:
    """Neighbours that lie in one file.

    Args:
        rank: whose file.
        in_shard: where in it.
        values: 1-D, the same elements here.
    """

    rank: int
    in_shard: Span
    values: Tensor

    def within(self, piece: Span) -> tuple[slice, Tensor] | None:
        """Where its part of a piece lies in the piece, and the part; None where it has none."""
        part = self.in_shard.intersect(piece)
        if part is None:
            return None
        return part.relative_to(piece.start).as_slice(), self.values[part.relative_to(self.in_shard.start).as_slice()]


def _stretches(plan: BufferPlan, shard: ParamShard) -> Iterator[tuple[int, Span, Span]]:
    """Where a shard of the run lies in the files: (rank, in that rank's file, in the shard).

    Args:
        plan: of the run.
        shard: in the run's split.
    """
    files = plan.file_layout
    in_file, numel = shard.in_param.moved_by(plan.in_file[shard.name].start), files.shard_numel
    for rank in range(in_file.start // numel, (in_file.stop - 1) // numel + 1):
        owned = in_file.intersect(files.buckets[0].shard(rank, files.num_shards)) or Span(0, 0)
        yield rank, owned.relative_to(rank * numel), owned.relative_to(in_file.start)


def _send(places: Sequence[_Place], plan: BufferPlan, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Collective over the plan's group: what lies in this rank's file, with zeros where no rank has values.

    Args:
        places: this rank's, in all files.
        plan: of the run.
        dtype: of the values, the same on all ranks.
        device: the same.
    """
    files, group = plan.file_layout, plan.group
    own = torch.zeros(files.shard_numel, dtype=dtype, device=device)
    for piece in _pieces(files):
        rows = own.new_zeros(group.size, piece.numel)
        for row, in_row, values in _in_rows(places, rows, piece):
            row[in_row] = values
        bits = _as_integers(rows)
        reduce_scatter(bits.view(-1), bits[group.rank], group)
        own[piece.as_slice()] = rows[group.rank]
    return own


def _fetch(own: Tensor, places: Sequence[_Place], plan: BufferPlan) -> None:
    """Collective over the plan's group: the inverse of `_send`.

    Args:
        own: what lies in this rank's file; 1-D.
        places: this rank's, in all files; their values are written.
        plan: of the run.
    """
    files, group = plan.file_layout, plan.group
    for piece in _pieces(files):
        rows = own.new_empty(group.size, piece.numel)
        rows[group.rank] = own[piece.as_slice()]
        all_gather(rows.view(-1), rows[group.rank], group)
        for row, in_row, values in _in_rows(places, rows, piece):
            values.copy_(row[in_row])


def _pieces(files: BufferLayout) -> Iterator[Span]:
    """Spans of the file of each rank that travel together."""
    step = max(PIECE_NUMEL // files.num_shards, 1)
    for start in range(0, files.shard_numel, step):
        yield Span(start, min(start + step, files.shard_numel))


def _in_rows(places: Sequence[_Place], rows: Tensor, piece: Span) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """(row of the file, where in it, values here) of what lies in a piece."""
    for place in places:
        found = place.within(piece)
        if found is not None:
            yield (rows[place.rank], *found)


def _as_integers(rows: Tensor) -> Tensor:
    """A view, of a dtype that every backend adds up."""
    return rows.view(torch.int32 if rows.element_size() % torch.int32.itemsize == 0 else torch.uint8)
