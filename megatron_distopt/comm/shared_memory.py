"""Memory that the ranks of a group on one machine share, for collectives in place of messages.

[Note: shared memory] A message on one machine is copied twice by the kernel and wakes three
threads, so with small buckets, or with more ranks than cores, messages gain little over gloo's own
collectives. A group's first collective finds out whether every rank can map a segment of every
other one; if one cannot, all take messages, and those that can are a node. A segment is anonymous
(memfd), found by process and file descriptor, recognised by a secret, and freed with its process.
Ranks in different network namespaces count as on different machines, so that a network between them
can be simulated.

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
import secrets
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_distopt.comm.groups import Group, swap
from megatron_distopt.comm.pending import is_ending, settle
from megatron_distopt.errors import RanksDisagreeError, refusal

#: Memory that a rank shares for each of the two collectives, in two halves; kept as long as the
#: group is there.
SHARED_NBYTES = 4 << 20
_NUM_HALVES = 2
#: Numbers of the collectives.
SUM, GATHER = 0, 1
#: Differs from the small tags of other messages in the same group.
_MEET_TAG = 1 << 30
#: Words of a segment: its secret, and the published turn of each collective, each in a cache line
#: of its own.
_WORDS, _LINE = 512, 8
_NAME = "megatron_distopt"
_BYTE = torch.uint8
#: Processors on which stores are seen in their order.
_ORDERED = ("x86_64", "AMD64")
#: Looks before the first sleep; seconds of the shortest and the longest sleep, and between looks at
#: a peer's process.
_LOOKS, _LEAST_SLEEP, _MOST_SLEEP, _PATIENCE = 100, 3e-5, 1e-3, 0.1


#: By group; allowed where the group is missing.
_is_allowed: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()


def allow_shared_memory(group: Group, is_allowed: bool) -> None:
    """Allows or forbids shared memory from now on; where one rank of the group forbids it, none of
    them uses it.

    To be called by all of its ranks between the same two collectives. Those that were begun before
    end as they began.
    """
    if group.size > 1:
        settle()
        _is_allowed[group.own_handle] = is_allowed


def may_share_memory() -> bool:
    """Whether this system has what [Note: shared memory] needs."""
    return (
        hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and platform.machine() in _ORDERED
    )


@dataclass(frozen=True, eq=False)
class _Segment:
    """The memory that one rank shares, as it is mapped in this process."""

    memory: mmap.mmap  # all of it
    words: memoryview  # its beginning, in words of 8 bytes
    # a file descriptor of the process that shares it, readable once that process has ended
    process: int

    @classmethod
    def mapped(cls, descriptor: int, process: int) -> _Segment:
        """Maps a segment.

        Raises:
            OSError, ValueError, MemoryError: there is no address space for it.
        """
        try:
            memory = mmap.mmap(descriptor, 0)
        except BaseException:
            os.close(process)
            raise
        segment = cls(memory, memoryview(memory)[: 8 * _WORDS].cast("q"), process)
        finalize(segment, os.close, process)
        return segment

    def has_ended(self) -> bool:
        """Whether the process that shares it has ended."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))


class Lane:
    """One collective over a group whose ranks share memory. It does not keep the group.

    Args:
        segments: by rank of the group, of those that take part.
        collective: `SUM` or `GATHER`.
        group: of the ranks.
    """

    def __init__(self, segments: Mapping[int, _Segment], collective: int, group: Group) -> None:
        self.lock = threading.Lock()
        self._segments, self._collective = segments, collective
        self._timeout = group.time_limit
        self._rank = group.rank
        self._names = [group.global_rank(rank) for rank in range(group.size)]
        self._written = _LINE * (1 + collective)
        self._turn = 0  # that has begun on this rank
        self.half_nbytes = (len(segments[group.rank].memory) - 8 * _WORDS) // (2 * _NUM_HALVES)
        self._offset = 0  # of the half that this turn is in

    def begin(self) -> Tensor:
        """Begins a turn and returns this rank's half, uint8. The turn before must have been read
        from all ranks."""
        self._turn += 1
        number = _NUM_HALVES * self._collective + self._turn % _NUM_HALVES
        self._offset = 8 * _WORDS + number * self.half_nbytes
        memory = self._segments[self._rank].memory
        return torch.frombuffer(memory, dtype=_BYTE, count=self.half_nbytes, offset=self._offset)

    def publish(self) -> None:
        """Lets the other ranks read the half."""
        self._segments[self._rank].words[self._written] = self._turn

    def read(self, rank: int) -> Tensor:
        """Waits until another rank has published its half, and returns it.

        Raises:
            RanksDisagreeError: it will not. A turn that a rank published before it ended counts.
        """
        words, number = self._segments[rank].words, 0
        start, next_check = time.monotonic(), _PATIENCE
        while words[self._written] < self._turn:
            number += 1
            if number <= _LOOKS:
                os.sched_yield()
                continue
            waited = time.monotonic() - start
            if waited > next_check:
                next_check += _PATIENCE
                self._check_comes(rank, waited)
            time.sleep(min(max(waited / 8, _LEAST_SLEEP), _MOST_SLEEP))
        memory = self._segments[rank].memory
        return torch.frombuffer(memory, dtype=_BYTE, count=self.half_nbytes, offset=self._offset)

    def _check_comes(self, rank: int, waited: float) -> None:
        """Raises where a rank that was waited for so long will not publish."""
        segment, name = self._segments[rank], self._names[rank]
        has_ended = segment.has_ended()
        if segment.words[self._written] >= self._turn:
            return
        if has_ended:
            got = f"rank {name} has ended"
        elif waited > self._timeout or is_ending():
            got = f"rank {name} did not come within {waited:.0f} s"
        else:
            return
        remedy = f"Read what rank {name} wrote last; its error is the first one"
        raise RanksDisagreeError(
            refusal("collective", got, "be called by every rank of its group", remedy)
        )


