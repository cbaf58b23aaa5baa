"""Collectives that are under way, and the threads that carry out those from pair to pair.

[Note: a thread for each group] One, so that a group's collectives keep their order; not one for all groups, so that
ranks which begin those of two groups in different orders do not wait for each other crosswise. Never gloo's own in it:
those match each other by order alone, and the caller goes on with some of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from time import perf_counter
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_distopt.comm.groups import Group, ProcessGroup

__all__ = ["BetweenPairs", "Done", "Pending", "begin_in_thread", "in_turn", "settle"]

#: What is done with (bucket, shard, group).
BetweenPairs = Callable[[Tensor, Tensor, Group], None]

_threads: WeakKeyDictionary[ProcessGroup, ThreadPoolExecutor] = WeakKeyDictionary()
_lock = Lock()


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Until what it writes is there; raises what went wrong in it. A float is the seconds that it took."""


class _InThread:
    """One that a thread of this process carries out.

    Args:
        future: gives the seconds that it took.
    """

    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def wait(self) -> float:
        return self._future.result()


class Done:
    """One that there was no need for."""

    def wait(self) -> float:
        return 0.0


def begin_in_thread(act: BetweenPairs, bucket: Tensor, shard: Tensor, group: Group) -> Pending:
    """Beside what the caller does next."""
    with _lock:
        thread = _threads.get(group.own_handle) or _new_thread()
        _threads[group.own_handle] = thread
    return _InThread(thread.submit(_timed, act, bucket, shard, group))


def in_turn(act: BetweenPairs, bucket: Tensor, shard: Tensor, group: Group) -> None:
    """Behind what is under way in the group, whose messages have the same tags."""
    thread = _threads.get(group.own_handle)
    if thread is None:
        act(bucket, shard, group)
    else:
        thread.submit(_timed, act, bucket, shard, group).result()


def settle() -> None:
    """Waits for what is under way in all groups; what went wrong in it is raised where it is waited for."""
    for thread in list(_threads.values()):
        thread.submit(int).result()


def _timed(act: BetweenPairs, bucket: Tensor, shard: Tensor, group: Group) -> float:
    start = perf_counter()
    with torch.no_grad():  # the caller's mode is that of its own thread
        act(bucket, shard, group)
    return perf_counter() - start


def _new_thread() -> ThreadPoolExecutor:
    """See [Note: a thread for each group]."""
    num_threads = torch.get_num_threads()  # torch counts them for every thread that asks
    return ThreadPoolExecutor(1, "megatron_distopt collectives", lambda: torch.set_num_threads(num_threads))


# A process that was forked has the executors and not their threads.
os.register_at_fork(after_in_child=_threads.clear)
