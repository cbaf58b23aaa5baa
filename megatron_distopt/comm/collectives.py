"""The collectives, each in place: a shard is a view of its bucket.

[Note: whose collective] A backend's own, but for tensors on the CPU over gloo, whose own are slow: those go from pair
to pair (pairwise.py). They do so at every size, so that a gradient is added up in the same order in every bucket.

[Note: average in the collective] Where grads are divided before they are added up, NCCL multiplies by the reciprocal as
it reads them, which saves the pass over the buffer. For a power of two that is the division, to the bit; for any other
number it would round twice, so we divide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import pairwise
from megatron_distopt.comm.groups import Group, named_losses
from megatron_distopt.comm.pending import BetweenPairs, Done, Pending, begin_in_thread, in_turn
from megatron_distopt.comm.wire import begin_sum, sum_over_pairs

# torch 2.13 renamed them; the old names warn there, and older releases have only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = [
    "AS_THEY_ARE",
    "Pending",
    "Reduction",
    "all_gather",
    "begin_all_gather",
    "begin_reduce_scatter",
    "broadcast",
    "carrier_of",
    "coalesced",
    "described",
    "gather_to_first",
    "reduce_scatter",
    "scatter_from_first",
    "shares_memory",
    "sum_over",
]


_PAIRWISE_OVER = "gloo"
#: Backends on which each launch costs the CPU and the device something.
_COALESCING = ("nccl",)
_AVERAGING = ("nccl",)


@dataclass(frozen=True)
class Reduction:
    """How grads are added up.

    Args:
        divide_by: before they are added up; a pass over the buffer, or see [Note: average in the collective]. An fp16
            sum of n gradients overflows at an n times smaller loss scale than their average.
        wire: what fp32 grads are rounded to on their way, see wire.py; None for as they are.
    """

    divide_by: int = 1
    wire: torch.dtype | None = None


#: Nothing is done to grads before they are added up.
AS_THEY_ARE = Reduction()


def is_pairwise(tensor: Tensor, group: Group) -> bool:
    """See [Note: whose collective]; the same on all ranks."""
    return carrier_of(tensor.device, group) == _PAIRWISE_OVER


def described(device: torch.device, group: Group, how: Reduction = AS_THEY_ARE) -> str:
    """How buckets on a device travel in a group, for a person; after the first of them did."""
    carrier, is_shared = carrier_of(device, group), shares_memory(device, group)
    short = "" if how.wire is None else f", grads in {dtype_name(how.wire)}" + is_shared * " as messages"
    if carrier != _PAIRWISE_OVER:
        return carrier + short
    return f"{carrier}, from pair to pair {'in shared memory' if is_shared else 'as messages'}{short}"


def shares_memory(device: torch.device, group: Group) -> bool:
    """Whether ranks read each other's memory instead of sending messages; after the first collective of the group."""
    is_pairwise_there = group.size > 1 and carrier_of(device, group) == _PAIRWISE_OVER
    return is_pairwise_there and pairwise.shares_memory(group)


def carrier_of(device: torch.device, group: Group) -> str:
    """The backend that moves tensors of a device in a group."""
    config = dist.get_backend_config(group.handle)
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)


def reduce_scatter(bucket: Tensor, shard: Tensor, group: Group, how: Reduction = AS_THEY_ARE) -> None:
    """Collective: adds up `bucket` over the group; this rank's part lands in `shard`.

    Args:
        bucket: 1-D; outside `shard` it holds nothing of meaning afterwards.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
        how: see `Reduction`.
    """
    op = _operation(bucket, group, how)
    if group.size == 1:
        return
    if is_pairwise(bucket, group):
        in_turn(_sum_by_pairs(how.wire), bucket, shard, group)
    elif how.wire is not None:
        begin_sum(bucket, shard, group, how.wire).wait()
    else:
        _reduce_scatter(shard, bucket, op=op, group=group.handle)


def begin_reduce_scatter(bucket: Tensor, shard: Tensor, group: Group, how: Reduction = AS_THEY_ARE) -> Pending:
    """Collective: `reduce_scatter` beside what the caller does next; in the order in which they are begun.

    Args: as of `reduce_scatter`; nobody touches `bucket` until it is waited for.
    """
    op = _operation(bucket, group, how)
    if group.size == 1:
        return Done()
    if is_pairwise(bucket, group):
        return begin_in_thread(_sum_by_pairs(how.wire), bucket, shard, group)
    if how.wire is not None:
        return begin_sum(bucket, shard, group, how.wire)
    work: Pending = _reduce_scatter(shard, bucket, op=op, group=group.handle, async_op=True)
    return work


def _operation(bucket: Tensor, group: Group, how: Reduction) -> dist.ReduceOp.RedOpType:
    """Of the collective, before which the bucket is divided where it does not average by itself."""
    if how.divide_by == 1:
        return dist.ReduceOp.SUM
    if how.wire is None and _averages(bucket, group, how.divide_by):
        return dist.ReduceOp.AVG
    bucket.div_(how.divide_by)
    return dist.ReduceOp.SUM


def _averages(bucket: Tensor, group: Group, divide_by: int) -> bool:
    """See [Note: average in the collective]; the same on all ranks."""
    is_exact = divide_by == group.size and group.size.bit_count() == 1
    return is_exact and carrier_of(bucket.device, group) in _AVERAGING


def begin_all_gather(bucket: Tensor, shard: Tensor, group: Group) -> Pending:
    """Collective: `all_gather` beside what the caller does next; in the order in which they are begun.

    Args: as of `all_gather`; nobody touches `bucket` until it is waited for.
    """
    if group.size == 1:
        return Done()
    if is_pairwise(bucket, group):
        return begin_in_thread(pairwise.all_gather, bucket, shard, group)
    work: Pending = _all_gather(bucket, shard, group=group.handle, async_op=True)
    return work


def _sum_by_pairs(wire: torch.dtype | None) -> BetweenPairs:
    return pairwise.reduce_scatter if wire is None else partial(sum_over_pairs, dtype=wire)


def all_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: fills `bucket` with every rank's `shard`.

    Args:
        bucket: 1-D.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
    """
    if group.size == 1:
        return
    if is_pairwise(bucket, group):
        in_turn(pairwise.all_gather, bucket, shard, group)
    else:
        _all_gather(bucket, shard, group=group.handle)


@contextmanager
def coalesced(tensor: Tensor, group: Group) -> Iterator[None]:
    """Collectives of one kind that are called meanwhile are one launch, where the backend gains from that.

    Args:
        tensor: one of those that travel.
        group: as of the collectives.
    """
    if group.size > 1 and carrier_of(tensor.device, group) in _COALESCING:
        with dist.distributed_c10d._coalescing_manager(group.handle):
            yield
    else:
        yield


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
    """Collective: sums a small tensor over the group, in place.

    Raises:
        RanksDisagreeError: another rank ended, or did not come within the group's time limit.
    """
    if group.size > 1:
        with named_losses():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group.handle)
