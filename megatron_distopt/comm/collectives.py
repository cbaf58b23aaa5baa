"""The collectives, each in place: a shard is a view of its bucket.

[Note: whose collective] A backend's own, but for tensors on the CPU over gloo, whose own are slow: those go from pair
to pair (pairwise.py). They do so at every size, so that a gradient is added up in the same order in every bucket.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm import pairwise
from megatron_distopt.comm.groups import Group

# torch 2.13 renamed them; the old names warn there, and older releases have only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = [
    "Pending",
    "all_gather",
    "begin_reduce_scatter",
    "broadcast",
    "carrier_of",
    "described",
    "gather_to_first",
    "reduce_scatter",
    "scatter_from_first",
    "sum_over",
]


_PAIRWISE_OVER = "gloo"


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Until what it writes is there; raises what went wrong in it."""


class _InThread:
    """One that the thread of this process carries out."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _Done:
    """One that there was no need for."""

    def wait(self) -> None:
        """Nothing to wait for."""


def is_pairwise(tensor: Tensor, group: Group) -> bool:
    """See [Note: whose collective]; the same on all ranks."""
    return carrier_of(tensor.device, group) == _PAIRWISE_OVER


def described(device: torch.device, group: Group) -> str:
    """How buckets on a device travel in a group, for a person."""
    carrier = carrier_of(device, group)
    return f"{carrier} from pair to pair" if carrier == _PAIRWISE_OVER else carrier


def carrier_of(device: torch.device, group: Group) -> str:
    """The backend that moves tensors of a device in a group."""
    config = dist.get_backend_config(group.handle)
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)


def reduce_scatter(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: sums `bucket` over the group; this rank's part lands in `shard`.

    Args:
        bucket: 1-D; outside `shard` it holds nothing of meaning afterwards.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
    """
    if group.size == 1:
        return
    if is_pairwise(bucket, group):
        pairwise.reduce_scatter(bucket, shard, group)
    else:
        _reduce_scatter(shard, bucket, op=dist.ReduceOp.SUM, group=group.handle)


def begin_reduce_scatter(bucket: Tensor, shard: Tensor, group: Group) -> Pending:
    """Collective: `reduce_scatter` beside what the caller does next; in the order in which they are begun.

    Args: as of `reduce_scatter`; nobody touches `bucket` until it is waited for.
    """
    if group.size == 1:
        return _Done()
    if is_pairwise(bucket, group):
        # Never gloo's own: those match each other by order alone, and the caller goes on with some of its own.
        return _InThread(_thread().submit(pairwise.reduce_scatter, bucket, shard, group))
    work: Pending = _reduce_scatter(shard, bucket, op=dist.ReduceOp.SUM, group=group.handle, async_op=True)
    return work


@cache
def _thread() -> ThreadPoolExecutor:
    """One, so that collectives keep their order."""
    num_threads = torch.get_num_threads()  # torch counts them for every thread that asks
    return ThreadPoolExecutor(1, "megatron_distopt collectives", lambda: torch.set_num_threads(num_threads))


def all_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: fills `bucket` with every rank's `shard`.

    Args:
        bucket: 1-D.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
    """
    if group.size == 1:
        return
    if is_pairwise(bucket, group):
        pairwise.all_gather(bucket, shard, group)
    else:
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
