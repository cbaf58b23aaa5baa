"""Reduce-scatter and all-gather between pairs of ranks, for backends whose own are slow, and sums
in a reduce dtype.

gloo's `reduce_scatter_tensor` and `all_gather_into_tensor` reach a quarter of what the same link
carries (`benchmarks/collectives.py`). Here every rank hands every other rank its part at once, and
adds up what it receives: through memory that they share on one machine, as messages where they are
on several.

[Note: carriers] Where there are several nodes, a node's ranks may add up first. Of each shard, one
rank of each node is the carrier: of a shard of the node's own ranks the owner, of one of another
node the rank whose place is the owner's place there, modulo the node's size. A node's ranks hand
each other what they have for its carriers, in full precision. Then a carrier sends the node's sum
to the owner, who adds up one summand from each node in fp32. So a link between nodes carries a
gradient once for each other node, whatever the ranks of a node, and it is rounded once. Where each
rank counts as a node of its own, that is an exchange between all pairs, and where all are on one
node it is in its memory.

[Note: order of the sum] Rank r's shard is added up from rank r-1 downwards, around the ring, its
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group, Message, carrier_of, receive, send
from megatron_distopt.comm.shared_memory import GATHER, SUM, Lane, nodes_of
from megatron_distopt.device import CPU, fence, keep_for_current_stream, new_stream, on_stream

T = TypeVar("T")

#: Memory for messages. One half is added up while the other one is filled; it is given back
#: afterwards.
SCRATCH_NBYTES, _NUM_HALVES = 16 << 20, 2
#: For each other rank, where there is something else to do meanwhile, which can begin the sooner.
_NBYTES_EACH = 2 << 20
#: By device, where sums inside a node wait for what other ranks send, so that backward need not.
_side_stream = cache(new_stream)
#: Of a sum of more than two parts, so that it stays in the cache until the last one is added.
_BLOCK_NBYTES = 128 << 10
#: These differ from each other, and from the small tags of other messages in the same group.
_SUM_TAG, _GATHER_TAG = 1 << 28, 1 << 29


def reduce_scatter(
    bucket: Tensor,
    group: Group,
    members: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Collective: see `collectives.reduce_scatter`; what lies outside this rank's shard has no
    meaning afterwards.

    `members` are the ranks of each node, which add up first: all where they share memory, or else
    none. Between nodes sums are sent in `dtype`, or in their own.
    """
    nodes = nodes_of(group)
    members = members or (nodes.members if len(nodes.members) == 1 else alone(group))
    carried, between = _plan(bucket, members, group, dtype)
    if len(between.sources) == 1:  # all are on this node
        _sum_in_memory(between.shares, carried, group.rank, nodes.lanes)
        return
    under_way = deque[UnderWay]()
    for number, chunk in enumerate(between.chunks(is_alone=len(carried) == 1)):
        _sum_in_memory(between.shares[:, chunk], carried, group.rank, nodes.lanes)
        under_way.append(between.begin(chunk, number))
        _wait_for_all_but(_NUM_HALVES - 1, under_way)
    _wait_for_all_but(0, under_way)


def alone(group: Group) -> Sequence[Sequence[int]]:
    """Each rank as a node of its own."""
    return [(rank,) for rank in range(group.size)]


def begin_reduce_scatter(
    bucket: Tensor, group: Group, members: Sequence[Sequence[int]], dtype: torch.dtype
) -> UnderWay:
    """Collective: begins `reduce_scatter` by the backend; takes up to twice the bucket as scratch
    memory."""
    carried, between = _plan(bucket, members, group, dtype)
    wait_for_grads = fence(bucket.device)
    with torch.no_grad(), on_stream(_side_stream(bucket.device), bucket.device):
        wait_for_grads()
        if len(carried) > 1:
            inside = replace(
                between,
                sends={rank: shares for rank, shares in carried.items() if rank != group.rank},
                sums=carried[group.rank],
                sources=list(carried),
                dtype=bucket.dtype,
            )
            inside.begin().wait()
        return between.begin()


