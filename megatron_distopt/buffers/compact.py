"""Params of a minority dtype, scattered between others in one grad buffer.

[Note: two param dtypes in one grad buffer] The forks of 2023 keep one fp32 grad buffer for all
params. A few params may be fp32 (norms, routers) and the rest bf16. The majority gets a param
buffer in the layout of the grad buffer. A buffer for the minority in the same layout would be
nearly empty, so these params keep their own storage, and each rank packs its shards of them. The
all-gather moves the packed parts, and then the values are copied into the params; only the minority
costs these copies. Every rank's part is as long as the largest, so that the gather is even.
Neighbours begin as many elements after a multiple of 8 as their grads do, so that kernels move both
in full vectors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers.sharded_buffer import ShardedBuffer, view_of
from megatron_distopt.errors import InvariantError
from megatron_distopt.layout import (
    BufferLayout,
    FlatParamPlan,
    ParamShard,
    Span,
    param_shard,
    plan_flat_params,
)
from megatron_distopt.layout.buckets import VECTOR_NUMEL


@dataclass(frozen=True)
class _Run:
    """Neighbouring params of the minority in the shards of one rank, and where they are packed."""

    rank: int
    flat: FlatParamPlan[int]
    start: int  # in the rank's packed part

    def in_part(self, in_buffer: Span) -> Span:
        return in_buffer.relative_to(self.flat.in_buffer.start).moved_by(self.start)


@dataclass(frozen=True)
class CompactBuffer(ShardedBuffer):
    """Packed params beside a grad buffer, see [Note: two param dtypes in one grad buffer].

    `param` is 1-D [layout.num_shards * part_numel]: the parts of all ranks one after the other.
    """

    # by name, each in its own storage
    params: Mapping[str, Parameter] = field(default_factory=dict)
    part_numel: int = 0  # elements of one rank's part

    def __post_init__(self) -> None:
        self._check_numel("grad", self.grad, self.layout.numel)
        self._check_numel("param", self.param, self.layout.num_shards * self.part_numel)

    @cached_property
    def _runs(self) -> tuple[_Run, ...]:
        return _plan_runs(self.layout, self.params.keys())

    def param_of(self, in_buffer: Span) -> Tensor:
        """The packed elements of a flat param; neighbours in the grad buffer are neighbours
        here."""
        for run in self._runs:
            if run.rank == self.rank and run.flat.in_buffer.intersect(in_buffer) == in_buffer:
                return view_of(self._part_of(self.rank).detach(), run.in_part(in_buffer))
        raise InvariantError(
            f"No packed params of this rank hold the elements {in_buffer}. Report this as a bug."
        )

    @cached_property
    def gathers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The tensors of the one all-gather: (all parts, this rank's part)."""
        return ((self.param, self._part_of(self.rank)),)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies every rank's values into the params, after the all-gather."""
        for run in self._runs:
            for in_param, packed in self._stretches(run):
                in_param.copy_(packed)

    @torch.no_grad()
    def collect(self) -> None:
        """Copies this rank's shards of the params into the buffer, after the params were
        changed."""
        for run in self._runs:
            if run.rank == self.rank:
                for in_param, packed in self._stretches(run):
                    packed.copy_(in_param)

    def _stretches(self, run: _Run) -> Iterator[tuple[Tensor, Tensor]]:
        """The stretches of params in a run, and their packed values."""
        part = self._part_of(run.rank)
        for shard in run.flat.shards:
            param = self.params[shard.name].detach().view(-1)
            yield view_of(param, shard.in_param), view_of(part, run.in_part(shard.in_buffer))

    def _part_of(self, rank: int) -> Tensor:
        return view_of(self.param, Span(0, self.part_numel).moved_by(rank * self.part_numel))


@torch.no_grad()
def pack_params(
    params: Mapping[str, Parameter], layout: BufferLayout, rank: int, grad: Tensor
) -> CompactBuffer:
    """Allocates the packed buffer and fills this rank's part. `layout` is that of the grad buffer;
    `params` are the minority in it, of one dtype and device.
    """
    for param in params.values():
        param.data = param.data.contiguous()  # the pieces are stretches of the flattened param
    runs = _plan_runs(layout, params.keys())
    part_numel = max(run.start + run.flat.in_buffer.numel for run in runs)
    part_numel += -part_numel % VECTOR_NUMEL
    first = next(iter(params.values()))
    packed = torch.zeros(layout.num_shards * part_numel, dtype=first.dtype, device=first.device)
    buffer = CompactBuffer(layout, rank, grad, packed, frozenset(params), dict(params), part_numel)
    buffer.collect()
    return buffer


def _plan_runs(layout: BufferLayout, names: Collection[str]) -> tuple[_Run, ...]:
    """The runs of all ranks, each as many elements after a multiple of 8 as its grads are. Only
    ranks that hold some of the minority take time, however many ranks there are."""
    shards_of = defaultdict[int, list[ParamShard]](list)  # by rank
    run_of: dict[str, int] = {}  # by name, the first slot of the adjacent slots of the minority
    for number, slot in enumerate(layout.slots):
        if slot.name in names:
            neighbour = layout.slots[number - 1].name  # for slot 0 the last one, in no run yet
            run_of[slot.name] = run_of.get(neighbour, number)
            bucket = layout.buckets[slot.bucket]
            for rank in bucket.holders(slot.in_buffer, layout.num_shards):
                owned = param_shard(slot, bucket, rank, bucket.shard(rank, layout.num_shards))
                if owned is not None:
                    shards_of[rank].append(owned)
    runs: list[_Run] = []
    for rank, shards in shards_of.items():
        filled = 0
        for flat in plan_flat_params(shards, run_of.get):
            filled += (flat.in_buffer.start - filled) % VECTOR_NUMEL
            runs.append(_Run(rank, flat, filled))
            filled += flat.in_buffer.numel
    return tuple(runs)
