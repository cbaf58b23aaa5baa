"""Reduce-scatter and all-gather between pairs of ranks, for backends whose own are slow, and sums
in a reduce dtype.

gloo's `reduce_scatter_tensor` and `all_gather_into_tensor` reach a quarter of what the same link
carries (`benchmarks/collectives.py`). Here every rank hands every other rank its part at once, and
adds up what it receives: through memory that they share on one machine, as messages where they are
on several.

[Note: leaders] Where there are several nodes, a node's ranks may add up first. Of each share, one
rank of each node is the leader: of a share of the node's own ranks the owner, of one of another
node the rank whose place is the owner's place there, modulo the node's size. A node's ranks hand
each other what they have for its leaders, in full precision. Then a leader sends the node's sum to
the owner, who adds up one summand from each node in fp32. So a link between nodes carries a
gradient once for each other node, whatever the ranks of a node, and it is rounded once. Where each
rank counts as a node of its own, all pairs send each other messages. Where all ranks are on one
node, everything goes through its memory.

[Note: order of the sum] Rank r's share is added up from rank r-1 downwards, around the ring, its
own part last, each sum rounded to the dtype; so are nodes, and ranks of a node. The result is the
same in every run and by either way, whatever arrives first, and bit for bit what gloo's own ring
gives.

[Note: sum in a reduce dtype] fp32 grads may be communicated in 16 bits, which are half the bytes.
They are added up in fp32 in the same order. A rank's own part is not sent, so it is not rounded.
The result differs from an fp32 reduce-scatter by one rounding of each other summand, and not by one
at every addition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from megatron_distopt.comm.group_nodes import Members, alone, nodes_of
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.messages import Message, begin_travel
from megatron_distopt.comm.pending import Pending
from megatron_distopt.comm.shared_memory import NodeMemory, Received, chunks_of
from megatron_distopt.device import CPU, fence, keep_for_current_stream, new_stream, on_stream

T = TypeVar("T")

#: Memory for messages. One half is added up while the other one is filled; it is given back
#: afterwards.
SCRATCH_NBYTES, _NUM_HALVES = 16 << 20, 2
#: Memory for each other rank where other work follows each chunk, so that it can begin sooner.
_NBYTES_EACH = 2 << 20
#: By device, the stream on which sums inside a node wait for other ranks, so that backward does not
#: wait.
_side_stream = cache(new_stream)
#: More than two parts are added up in blocks of this size, which stay in the cache until the last
#: part is added.
_BLOCK_NBYTES = 128 << 10
#: Numbers of messages, which differ from each other and from those of other messages in the group.
_FIRST_SUM, _FIRST_GATHER = 1 << 28, 1 << 29


def reduce_scatter(
    bucket: Tensor, group: Group, members: Members | None = None, dtype: torch.dtype | None = None
) -> None:
    """Collective: see `collectives.reduce_scatter`; what lies outside this rank's share has no
    meaning afterwards.

    `members` are the ranks of each node, which add up first. By default all ranks are one node if
    they share memory, and otherwise each rank is a node of its own. Between nodes sums are sent in
    `dtype`, by default their own.
    """
    nodes = nodes_of(group)
    if members is None:
        members = nodes.in_memory
        if len(members) != 1:
            members = alone(group)
    plan = plan_of(members, group.rank)
    shares = bucket.view(group.size, -1)
    if not plan.sources:  # all are on this node
        _sum_in_memory(shares, plan, nodes.node_memory)
        return
    num_sources = len(plan.sources)
    sent_dtype = dtype or bucket.dtype
    num_copies = 1 if sent_dtype is bucket.dtype else 2  # what is sent is a copy as well
    nbytes = SCRATCH_NBYTES // _NUM_HALVES
    if plan.others or num_copies > 1:
        nbytes = min(nbytes, num_sources * _NBYTES_EACH)
    nbytes_each = sent_dtype.itemsize * num_sources * num_copies
    chunks = chunks_of(shares.shape[1], nbytes_each, nbytes)

    def begin_chunks() -> Iterator[Pending]:
        for number, chunk in enumerate(chunks, start=_FIRST_SUM):
            rows = shares[:, chunk]
            _sum_in_memory(rows, plan, nodes.node_memory)
            yield _begin_sum(rows, plan, sent_dtype, number, group)

    _wait_in_order(begin_chunks())


def begin_reduce_scatter(
    bucket: Tensor, group: Group, members: Members, dtype: torch.dtype
) -> Pending:
    """Collective: begins `reduce_scatter` by the backend; takes up to twice the bucket as scratch
    memory."""
    plan = plan_of(members, group.rank)
    shares = bucket.view(group.size, -1)
    wait_for_grads = fence(bucket.device)
    side_stream = _side_stream(bucket.device)
    with torch.no_grad(), on_stream(side_stream, bucket.device):
        wait_for_grads()
        _sum_by_messages(shares, plan, group)
        return _begin_sum(shares, plan, dtype, _FIRST_SUM, group)


def all_gather(bucket: Tensor, group: Group, members: Members | None = None) -> None:
    """Collective: see `collectives.all_gather`; as in [Note: leaders] the other way, `members`
    being each node's."""
    nodes = nodes_of(group)
    plan = plan_of(members or nodes.in_memory, group.rank)
    shares = bucket.view(group.size, -1)
    if not plan.sources:  # all are on this node
        _gather_in_memory(shares, plan, nodes.node_memory)
        return
    nbytes = _NBYTES_EACH if plan.others else bucket.nbytes
    chunks = chunks_of(shares.shape[1], bucket.itemsize, nbytes)

    def begin_chunks() -> Iterator[Pending]:
        for number, chunk in enumerate(chunks, start=_FIRST_GATHER):
            rows = shares[:, chunk]
            outgoing = [Message(rank, rows[plan.own]) for rank in plan.sources]
            incoming = [Message(owner, rows[owner]) for owner in plan.owners]
            and_then = partial(_gather_in_memory, rows, plan, nodes.node_memory)
            yield begin_travel(outgoing, incoming, number, group, and_then)

    _wait_in_order(begin_chunks())