def _plan(
    bucket: Tensor, members: Sequence[Sequence[int]], group: Group, dtype: torch.dtype | None
) -> tuple[dict[int, list[int]], Sums]:
    """The shares that each rank of this node carries, and the sums over nodes; see [Note:
    carriers]."""
    place_of: dict[int, int] = {}
    for ranks in members:
        place_of |= {rank: place for place, rank in enumerate(ranks)}
    node = next(number for number, ranks in enumerate(members) if group.rank in ranks)
    own = _down_to(place_of[group.rank], members[node])

    def carrier(owner: int, ranks: Sequence[int]) -> int:
        if owner in ranks:
            return owner
        return ranks[place_of[owner] % len(ranks)]

    carried: dict[int, list[int]] = {rank: [] for rank in own}
    for share in range(group.size):
        carried[carrier(share, members[node])].append(share)
    sends = {owner: [owner] for owner in carried[group.rank] if owner not in own}
    sources = [carrier(group.rank, ranks) for ranks in _down_to(node, members)]
    shares = bucket.view(group.size, -1)
    return carried, Sums(shares, sends, [group.rank], sources, dtype or bucket.dtype, group)


def _down_to(last: int, ring: Sequence[T]) -> list[T]:
    """The ring downwards, so that the one of number `last` comes last; see [Note: order of the
    sum]."""
    return [ring[(last - 1 - each) % len(ring)] for each in range(len(ring))]


def _sum_in_memory(
    shares: Tensor, carried: Mapping[int, Sequence[int]], own: int, lanes: Sequence[Lane]
) -> None:
    """Collective of a node: each rank has its sums in the shares that it carries, in the order of
    `carried`."""
    handed = {
        rank: [share for share in range(len(shares)) if share not in carried[rank]]
        for rank in carried
    }
    for chunk, received in _handed_over(shares, handed, own, lanes, SUM):
        for share in carried[own]:
            into = shares[share][chunk]
            _sum_into([received.get((rank, share), into) for rank in carried], into)


def all_gather(
    bucket: Tensor, group: Group, members: Sequence[Sequence[int]] | None = None
) -> None:
    """Collective: see `collectives.all_gather`; as in [Note: carriers] the other way, `members`
    being each node's."""
    nodes = nodes_of(group)
    carried, between = _plan(bucket, members or nodes.members, group, None)
    if len(between.sources) == 1:  # all are on this node
        _gather_in_memory(between.shares, carried, group.rank, nodes.lanes)
        return
    receivers = [rank for rank in between.sources if rank != group.rank]
    nbytes = bucket.nbytes if len(carried) == 1 else _NBYTES_EACH
    chunks = _chunks_of(between.shares.shape[1], bucket.element_size(), nbytes)
    under_way = deque[UnderWay]()
    for number, chunk in enumerate(chunks):
        shares = between.shares[:, chunk]
        outgoing = [Parcel(rank, shares[group.rank]) for rank in receivers]
        incoming = [Parcel(owner, shares[owner]) for owner in between.sends]
        travel = begin_travel(outgoing, incoming, _GATHER_TAG + number, group)
        and_then = partial(_gather_in_memory, shares, carried, group.rank, nodes.lanes)
        under_way.append(replace(travel, and_then=and_then))
        _wait_for_all_but(_NUM_HALVES - 1, under_way)
    _wait_for_all_but(0, under_way)


def _gather_in_memory(
    shares: Tensor, carried: Mapping[int, Sequence[int]], own: int, lanes: Sequence[Lane]
) -> None:
    """Collective of a node: each rank has all shares, of which it had those that it carries."""
    for chunk, received in _handed_over(shares, carried, own, lanes, GATHER):
        for (_, share), row in received.items():
            shares[share][chunk].copy_(row)


