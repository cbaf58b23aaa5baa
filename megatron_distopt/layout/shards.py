"""Which part of which parameter a rank owns.

`owned_shards` costs O(log params + what the rank owns) a bucket and nothing for the other ranks, so that a layout over
thousands of ranks is planned as fast as one over two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout.buckets import Bucket, BufferLayout
from megatron_distopt.layout.span import Span

__all__ = ["ParamShard", "owned_shards"]


@dataclass(frozen=True, slots=True)
class ParamShard:
    """One param ∩ one shard, in every index space that somebody needs.

    Args:
        name: of the param.
        rank: in the data-parallel group.
        bucket: index.
        in_param: the elements of the (flattened) param.
        in_buffer: the same elements in the whole buffer.
        in_bucket: the same elements in their bucket.
        in_shard: the same elements in the rank's shard of that bucket.
    """

    name: str
    rank: int
    bucket: int
    in_param: Span
    in_buffer: Span
    in_bucket: Span
    in_shard: Span


def owned_shards(layout: BufferLayout, rank: int) -> tuple[ParamShard, ...]:
    """What `rank` owns, in buffer order; empty where every shard of the rank is padding.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 3), ParamSpec("b", 4)], num_shards=2, alignment_numel=1)
    >>> [(shard.name, shard.in_param) for shard in owned_shards(layout, 1)]
    [('b', Span(start=1, stop=4))]
    """
    if not 0 <= rank < layout.num_shards:
        rule = f"be at least 0 and below the {layout.num_shards} shards"
        raise LayoutError(refusal("rank", rank, rule, "Give the rank inside the data-parallel group"))
    starts = [slot.in_buffer.start for slot in layout.slots]
    return tuple(shard for bucket in layout.buckets for shard in _owned_in_bucket(layout, starts, bucket, rank))


def _owned_in_bucket(layout: BufferLayout, starts: list[int], bucket: Bucket, rank: int) -> Iterator[ParamShard]:
    shard = bucket.shard(rank, layout.num_shards)
    first = max(bisect_right(starts, shard.start) - 1, 0)
    for index in range(first, len(layout.slots)):
        slot = layout.slots[index]
        if slot.in_buffer.start >= shard.stop:
            return
        owned = slot.in_buffer.intersect(shard)
        if owned is not None:
            yield ParamShard(
                name=slot.name,
                rank=rank,
                bucket=bucket.index,
                in_param=owned.relative_to(slot.in_buffer.start),
                in_buffer=owned,
                in_bucket=owned.relative_to(bucket.in_buffer.start),
                in_shard=owned.relative_to(shard.start),
            )