def _wait_in_order(chunks: Iterable[Pending]) -> None:
    """Waits for the oldest chunks; one stays under way, so that a link is not idle while what came
    over it is read."""
    under_way = deque[Pending]()
    for chunk in chunks:
        under_way.append(chunk)
        if len(under_way) == _NUM_HALVES:
            under_way.popleft().wait()
    for chunk in under_way:
        chunk.wait()


# --- who adds up what


@dataclass(frozen=True, eq=False)
class Plan:
    """Who adds up what, as one rank sees it, see [Note: leaders]. Ranks are in the order of the
    sum."""

    own: int  # this rank
    others: Sequence[int]  # of this node
    led: Mapping[int, Sequence[int]]  # by rank of this node, the shares that it leads
    followed: Mapping[int, Sequence[int]]  # by rank of this node, those that it does not lead
    owners: Sequence[int]  # ranks of other nodes whose shares this rank leads
    sources: Sequence[int]  # the leaders of this rank's share on other nodes


@cache
def plan_of(members: Members, own: int) -> Plan:
    """The plan of a rank, from the ranks of each node."""
    place_of: dict[int, int] = {}
    for ranks in members:
        for place, rank in enumerate(ranks):
            place_of[rank] = place
    is_own = [own in ranks for ranks in members]
    number = is_own.index(True)
    node = members[number]

    def leader(owner: int, ranks: Sequence[int]) -> int:
        if owner in ranks:
            return owner
        place = place_of[owner] % len(ranks)
        return ranks[place]

    leaders = [leader(share, node) for share in range(len(place_of))]
    led: dict[int, list[int]] = {}
    followed: dict[int, list[int]] = {}
    for rank in node:
        led[rank] = [share for share, each in enumerate(leaders) if each == rank]
        followed[rank] = [share for share, each in enumerate(leaders) if each != rank]
    others = _before(place_of[own], node)
    owners = [share for share in led[own] if share not in node]
    other_nodes = _before(number, members)
    sources = [leader(own, ranks) for ranks in other_nodes]
    return Plan(own, others, led, followed, owners, sources)