def _handed_over(
    shares: Tensor,
    handed: Mapping[int, Sequence[int]],
    own: int,
    lanes: Sequence[Lane],
    collective: int,
) -> Iterator[tuple[slice, dict[tuple[int, int], Tensor]]]:
    """Collective of a node: chunks, and of each what other ranks hand over, by rank and share; none
    of a rank alone."""
    if len(handed) == 1:
        return
    lane = lanes[collective]
    with lane.lock:
        nbytes_each = shares.element_size() * max(map(len, handed.values()))
        for chunk in _chunks_of(shares.shape[1], nbytes_each, lane.half_nbytes):
            like = shares[0][chunk]
            own_rows = _rows(lane.begin(), len(handed[own]), like)
            for share, row in zip(handed[own], own_rows, strict=True):
                row.copy_(shares[share][chunk])
            lane.publish()
            received: dict[tuple[int, int], Tensor] = {}
            for rank in handed:
                if rank == own:
                    continue
                rows = _rows(lane.read(rank), len(handed[rank]), like)
                for share, row in zip(handed[rank], rows, strict=True):
                    received[rank, share] = row
            yield chunk, received


def _rows(half: Tensor, number: int, like: Tensor) -> Tensor:
    """The first bytes of a half of shared memory as `number` rows that are as long as `like`."""
    nbytes = number * like.numel() * like.element_size()
    return half[:nbytes].view(like.dtype).view(number, -1)


@dataclass(frozen=True, eq=False)
class Sums:
    """Shares of a bucket that ranks add up for each other, in place."""

    shares: Tensor  # [ranks, elements]
    sends: Mapping[int, Sequence[int]]  # by rank, the shares for which it gets this rank's summands
    sums: Sequence[int]  # the shares that this rank adds up
    # ranks in the order of these sums, this one among them; as many on all ranks
    sources: Sequence[int]
    dtype: torch.dtype  # in which summands are sent
    group: Group

    def chunks(self, *, is_alone: bool) -> Iterator[slice]:
        """What is under way at a time; all where no rank sends. `is_alone`: this rank, on its
        node."""
        num_peers = len(self.sources) - 1
        num_copies = 1 if self.dtype is self.shares.dtype else 2  # what is sent is a copy as well
        nbytes = SCRATCH_NBYTES // _NUM_HALVES
        if not is_alone or num_copies > 1:
            nbytes = min(nbytes, num_peers * _NBYTES_EACH)
        nbytes_each = self.dtype.itemsize * num_peers * num_copies
        return _chunks_of(self.shares.shape[1], nbytes_each, nbytes)

    def begin(self, chunk: slice | None = None, number: int = 0) -> UnderWay:
        """Collective: begins to send a chunk, or all; no two that are under way have the same
        number."""
        chunk = chunk or slice(0, self.shares.shape[1])
        outgoing = [
            Parcel(rank, self.shares[share][chunk].to(self.dtype))
            for rank, shares in self.sends.items()
            for share in shares
        ]
        numel = chunk.stop - chunk.start
        incoming: dict[tuple[int, int], Parcel] = {}
        for share in self.sums:
            for rank in self.sources:
                if rank != self.group.rank:
                    memory = self.shares.new_empty(numel, dtype=self.dtype)
                    incoming[share, rank] = Parcel(rank, memory)
        under_way = begin_travel(outgoing, list(incoming.values()), _SUM_TAG + number, self.group)
        return replace(under_way, and_then=partial(self._end, chunk, outgoing, incoming))

    @torch.no_grad()
    def _end(
        self, chunk: slice, outgoing: Sequence[Parcel], incoming: Mapping[tuple[int, int], Parcel]
    ) -> None:
        """Adds up a chunk that has arrived."""
        for parcel in (*outgoing, *incoming.values()):
            # Allocated on the stream that began, which does not wait for the exchange.
            keep_for_current_stream(parcel.tensor)
        for share in self.sums:
            into = self.shares[share][chunk]
            parts = list[Tensor]()
            for rank in self.sources:
                is_own = rank == self.group.rank
                parts.append(into if is_own else incoming[share, rank].tensor)
            _sum_into(parts, into)


