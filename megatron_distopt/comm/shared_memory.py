"""Memory that the ranks of a group on one machine share, for collectives in place of messages.

[Note: shared memory] A message on one machine is copied twice by the kernel and wakes three
threads, so with small buckets, or with more ranks than cores, messages gain little over gloo's own
collectives. A segment is anonymous (memfd), found by process and file descriptor, recognised by a
secret, and freed with its process; group_nodes.py finds out which ranks can map those of each
other. Ranks in different network namespaces count as on different machines, so that a network
between them can be simulated.

Each chunk is a *turn*: a rank writes its half, publishes it, and reads those of all others. The two
halves alternate. A rank that has published a turn has read the turn before, so once all ranks have
published, the half of the turn before is free. A turn is published as a number in the segment,
stored after the data; on x86 other processors see stores in that order, and elsewhere there are
messages. A rank that waits looks, yields, sleeps ever longer up to a millisecond, and raises once
the peer's process has ended or the group's timeout is over.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.pending import is_ending
from megatron_distopt.errors import RanksDisagreeError

#: Memory that a rank shares, in two halves; kept as long as the group is there.
SHARED_NBYTES = 4 << 20
_NUM_HALVES = 2
#: Words of a segment: its secret, and the published turn, each in a cache line of its own.
_WORDS, _SECRET, _TURN = 512, 0, 8
_NAME = "megatron_distopt"
#: Processors on which stores are seen in their order.
_ORDERED = ("x86_64", "AMD64")
#: Number of looks before the first sleep; seconds of the shortest and of the longest sleep, and
#: between two looks at a peer's process.
_LOOKS, _LEAST_SLEEP, _MOST_SLEEP, _PATIENCE = 100, 3e-5, 1e-3, 0.1


def may_share_memory() -> bool:
    """Whether this system has what [Note: shared memory] needs."""
    return (
        hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and platform.machine() in _ORDERED
    )


@dataclass(frozen=True, eq=False)
class Segment:
    """The memory that one rank shares, as it is mapped in this process."""

    memory: mmap.mmap  # all of it
    words: memoryview  # its beginning, in words of 8 bytes
    # a file descriptor of the process that shares it, readable once that process has ended
    process: int

    def has_ended(self) -> bool:
        """Whether the process that shares it has ended."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))


#: What other ranks have handed over, by rank and share.
Received = dict[tuple[int, int], Tensor]


