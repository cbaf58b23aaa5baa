"""Which part of which param a rank owns, and which of these parts the optimizer treats as one
tensor.

For each bucket `owned_shards` takes O(log params + shards of the rank) and nothing for the other
ranks. So a layout over thousands of ranks is planned as fast as one over two.

[Note: flat main params] An inner optimizer with one tensor for each param spends its time on
launching kernels. So neighbours with equal `key` (the same param group, and all or none in the
gradient norm) become one 1-D tensor, a flat param. It includes padding between its params: that is
zero in params and grads, and an element-wise update of zeros is zero. It does not include padding
at the end of a bucket."""

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
    """The elements of one param in one shard, in every index space that is used."""

    name: str  # of the param
    rank: int  # in the data-parallel group
    bucket: int  # index
    in_param: Span  # of the flattened param
    in_buffer: Span
    in_bucket: Span
    in_shard: Span  # of the rank's shard of that bucket


def owned_shards(layout: BufferLayout, rank: int) -> tuple[ParamShard, ...]:
    """The param shards that `rank` owns, in buffer order; empty if the rank has only padding.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 3), ParamSpec("b", 4)], num_shards=2, alignment_numel=1)
    >>> [(shard.name, shard.in_param) for shard in owned_shards(layout, 1)]
    [('b', Span(start=1, stop=4))]
    """
    if not 0 <= rank < layout.num_shards:
        raise LayoutError(
            f"Rank {rank} owns no shard, because there are only {layout.num_shards} shards. Give "
            "the rank inside the data-parallel group."
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
    """The part of a param that `rank` owns, whose shard of the bucket is `shard`; None if it owns
    none."""
    owned = slot.in_buffer.intersect(shard)
    if owned is None:
        return None
    origins = slot.in_buffer.start, 0, bucket.in_buffer.start, shard.start
    spans = map(owned.relative_to, origins)
    return ParamShard(slot.name, rank, bucket.index, *spans)


@dataclass(frozen=True, slots=True)
class FlatParamPlan(Generic[Key]):
    """The plan of a flat param: a stretch of one rank's shard of one bucket."""

    key: Key  # what its params have in common
    bucket: int  # index
    in_buffer: Span  # from the first element of its first param shard to the last of its last
    shards: tuple[ParamShard, ...]  # in buffer order

    @property
    def padding_numel(self) -> int:
        """The number of elements between its params."""
        return self.in_buffer.numel - sum(shard.in_param.numel for shard in self.shards)

    def in_flat_param(self, shard: ParamShard) -> Span:
        """Where one of its shards lies in the flat param's own tensor."""
        return shard.in_buffer.relative_to(self.in_buffer.start)


def plan_flat_params(
    shards: Iterable[ParamShard], key_of: Callable[[str], Key | None]
) -> tuple[FlatParamPlan[Key], ...]:
    """Joins neighbours of one bucket with equal keys, in buffer order. A param whose key is None is
    in no flat param, and none spans it."""
    plans = []
    for (bucket, key), members in groupby(
        shards, key=lambda shard: (shard.bucket, key_of(shard.name))
    ):
        if key is not None:
            joined = tuple(members)
            in_buffer = Span(joined[0].in_buffer.start, joined[-1].in_buffer.stop)
            plans.append(FlatParamPlan(key, bucket, in_buffer, joined))
    return tuple(plans)
