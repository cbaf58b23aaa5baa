"""The collectives, each in place: a shard is a view of its bucket."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group

# torch 2.13 renamed them; the old names warn there, and older releases have only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = ["all_gather", "broadcast", "gather_to_first", "reduce_scatter", "scatter_from_first", "sum_over"]


def reduce_scatter(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: sums `bucket` over the group; this rank's part lands in `shard`.

    Args:
        bucket: 1-D; outside `shard` it holds nothing of meaning afterwards.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
    """
    if group.size > 1:
        _reduce_scatter(shard, bucket, op=dist.ReduceOp.SUM, group=group.handle)


def all_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: fills `bucket` with every rank's `shard`.

    Args:
        bucket: 1-D.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
    """
    if group.size > 1:
        _all_gather(bucket, shard, group=group.handle)


def broadcast(tensor: Tensor, group: Group) -> None:
    """Collective: every rank gets the values of the group's rank 0."""
    if group.size > 1:
        first = 0 if group.handle is None else dist.get_global_rank(group.handle, 0)
        dist.broadcast(tensor, src=first, group=group.handle)


def gather_to_first(part: Tensor, group: Group) -> Tensor | None:
    """Collective: all ranks' parts one after the other on the group's rank 0, None elsewhere.

    Args:
        part: 1-D, as long on every rank, on a device that the group's backend carries.
    """
    if group.size == 1:
        return part
    whole = part.new_empty(group.size * part.numel()) if group.rank == 0 else None
    parts = None if whole is None else list(torch.split(whole, part.numel()))
    dist.gather(part, parts, dst=group.global_rank(0), group=group.handle)
    return whole


def scatter_from_first(whole: Tensor | None, part: Tensor, group: Group) -> None:
    """Collective: the inverse of `gather_to_first`.

    Args:
        whole: 1-D [group.size * part.numel] on the group's rank 0, None elsewhere.
        part: 1-D; filled.
    """
    if whole is not None and group.size == 1:
        part.copy_(whole)
    if group.size > 1:
        parts = None if whole is None else list(torch.split(whole, part.numel()))
        dist.scatter(part, parts, src=group.global_rank(0), group=group.handle)


def sum_over(tensor: Tensor, group: Group) -> None:
    """Collective: sums a small tensor over the group, in place."""
    if group.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group.handle)