def _before(place: int, ring: Sequence[T]) -> list[T]:
    """The other members of a ring in descending order, from the one before `place`; see [Note:
    order of the sum]."""
    before = ring[:place]
    behind = ring[place + 1 :]
    return [*reversed(before), *reversed(behind)]


# --- inside a node


def _sum_in_memory(shares: Tensor, plan: Plan, node_memory: NodeMemory | None) -> None:
    """Collective of a node: each rank has its sums in the shares that it leads."""
    if node_memory is None or not plan.others:
        return
    for chunk, received in node_memory.hand_over(shares, plan.followed):
        _add_up(shares[:, chunk], plan, received)


def _sum_by_messages(shares: Tensor, plan: Plan, group: Group) -> None:
    """Collective of a node: does what `_sum_in_memory` does, by messages of the backend."""
    outgoing: list[Message] = []
    incoming: list[Message] = []
    received: Received = {}
    for rank in plan.others:
        for share in plan.led[rank]:
            outgoing.append(Message(rank, shares[share]))
        for share in plan.led[plan.own]:
            received[rank, share] = torch.empty_like(shares[share])
            incoming.append(Message(rank, received[rank, share]))
    begin_travel(outgoing, incoming, _FIRST_SUM, group).wait()
    _add_up(shares, plan, received)


def _add_up(shares: Tensor, plan: Plan, received: Received) -> None:
    """Adds up the shares that this rank leads, with what it got from ranks of its node."""
    for share in plan.led[plan.own]:
        parts = [received[rank, share] for rank in plan.others]
        _sum_into(shares[share], parts)


def _gather_in_memory(shares: Tensor, plan: Plan, node_memory: NodeMemory | None) -> None:
    """Collective of a node: each rank has all shares, of which it had those that it leads."""
    if node_memory is None or not plan.others:
        return
    for chunk, received in node_memory.hand_over(shares, plan.led):
        rows = shares[:, chunk]
        for (_, share), row in received.items():
            rows[share].copy_(row)


# --- between nodes


def _begin_sum(
    shares: Tensor, plan: Plan, dtype: torch.dtype, number: int, group: Group
) -> Pending:
    """Collective: begins to send the sums of this node to the owners, who add up those of all
    nodes; no two that are under way have the same number."""
    own = shares[plan.own]
    outgoing: list[Message] = []
    for owner in plan.owners:
        sums = shares[owner].to(dtype)
        outgoing.append(Message(owner, sums))
    incoming: list[Message] = []
    for rank in plan.sources:
        others = torch.empty_like(own, dtype=dtype)
        incoming.append(Message(rank, others))

    @torch.no_grad()
    def add_up() -> None:
        for message in (*outgoing, *incoming):
            # Allocated on the stream that began, which does not wait for the messages.
            keep_for_current_stream(message.tensor)
        parts = [message.tensor for message in incoming]
        _sum_into(own, parts)

    return begin_travel(outgoing, incoming, number, group, add_up)


def _sum_into(own: Tensor, parts: Sequence[Tensor]) -> None:
    """Adds up parts in their order, then `own`, in the dtype of `own`, which receives the sum."""
    if not parts:
        return
    numel = own.numel()
    is_on_host = own.device.type == CPU
    if is_on_host and len(parts) > 1:
        numel = _BLOCK_NBYTES // own.element_size()
    blocks = [torch.split(part, numel) for part in (*parts, own)]
    for first, *others, last in zip(*blocks, strict=True):
        total = first.to(own.dtype)
        for part in others:
            if total is first:  # which stays
                total = torch.add(total, part)
            else:
                total.add_(part)
        torch.add(total, last, out=last)
