"""Collectives that are under way, the threads that carry out those between pairs of ranks, and how long they take.

[Note: a thread for each group] A group has one thread, so that its collectives keep their order. All groups together
have several, so that ranks which begin those of two groups in different orders do not wait for each other crosswise.
gloo's own collectives never run in such a thread: they match each other by order alone, and the caller goes on with
others.

[Note: the end of the process] Python joins such threads before it ends, however long they take, and one that waits for
another rank takes as long as the group's time limit: a rank that failed would stay for half an hour, and its launcher
would not learn of it. So `_end`, which Python calls before that, waits for what is under way: a minute, within which
ranks that end together arrive, or seconds where the program raised. Then waits in shared memory are given up
(`is_ending`). A wait inside gloo cannot be given up: the process runs its other handlers, and ends with status 1. No
thread of ours is left when the interpreter is taken down, where one that asks for its lock would abort the process.
tests/comm/test_end.py.

[Note: gloo lets go of tensors late] A thread of gloo's drops its reference to a tensor after it has told that the
collective is done. Where it is the last one, the thread asks for the interpreter's lock; while the interpreter is
taken down it is ended for that, and the process aborts ("terminate called without an active exception"). So does a
program of torch 2.13 alone that ends soon after a collective without `destroy_process_group`: 8 of 135 runs of two
ranks, and 62 of 75 where the last collective was not waited for; none of 78 with a pause. So `_end` ends with one.
Also after `destroy_process_group`: a group that the program holds, as Megatrons do, keeps its threads (1 of 50 ranks).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock
from time import perf_counter, sleep
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm.groups import Group, is_initialized, were_used

_log = logging.getLogger("megatron_distopt")

#: A collective; called with (bucket, shard, group).
BetweenPairs = Callable[[Tensor, Tensor, Group], None]

_threads: WeakKeyDictionary[ProcessGroup, ThreadPoolExecutor] = WeakKeyDictionary()
_lock = Lock()
_ending = Event()
#: How long the end of the process waits for other ranks: after an exception of the program, without one, and after
#: waits in shared memory were given up.
_SECONDS_AFTER_AN_EXCEPTION, _SECONDS_AT_END, _SECONDS_TO_GIVE_UP = 5.0, 60.0, 5.0
#: See [Note: gloo lets go of tensors late]; its threads need less than a millisecond on an idle processor.
_SECONDS_FOR_GLOO = 0.1


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Waits until its result is there, and raises what went wrong in it.

        Returns:
            The seconds that it took, as a float; anything else where they are unknown.
        """


class _InThread:
    """A collective that a thread of this process carries out."""

    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def wait(self) -> float:
        return self._future.result()


class Done:
    """A collective of one rank, for which there is nothing to do."""

    def wait(self) -> float:
        return 0.0


def run_in_turn(act: BetweenPairs, bucket: Tensor, shard: Tensor, group: Group, overlapped: bool) -> Pending:
    """Runs a collective after those that are under way in the group, because their messages have the same tags.

    An overlapped one is only begun, in the thread of the group.
    """
    with _lock:
        thread = _threads.get(group.own_handle)
        if thread is None and overlapped:  # see [Note: a thread for each group]
            num_threads = torch.get_num_threads()  # torch counts them for every thread that asks
            name = "megatron_distopt collectives"
            thread = ThreadPoolExecutor(1, name, lambda: torch.set_num_threads(num_threads))
            _threads[group.own_handle] = thread
    if thread is None:
        act(bucket, shard, group)
        return Done()
    pending = _InThread(thread.submit(_timed, act, bucket, shard, group))
    if not overlapped:
        pending.wait()
    return pending


def settle() -> None:
    """Waits for what is under way in all groups; an error in it is raised where that collective is waited for."""
    for thread in list(_threads.values()):
        thread.submit(int).result()


def is_ending() -> bool:
    """Whether this process ends and no longer waits for other ranks, see [Note: the end of the process]."""
    return _ending.is_set()


