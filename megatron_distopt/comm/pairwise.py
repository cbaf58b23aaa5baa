"""Reduce-scatter and all-gather between pairs of ranks, for backends whose own are slow, and sums in a reduce dtype.

gloo's `reduce_scatter_tensor` and `all_gather_into_tensor` reach a quarter of what the same link carries
(`benchmarks/collectives.py`). Here every rank hands every other rank its part at once, and adds up what it receives:
through memory that they share on one machine, as messages where they are on several.

[Note: order of the sum] Rank r's shard is added up from rank r-1 downwards, around the ring, its own part last, each
sum rounded to the dtype. The result is the same in every run and by either way, whatever arrives first, and bit for bit
what gloo's own ring gives.

[Note: sum in a reduce dtype] fp32 grads may be communicated in 16 bits, which are half the bytes. They are added up in
fp32 in the same order. A rank's own part is not sent, so it is not rounded. The result differs from an fp32
reduce-scatter by one rounding of each other summand, and not by one at every addition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm.groups import Group, Message, carrier_of, others, receive, send, wait
from megatron_distopt.comm.shared_memory import GATHER, SUM, Lane, lane_of
from megatron_distopt.device import keep_for_current_stream

#: Memory for received messages. One half is added up while the other one is filled; it is given back afterwards.
SCRATCH_NBYTES = 16 << 20
_NUM_HALVES = 2
#: Of a sum of more than two parts, so that it stays in the cache until the last one is added.
_BLOCK_NBYTES = 128 << 10
#: These differ from each other, and from the small tags of other messages in the same group.
_SUM_TAG, _GATHER_TAG = 1 << 28, 1 << 29


def reduce_scatter(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.reduce_scatter`; what lies outside `shard` stays as it was."""
    lane = lane_of(group, SUM)
    if lane is None:
        sum_by_messages(bucket, shard, group)
        return
    ranks = [*others(group), group.rank]
    sum_in_memory(bucket.view(group.size, -1), {rank: [rank] for rank in ranks}, group.rank, lane)


def sum_in_memory(shares: Tensor, carried: Mapping[int, Sequence[int]], own: int, lane: Lane) -> None:
    """Collective of the ranks of a lane: each has their sums in the shares that it carries.

    Args:
        shares: [number, elements].
        carried: by rank, in the order of the sums, which shares it carries; each share is carried by one of them.
        own: this rank.
        lane: over these ranks.
    """
    # Every rank writes the shares that others carry into a half of its segment.
    numbers = range(len(shares))
    handed = {rank: [share for share in numbers if share not in carried[rank]] for rank in carried}
    most = max(map(len, handed.values()))
    with lane.lock:
        for chunk in _chunks_of(shares.shape[1], shares.element_size() * most, lane.half_nbytes):
            like = shares[0][chunk]
            for row, share in zip(_rows(lane.begin(), like, len(handed[own])), handed[own], strict=True):
                row.copy_(shares[share][chunk])
            lane.publish()
            received = {rank: _rows(lane.read(rank), like, len(handed[rank])) for rank in carried if rank != own}
            for share in carried[own]:
                into = shares[share][chunk]
                parts = [into if rank == own else received[rank][handed[rank].index(share)] for rank in carried]
                sum_into(parts, into)


