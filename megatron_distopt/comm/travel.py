"""Tensors that go from some ranks of a group to some others, each between one pair; see layout/owners.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.collectives import carrier_of
from megatron_distopt.comm.groups import Group, Message, receive, send, wait

#: Where a message is matched by its tag and names the rank that was lost.
_MESSAGES_OVER = "gloo"
#: Differs from the tags of other messages in the same group by more than there are rounds.
_TAG = 1 << 26


@dataclass(frozen=True, eq=False)
class Parcel:
    """A tensor and the rank of the group at its other end.

    Args:
        rank: that it goes to, or comes from.
        tensor: 1-D, contiguous, with at least one element.
    """

    rank: int
    tensor: Tensor


class UnderWay:
    """Tensors that are being sent and received."""

    def __init__(self, works: Sequence[dist.Work], messages: Sequence[Message]) -> None:
        self._works, self._messages = works, messages

    def wait(self) -> None:
        """Waits until all have arrived: the CPU over gloo, the current stream of the device elsewhere.

        Raises:
            RanksDisagreeError: another rank ended, or did not come within the group's time limit.
        """
        wait(self._messages)
        for work in self._works:
            work.wait()


def begin_travel(outgoing: Sequence[Parcel], incoming: Sequence[Parcel], number: int, group: Group) -> UnderWay:
    """Begins to send and to receive; every parcel that leaves a rank must be expected by the other one.

    Args:
        outgoing: at most one to each rank; its tensor must not be changed until all has been waited for.
        incoming: at most one from each rank; its tensor is filled.
        number: the same on both ranks; no two that are under way between a pair may have the same.
        group: of the ranks; all of them begin in the same order of numbers.
    """
    if not outgoing and not incoming:
        return UnderWay((), ())
    device = (*outgoing, *incoming)[0].tensor.device
    if carrier_of(device, group) == _MESSAGES_OVER:
        messages = [receive(each.tensor, each.rank, _TAG + number, group) for each in incoming]
        messages += [send(each.tensor, each.rank, _TAG + number, group) for each in outgoing]
        return UnderWay((), messages)
    handle = group.own_handle
    operations = [dist.P2POp(dist.irecv, each.tensor, group.global_rank(each.rank), handle) for each in incoming]
    operations += [dist.P2POp(dist.isend, each.tensor, group.global_rank(each.rank), handle) for each in outgoing]
    return UnderWay(dist.batch_isend_irecv(operations), ())