class NodeMemory:
    """The memory of the ranks of a node that are in one group, for their collectives, one after the
    other. It does not keep the group.

    Args:
        segments: by rank of the group, of those on the node.
        group: of the ranks.
    """

    def __init__(self, segments: Mapping[int, Segment], group: Group) -> None:
        self._lock = threading.Lock()
        self._segments = segments
        self._timeout = group.time_limit
        self._rank = group.rank
        self._names = [group.global_rank(rank) for rank in range(group.size)]
        self._turn = 0  # that has begun on this rank
        self._half_nbytes = (len(segments[group.rank].memory) - 8 * _WORDS) // _NUM_HALVES

    def hand_over(
        self, shares: Tensor, handed: Mapping[int, Sequence[int]]
    ) -> Iterator[tuple[slice, Received]]:
        """Collective of the node: every rank hands shares to all others, chunk by chunk.

        Args:
            shares: [shares, elements].
            handed: by rank, the numbers of the shares that it hands over.

        Returns:
            Each chunk, with what the other ranks hand over in it.
        """
        nbytes_each = shares.element_size() * max(map(len, handed.values()))
        with self._lock:
            for chunk in chunks_of(shares.shape[1], nbytes_each, self._half_nbytes):
                self._turn += 1
                for share, row in self._rows(self._rank, handed[self._rank], shares[:, chunk]):
                    row.copy_(shares[share][chunk])
                self._segments[self._rank].words[_TURN] = self._turn  # others may read it now
                received: Received = {}
                for rank, numbers in handed.items():
                    if rank != self._rank:
                        self._wait_for(rank)
                        for share, row in self._rows(rank, numbers, shares[:, chunk]):
                            received[rank, share] = row
                yield chunk, received

    def _rows(
        self, rank: int, numbers: Sequence[int], like: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """The half of this turn of a rank's memory as rows for shares of these numbers."""
        numel = like.shape[1]
        offset = 8 * _WORDS + self._turn % _NUM_HALVES * self._half_nbytes
        half = torch.frombuffer(
            self._segments[rank].memory, dtype=torch.uint8, count=self._half_nbytes, offset=offset
        )
        rows = half[: len(numbers) * numel * like.element_size()].view(like.dtype)
        return zip(numbers, rows.view(len(numbers), numel), strict=True)

    def _wait_for(self, rank: int) -> None:
        """Waits until another rank has published its half.

        Raises:
            RanksDisagreeError: it will not. A turn that a rank published before it ended counts.
        """
        words, number = self._segments[rank].words, 0
        start, next_check = time.monotonic(), _PATIENCE
        while words[_TURN] < self._turn:
            number += 1
            if number <= _LOOKS:
                os.sched_yield()
                continue
            waited = time.monotonic() - start
            if waited > next_check:
                next_check += _PATIENCE
                self._check_comes(rank, waited)
            time.sleep(min(max(waited / 8, _LEAST_SLEEP), _MOST_SLEEP))

    def _check_comes(self, rank: int, waited: float) -> None:
        """Raises where a rank that was waited for so long will not publish."""
        segment, name = self._segments[rank], self._names[rank]
        has_ended = segment.has_ended()
        if segment.words[_TURN] >= self._turn:
            return
        if has_ended:
            what = f"rank {name} has ended"
        elif waited > self._timeout or is_ending():
            what = f"rank {name} did not come within {waited:.0f} s"
        else:
            return
        raise RanksDisagreeError(
            f"In a collective, {what}. Every rank of the group must call it. Read the log of rank "
            f"{name}: its last error is the cause."
        )


def chunks_of(numel: int, nbytes_each: int, nbytes: int) -> Iterator[slice]:
    """Cuts a shard into chunks of at most `nbytes`, of elements that take `nbytes_each`."""
    step = max(numel, 1)
    if nbytes_each:
        step = max(nbytes // nbytes_each, 1)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def new_segment(secret: int) -> int:
    """Makes a segment and returns its file descriptor; -1 where this system has no such thing, or
    no room for it.

    A limit on file sizes (`ulimit -f`) also limits this memory. Python ignores the signal SIGXFSZ
    that comes with it and raises; a program that has restored the default action of the signal is
    ended by it.
    """
    if not may_share_memory():
        return -1
    try:
        descriptor = os.memfd_create(_NAME)
    except OSError:
        return -1
    try:
        os.ftruncate(descriptor, _segment_nbytes())
        os.pwrite(descriptor, secret.to_bytes(8, sys.byteorder), 0)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _segment_nbytes() -> int:
    return 8 * _WORDS + SHARED_NBYTES


def segment_of(process: int, descriptor: int, secret: int, network: int) -> Segment:
    """Maps the segment of a rank.

    Raises:
        OSError, LookupError: the rank is on another machine, or counts as that.
        ValueError, MemoryError: there is no address space for it.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    if (
        descriptor < 0
        or network < 0
        or network != network_namespace()
        or f"/memfd:{_NAME}" not in os.readlink(path)
    ):
        raise LookupError(path)
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != _segment_nbytes():
            raise LookupError(path)
        memory = mmap.mmap(opened, 0)
    finally:
        os.close(opened)
    words = memoryview(memory)[: 8 * _WORDS].cast("q")
    if words[_SECRET] != secret:
        raise LookupError(path)
    segment = Segment(memory, words, os.pidfd_open(process))
    finalize(segment, os.close, segment.process)
    return segment


def network_namespace() -> int:
    """The number of this process's network namespace; -1 where it is unknown, and then no memory is
    shared."""
    try:
        return os.stat("/proc/self/ns/net").st_ino if may_share_memory() else -1
    except OSError:
        return -1