def all_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: see `collectives.all_gather`."""
    shares = bucket.view(group.size, -1)
    if shares[group.rank].data_ptr() != shard.data_ptr():
        shares[group.rank].copy_(shard)
    lane = lane_of(group, GATHER)
    if lane is None:
        gather_by_messages(bucket, shard, group)
        return
    with lane.lock:
        for chunk in _chunks_of(shard.numel(), shard.element_size(), lane.half_nbytes):
            own = shard[chunk]
            _rows(lane.begin(), own, 1)[0].copy_(own)
            lane.publish()
            for rank in others(group):
                shares[rank][chunk].copy_(_rows(lane.read(rank), own, 1)[0])


def _rows(half: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """The beginning of a half, as rows of the dtype and length of `like`."""
    nbytes = num_rows * like.numel() * like.element_size()
    return half[:nbytes].view(like.dtype).view(num_rows, -1)


@dataclass(frozen=True)
class AsNumbers:
    """How a chunk of an owner's shard is sent: as numbers of a dtype, in a message of bytes."""

    dtype: torch.dtype
    unit = 1  # elements: chunks are multiples of this
    rounds_own = False  # whether the owner's own summand is rounded as well

    def nbytes(self, owner: int, chunk: slice) -> int:
        return self.dtype.itemsize * int(chunk.stop - chunk.start)

    def write(self, values: Tensor, owner: int, chunk: slice) -> Tensor:
        return values.to(self.dtype).view(torch.uint8)

    def read(self, message: Tensor, owner: int, chunk: slice) -> Tensor:
        return message.view(self.dtype)


def sum_by_messages(bucket: Tensor, shard: Tensor, group: Group, dtype: torch.dtype | None = None) -> None:
    """Collective: `reduce_scatter` wherever the ranks are.

    Args:
        bucket, shard: as there; fp32 with a dtype.
        dtype: in which values are sent, see [Note: sum in a reduce dtype].
    """
    ranks = others(group)
    exchange_sums(bucket, shard, ranks, [*ranks, group.rank], AsNumbers(dtype or shard.dtype), group)


