"""Messages between two ranks of a group: matched by sender and tag, and independent of the collectives around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group, named_losses
from megatron_distopt.errors import InvariantError, refusal

__all__ = ["others", "receive", "send", "swap", "wait"]


def others(group: Group) -> list[int]:
    """Downwards from the rank before this one, around the ring."""
    return [(group.rank - distance) % group.size for distance in range(1, group.size)]


def swap(mine: Tensor, tag: int, group: Group) -> list[Tensor]:
    """Collective: everybody's tensor, by rank; all of the same shape."""
    parts = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    received = [receive(parts[rank], rank, tag, group) for rank in others(group)]
    sent = [send(mine, rank, tag, group) for rank in others(group)]
    wait(received)
    wait(sent)
    return parts


def receive(into: Tensor, rank: int, tag: int, group: Group) -> dist.Work:
    """Begins to receive from a rank of the group."""
    return _begun(dist.irecv(into, group.global_rank(rank), group.handle, tag))


def send(tensor: Tensor, rank: int, tag: int, group: Group) -> dist.Work:
    """Begins to send to a rank of the group."""
    return _begun(dist.isend(tensor, group.global_rank(rank), group.handle, tag))


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch's way to say that this process is not in the group
        rule = "hold every rank that communicates in it"
        raise InvariantError(refusal("process group", "without this rank", rule, "Report this"))
    return work


def wait(works: Sequence[dist.Work]) -> None:
    """Until all have ended.

    Raises:
        RanksDisagreeError: another rank ended, or did not come within the group's time limit.
    """
    with named_losses():
        for work in works:
            work.wait()