def _end() -> None:
    """Ends the threads, and the process where one waits for a rank that is gone: [Note: the end of the process]."""
    with _lock:
        threads = list(_threads.values())
        _threads.clear()
    last = [thread.submit(int) for thread in threads]  # done once all before them are
    has_raised = getattr(sys, "last_value", None) is not None
    if wait(last, _SECONDS_AFTER_AN_EXCEPTION if has_raised else _SECONDS_AT_END).not_done:
        _log.error("this rank ends with a collective under way that other ranks did not come to; read what they wrote")
        _ending.set()
        if wait(last, _SECONDS_TO_GIVE_UP).not_done:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    for thread in threads:
        thread.shutdown()
    if is_initialized() or were_used():
        sleep(_SECONDS_FOR_GLOO)


def _timed(act: BetweenPairs, bucket: Tensor, shard: Tensor, group: Group) -> float:
    start = perf_counter()
    with torch.no_grad():  # the caller's mode is that of its own thread
        act(bucket, shard, group)
    return perf_counter() - start


# A process that was forked has the executors and not their threads.
os.register_at_fork(after_in_child=_threads.clear)
# Before Python joins the threads; `atexit` would be after that. Processes of `multiprocessing` call it, too.
threading._register_atexit(_end)  # type: ignore[attr-defined]


# --- how long a step communicates, how much of that it waits for, and the names of its phases in a profiler

#: Begins the name of every range, so that a timeline can be searched for them.
_PREFIX = "megatron_distopt::"


@contextmanager
def profiled(name: str) -> Iterator[None]:
    """Names what runs meanwhile, behind "megatron_distopt::", in `torch.profiler`.

    >>> with torch.profiler.profile() as profile, profiled("clip"):
    ...     pass
    >>> [event.key for event in profile.key_averages()]
    ['megatron_distopt::clip']
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        with record_function(_PREFIX + name):
            yield
    else:
        yield


@dataclass(frozen=True)
class CommTime:
    """Seconds that some collectives of this rank took."""

    total: float | None  # from the beginning of each to its end, added up; None where the backend does not report it
    exposed: float  # during which the step waited for them

    @property
    def hidden(self) -> float | None:
        """Seconds that were overlapped with computation."""
        return None if self.total is None else max(self.total - self.exposed, 0.0)

    def __add__(self, other: CommTime) -> CommTime:
        known = self.total is not None and other.total is not None
        total = (self.total or 0.0) + (other.total or 0.0) if known else None
        return CommTime(total, self.exposed + other.exposed)


NO_TIME = CommTime(0.0, 0.0)


def waited_since(start: float, buffers: Sequence[ShardedBuffer]) -> CommTime:
    """The time of collectives that were not overlapped.

    Args:
        start: what `perf_counter` returned before the first of them.
        buffers: that were communicated; on a device the CPU only launches collectives, so their total is unknown.
    """
    seconds = perf_counter() - start
    is_known = all(buffer.grad.device.type == "cpu" for buffer in buffers)
    return CommTime(seconds if is_known else None, seconds)


def waited(pending: Mapping[str, Pending]) -> CommTime:
    """Waits for collectives in the order given."""
    start, total = perf_counter(), 0.0
    is_known = True
    for name, each in pending.items():
        with profiled(name):
            seconds = each.wait()
        is_known = is_known and isinstance(seconds, float)
        total += seconds if isinstance(seconds, float) else 0.0
    return CommTime(total if is_known else None, perf_counter() - start)


class CommLog:
    """Logs the communication of a step at INFO, every so many steps; the first rank has one."""

    def __init__(self, every: int) -> None:
        self._every, self._num_steps = every, 0

    def step(self, grads: CommTime, params: CommTime) -> None:
        """Counts a step, and logs where it is its turn."""
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            both = f"reduce-scatter {_described(grads)}; all-gather {_described(params)}"
            _log.info("communication of step %d: %s", self._num_steps, both)


def _described(time: CommTime) -> str:
    """
    >>> _described(CommTime(0.25, 0.05)), _described(CommTime(None, 0.05))
    ('250.0 ms, of which 50.0 exposed and 200.0 hidden', '50.0 ms exposed')
    """
    exposed = f"{time.exposed * 1e3:.1f}"
    if time.total is None or time.hidden is None:
        return f"{exposed} ms exposed"
    return f"{time.total * 1e3:.1f} ms, of which {exposed} exposed and {time.hidden * 1e3:.1f} hidden"
