"""Messages: tensors that one rank of a group sends to another, independently of the group's
collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group, backend_of, named_losses
from megatron_distopt.comm.pending import Pending
from megatron_distopt.errors import InvariantError

#: The backend that matches a message by its tag and whose errors concern one other rank.
_TAGGED_OVER = "gloo"
#: The first tag, far from those of other messages in the same group.
_FIRST_TAG = 1 << 26


@dataclass(frozen=True, eq=False)
class Message:
    """A tensor and the rank of the group that it goes to or comes from."""

    rank: int  # of the group
    tensor: Tensor  # 1-D, contiguous, with at least one element


def begin_travel(
    outgoing: Sequence[Message],
    incoming: Sequence[Message],
    number: int,
    group: Group,
    and_then: Callable[[], None] | None = None,
) -> Pending:
    """Begins to send and to receive; every message that leaves a rank must be expected by the other
    one.

    Args:
        outgoing: their tensors must not be changed until all has been waited for.
        incoming: their tensors are filled.
        number: the same on both ranks; two messages that are under way between a pair need
            different numbers.
        group: of the ranks; all of them begin in the same order of numbers.
        and_then: called by the wait, when all have arrived.

    Raises:
        RanksDisagreeError: a rank at the other end has ended before.
    """
    ways: list[tuple[Any, Message]] = [(dist.irecv, message) for message in incoming]
    ways += [(dist.isend, message) for message in outgoing]
    if not ways:
        return Pending((), and_then)
    if backend_of(ways[0][1].tensor.device, group) == _TAGGED_OVER:
        tag = _FIRST_TAG + number
        return Pending([_begun(begin, message, tag, group) for begin, message in ways], and_then)
    operations = [
        dist.P2POp(begin, message.tensor, group.global_rank(message.rank), group.own_handle)
        for begin, message in ways
    ]
    return Pending([work.wait for work in dist.batch_isend_irecv(operations)], and_then)


def _begun(
    begin: Callable[..., dist.Work | None], message: Message, tag: int, group: Group
) -> Callable[[], None]:
    rank = group.global_rank(message.rank)
    with named_losses(rank):
        work = begin(message.tensor, rank, group.handle, tag)
    if work is None:  # torch's way to say that this process is not in the group
        raise InvariantError(
            "This rank is not in the process group that it communicates over. Report this as a bug."
        )

    def wait() -> None:
        with named_losses(rank):
            work.wait()

    return wait