def _wait_for_all_but(number: int, under_way: deque[UnderWay]) -> None:
    """Waits for the oldest chunks; one stays under way, so that a link is not idle while what came
    over it is read."""
    while len(under_way) > number:
        under_way.popleft().wait()


def _chunks_of(numel: int, nbytes_each: int, nbytes: int) -> Iterator[slice]:
    """Cuts a shard into chunks of at most `nbytes`, of elements that take `nbytes_each`."""
    step = max(numel, 1)
    if nbytes_each:
        step = max(nbytes // nbytes_each, 1)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        yield slice(start, stop)


def _sum_into(parts: Sequence[Tensor], into: Tensor) -> None:
    """Adds up parts, at least two, in their order and in the dtype of `into`, which may be one of
    them; they stay."""
    numel = into.numel()
    if len(parts) > 2 and into.device.type == CPU:
        numel = max(_BLOCK_NBYTES // into.element_size(), 1)
    blocks = [torch.split(each, numel) for each in (*parts, into)]
    for first, *middle, last, out in zip(*blocks, strict=True):
        total = first.to(out.dtype)
        for part in middle:
            total = torch.add(total, part) if total is first else total.add_(part)
        torch.add(total, last, out=out)


# --- tensors that go from some ranks of a group to some others, each between one pair; see
# layout/owners.py

#: Where a message is matched by its tag and names the rank that was lost.
_MESSAGES_OVER = "gloo"
#: Differs from the tags of other messages in the same group by more than there are rounds.
_TRAVEL_TAG = 1 << 26


@dataclass(frozen=True, eq=False)
class Parcel:
    """A tensor and the rank of the group at its other end."""

    rank: int  # that it goes to, or comes from
    tensor: Tensor  # 1-D, contiguous, with at least one element


@dataclass(frozen=True)
class UnderWay:
    """Tensors that are being sent and received."""

    pending: Sequence[dist.Work | Message]
    and_then: Callable[[], None] = lambda: None  # called when all have arrived

    def wait(self) -> None:
        """Waits until all have arrived: the CPU over gloo, the current stream of the device
        elsewhere.

        Raises:
            RanksDisagreeError: another rank ended, or did not come within the group's time limit.
        """
        for each in self.pending:
            each.wait()
        self.and_then()


def begin_travel(
    outgoing: Sequence[Parcel], incoming: Sequence[Parcel], number: int, group: Group
) -> UnderWay:
    """Begins to send and to receive; every parcel that leaves a rank must be expected by the other
    one.

    Args:
        outgoing: at most one to each rank; its tensor must not be changed until all has been waited
            for.
        incoming: at most one from each rank; its tensor is filled.
        number: the same on both ranks; no two that are under way between a pair may have the same.
        group: of the ranks; all of them begin in the same order of numbers.
    """
    if not outgoing and not incoming:
        return UnderWay(())
    device = (*outgoing, *incoming)[0].tensor.device
    if carrier_of(device, group) == _MESSAGES_OVER:
        messages = [
            receive(each.tensor, each.rank, _TRAVEL_TAG + number, group) for each in incoming
        ]
        messages += [send(each.tensor, each.rank, _TRAVEL_TAG + number, group) for each in outgoing]
        return UnderWay(messages)
    handle = group.own_handle
    operations = [
        dist.P2POp(dist.irecv, each.tensor, group.global_rank(each.rank), handle)
        for each in incoming
    ]
    operations += [
        dist.P2POp(dist.isend, each.tensor, group.global_rank(each.rank), handle)
        for each in outgoing
    ]
    return UnderWay(dist.batch_isend_irecv(operations))
