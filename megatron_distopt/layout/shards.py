"""Which part of which parameter a rank owns, and which of these parts the optimizer treats as one
tensor.

`owned_shards` costs O(log params + what the rank owns) a bucket and nothing for the other ranks, so
that a layout over thousands of ranks is planned as fast as one over two.

[Note: flat main params] An inner optimizer that sees one tensor a parameter spends its time on
launching kernels. So neighbours that are alike (`key`: same param group, all in the gradient norm
or none) become one 1-D tensor, a flat param. Padding between two of its params belongs to it: it is
zero in params and grads, and an element-wise update of zeros stays zero. Padding at the end of a
bucket does not."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout.buckets import Bucket, BufferLayout, ParamSlot
from megatron_distopt.layout.spans import Span

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ParamShard:
    """One param ∩ one shard: the same elements in every index space that is used."""

    name: str  # of the param
    rank: int  # in the data-parallel group
    bucket: int  # index
    in_param: Span  # of the flattened param
    in_buffer: Span
    in_bucket: Span
    in_shard: Span  # of the rank's shard of that bucket


def owned_shards(layout: BufferLayout, rank: int) -> tuple[ParamShard, ...]:
    """The param shards that `rank` owns, in buffer order; empty where every shard of the rank is
    padding.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 3), ParamSpec("b", 4)], num_shards=2, alignment_numel=1)
    >>> [(shard.name, shard.in_param) for shard in owned_shards(layout, 1)]
    [('b', Span(start=1, stop=4))]
    """
    if not 0 <= rank < layout.num_shards:
        raise LayoutError(
            f"Rank {rank} has none of the {layout.num_shards} shards. Give the rank inside the "
            "data-parallel group."
        )
    found: list[ParamShard] = []
    for bucket in layout.buckets:
        shard = bucket.shard(rank, layout.num_shards)
        first = max(bisect_right(layout.starts, shard.start) - 1, 0)
        end = bisect_left(layout.starts, shard.stop)
        for slot in layout.slots[first:end]:
            owned = param_shard(slot, bucket, rank, shard)
            if owned is not None:
                found.append(owned)
    return tuple(found)


def param_shard(slot: ParamSlot, bucket: Bucket, rank: int, shard: Span) -> ParamShard | None:
    """What `rank`, whose shard of the bucket is `shard`, owns of a param in it."""
    owned = slot.in_buffer.intersect(shard)
    if owned is None:
        return None
    origins = slot.in_buffer.start, 0, bucket.in_buffer.start, shard.start
    spans = map(owned.relative_to, origins)
    return ParamShard(slot.name, rank, bucket.index, *spans)


@dataclass(frozen=True, slots=True)
class FlatParamPlan(Generic[Key]):
    """A flat param as planned: a stretch of one rank's shard of one bucket."""

    key: Key  # what its params have in common
    bucket: int  # index
    in_buffer: Span  # from the first element of its first param shard to the last of its last
    shards: tuple[ParamShard, ...]  # in buffer order

    @property
    def padding_numel(self) -> int:
        """Elements between its params that belong to none."""
        return self.in_buffer.numel - sum(shard.in_param.numel for shard in self.shards)

    def in_flat_param(self, shard: ParamShard) -> Span:
        """Where one of its shards lies in the flat param's own tensor."""
        return shard.in_buffer.relative_to(self.in_buffer.start)


def plan_flat_params(
    shards: Iterable[ParamShard], key_of: Callable[[str], Key | None]
) -> tuple[FlatParamPlan[Key], ...]:
    """Joins neighbours of one bucket with equal keys, in buffer order; no flat param spans one
    whose key is None."""
    plans = []
    for (bucket, key), members in groupby(
        shards, key=lambda shard: (shard.bucket, key_of(shard.name))
    ):
        if key is not None:
            joined = tuple(members)
            in_buffer = Span(joined[0].in_buffer.start, joined[-1].in_buffer.stop)
            plans.append(FlatParamPlan(key, bucket, in_buffer, joined))
    return tuple(plans)