@dataclass(eq=False)
class GroupNodes:
    """The ranks of a group by node, found out once; any partition gives right sums, if all ranks
    know the same one."""

    # held by the thread that finds it out
    lock: threading.Lock = field(default_factory=threading.Lock)
    # of each node, upwards; nodes in the order of their first ranks; empty before that is known
    members: tuple[tuple[int, ...], ...] = ()
    lanes: Sequence[Lane] = ()  # by collective, over this rank's node, where it has several ranks


#: By group, and by whether this rank allowed shared memory.
_nodes: WeakKeyDictionary[ProcessGroup, dict[bool, GroupNodes]] = WeakKeyDictionary()
_nodes_lock = threading.Lock()


def nodes_of(group: Group) -> GroupNodes:
    """Which ranks of a group share memory.

    Collective where the group asks for the first time, or for the first time after
    `allow_shared_memory`.
    """
    with _nodes_lock:
        is_allowed = _is_allowed.get(group.own_handle, True)
        nodes = _nodes.setdefault(group.own_handle, {}).setdefault(is_allowed, GroupNodes())
    with nodes.lock:
        if not nodes.members:
            segments, members = _meet(group, is_allowed)
            nodes.lanes = (
                [Lane(segments, each, group) for each in (SUM, GATHER)] if len(segments) > 1 else []
            )
            nodes.members = members
    return nodes


def _meet(
    group: Group, is_allowed: bool
) -> tuple[dict[int, _Segment], tuple[tuple[int, ...], ...]]:
    """Collective: maps the segments of ranks; returns those of this rank's node, by rank, and the
    ranks of each node.

    A rank that cannot share memory with exactly those that share memory with it is a node of its
    own.
    """
    secret = secrets.randbits(62)
    own = _new_segment(secret) if is_allowed else -1
    segments: dict[int, _Segment] = {}
    try:
        said = swap(_numbers(os.getpid(), own, secret, _network()), _MEET_TAG, group)
        for rank, numbers in enumerate(said):
            # The other ranks wait for an answer, and messages work in every case.
            with suppress(Exception):
                segments[rank] = _segment_of(*map(int, numbers))
        answers = swap(
            _numbers(*(rank in segments for rank in range(group.size))), _MEET_TAG, group
        )
    finally:
        if own >= 0:
            os.close(own)
    maps = [tuple(rank for rank in range(group.size) if answer[rank]) for answer in answers]
    nodes = [
        ranks if own in ranks and all(maps[rank] == ranks for rank in ranks) else (own,)
        for own, ranks in enumerate(maps)
    ]
    return {rank: segments[rank] for rank in nodes[group.rank] if rank in segments}, tuple(
        dict.fromkeys(nodes)
    )


def _numbers(*values: int) -> Tensor:
    """A tensor on the CPU, also where the user has another default device."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _new_segment(secret: int) -> int:
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
    return 8 * _WORDS + 2 * SHARED_NBYTES


def _segment_of(process: int, descriptor: int, secret: int, network: int) -> _Segment:
    """Maps the segment of a rank.

    Raises:
        OSError, LookupError: the rank is on another machine, or counts as that.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    if (
        descriptor < 0
        or network < 0
        or network != _network()
        or f"/memfd:{_NAME}" not in os.readlink(path)
    ):
        raise LookupError(path)
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != _segment_nbytes():
            raise LookupError(path)
        segment = _Segment.mapped(opened, os.pidfd_open(process))
    finally:
        os.close(opened)
    if segment.words[0] != secret:
        raise LookupError(path)
    return segment


def _network() -> int:
    """The number of this process's network namespace; -1 where it is unknown, and then no memory is
    shared."""
    try:
        return os.stat("/proc/self/ns/net").st_ino if may_share_memory() else -1
    except OSError:
        return -1