def exchange_sums(
    bucket: Tensor, shard: Tensor, owners: Sequence[int], sources: Sequence[int], form: AsNumbers, group: Group
) -> None:
    """Sends shards of a bucket to their owners, and adds up the own one from its sources.

    Args:
        owners: other ranks, whose shards this rank sends.
        sources: ranks in the order of the sum, this one among them; as many on all ranks.
        form: in which shards are sent, with the same chunks on all ranks.
    """
    shares, peers = bucket.view(group.size, -1), [rank for rank in sources if rank != group.rank]
    num_copies = 1 if form.dtype is shard.dtype else 2  # what is sent is a copy as well
    nbytes_each = form.dtype.itemsize * form.unit * len(peers) * num_copies
    chunks = list(_chunks_of(shard.numel(), nbytes_each, SCRATCH_NBYTES // _NUM_HALVES, form.unit))
    halves = min(_NUM_HALVES, len(chunks))
    row_nbytes = max(form.nbytes(group.rank, chunk) for chunk in chunks)
    scratch = shard.new_empty(halves, len(peers), row_nbytes, dtype=torch.uint8)
    under_way: deque[tuple[slice, dict[int, Tensor], list[Message], list[Tensor], list[Message]]] = deque()

    def add_up_first() -> None:
        chunk, parts, received, _, sent = under_way.popleft()
        wait(received)
        values = {rank: form.read(part, group.rank, chunk) for rank, part in parts.items()}
        own = values[group.rank] = shard[chunk]
        if form.rounds_own:
            values[group.rank] = form.read(form.write(own, group.rank, chunk), group.rank, chunk)
        sum_into([values[rank] for rank in sources], own)
        wait(sent)

    for number, chunk in enumerate(chunks):
        rows = scratch[number % halves, :, : form.nbytes(group.rank, chunk)]
        received = [receive(rows[row], rank, _SUM_TAG + number, group) for row, rank in enumerate(peers)]
        leaving = [form.write(shares[owner][chunk], owner, chunk) for owner in owners]
        sent = [send(each, owner, _SUM_TAG + number, group) for owner, each in zip(owners, leaving, strict=True)]
        under_way.append((chunk, dict(zip(peers, rows, strict=True)), received, leaving, sent))
        if len(under_way) == halves:
            add_up_first()
    while under_way:
        add_up_first()


def gather_by_messages(bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Collective: `all_gather` wherever the ranks are; this rank's part is in `bucket` already."""
    shares, ranks = bucket.view(group.size, -1), others(group)
    received = [receive(shares[rank], rank, _GATHER_TAG, group) for rank in ranks]
    sent = [send(shard, rank, _GATHER_TAG, group) for rank in ranks]
    wait(received)
    wait(sent)


def _chunks_of(numel: int, nbytes_each: int, nbytes: int, unit: int = 1) -> Iterator[slice]:
    """Cuts a shard into chunks, so that `nbytes` hold one of them.

    Args:
        numel: of the shard.
        nbytes_each: that `unit` elements take.
        nbytes: that a chunk may take.
        unit: every chunk but the last one is a multiple of this.
    """
    step = max(nbytes // nbytes_each, 1) * unit
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


@dataclass(frozen=True, eq=False)
class RoundedSum:
    """A sum in a reduce dtype whose parts are being sent by the backend."""

    work: dist.Work  # the exchange of the parts
    sent: Tensor  # [ranks, elements], this rank's parts of all shards
    received: Tensor  # [ranks, elements], where the parts arrive
    shard: Tensor  # 1-D, this rank's own part, to which they are added
    group: Group

    @torch.no_grad()
    def wait(self) -> None:
        """Waits until the sum is in the shard."""
        self.work.wait()
        # Both were allocated on the stream that began, which does not wait for the exchange.
        keep_for_current_stream(self.sent)
        keep_for_current_stream(self.received)
        sum_into([*(self.received[rank] for rank in others(self.group)), self.shard], self.shard)


def begin_rounded_sum(bucket: Tensor, shard: Tensor, group: Group, dtype: torch.dtype) -> RoundedSum:
    """Collective: begins `sum_by_messages` in a dtype by the backend's own exchange.

    It takes twice the bucket in `dtype` as scratch memory until it is waited for.
    """
    sent = bucket.view(group.size, -1).to(dtype)
    received = torch.empty_like(sent)
    work: Any = dist.all_to_all_single(received, sent, group=group.handle, async_op=True)
    return RoundedSum(work, sent, received, shard, group)


def sum_into(parts: Sequence[Tensor], into: Tensor) -> None:
    """Adds up parts, at least two, in their order and in the dtype of `into`, which may be one of them; they stay."""
    in_blocks = len(parts) > 2 and into.device.type == "cpu"
    numel = max(_BLOCK_NBYTES // into.element_size(), 1) if in_blocks else into.numel()
    for first, *middle, last, out in zip(*(torch.split(each, numel) for each in (*parts, into)), strict=True):
        total = first.to(out.dtype)
        for part in middle:
            total = torch.add(total, part) if total is first else total.add_(part)
        torch.add(total, last, out=out)


# --- tensors that go from some ranks of a group to some others, each between one pair; see layout/owners.py

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

    def wait(self) -> None:
        """Waits until all have arrived: the CPU over gloo, the current stream of the device elsewhere.

        Raises:
            RanksDisagreeError: another rank ended, or did not come within the group's time limit.
        """
        for each in self.pending:
            each.wait()


def begin_travel(outgoing: Sequence[Parcel], incoming: Sequence[Parcel], number: int, group: Group) -> UnderWay:
    """Begins to send and to receive; every parcel that leaves a rank must be expected by the other one.

    Args:
        outgoing: at most one to each rank; its tensor must not be changed until all has been waited for.
        incoming: at most one from each rank; its tensor is filled.
        number: the same on both ranks; no two that are under way between a pair may have the same.
        group: of the ranks; all of them begin in the same order of numbers.
    """
    if not outgoing and not incoming:
        return UnderWay(())
    device = (*outgoing, *incoming)[0].tensor.device
    if carrier_of(device, group) == _MESSAGES_OVER:
        messages = [receive(each.tensor, each.rank, _TRAVEL_TAG + number, group) for each in incoming]
        messages += [send(each.tensor, each.rank, _TRAVEL_TAG + number, group) for each in outgoing]
        return UnderWay(messages)
    handle = group.own_handle
    operations = [dist.P2POp(dist.irecv, each.tensor, group.global_rank(each.rank), handle) for each in incoming]
    operations += [dist.P2POp(dist.isend, each.tensor, group.global_rank(each.rank), handle) for each in outgoing]
    return UnderWay(dist.batch_isend_irecv(operations))
