"""Flat params: neighbouring param shards that the optimizer treats as one tensor.

[Note: flat main params] An inner optimizer that sees one tensor a parameter spends its time on launching, so neighbours
that are alike (`key`: same param group, counted alike in the gradient norm) become one 1-D tensor. Padding between two
of its params belongs to it: it is zero in params and grads, and an element-wise update of zeros stays zero. Padding at
the end of a bucket does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from megatron_distopt.layout.shards import ParamShard
from megatron_distopt.layout.span import Span

__all__ = ["FlatParamPlan", "plan_flat_params"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class FlatParamPlan(Generic[Key]):
    """A stretch of one rank's shard of one bucket.

    Args:
        key: what its params have in common.
        bucket: index.
        in_buffer: from the first element of its first param shard to the last of its last.
        shards: in buffer order.
    """

    key: Key
    bucket: int
    in_buffer: Span
    shards: tuple[ParamShard, ...]

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
    """Joins neighbours of one bucket with equal keys, in buffer order.

    Args:
        shards: of one rank and one buffer, in buffer order.
        key_of: from a param's name; None for a param in the buffer that is not updated. No flat param spans it.
    """
    plans = []
    for (bucket, key), members in groupby(shards, key=lambda shard: (shard.bucket, key_of(shard.name))):
        if key is not None:
            joined = tuple(members)
            in_buffer = Span(joined[0].in_buffer.start, joined[-1].in_buffer.stop)
            plans.append(FlatParamPlan(key, bucket, in_buffer, joined))
    return tuple(plans)
