"""Collectives that are under way, and the threads that carry out those between pairs of ranks.

[Note: a thread for each group] A group has one thread, so that its collectives keep their order.
All groups together have several, so that ranks which begin those of two groups in different orders
do not wait for each other crosswise. gloo's own collectives never run in such a thread: they match
each other by order alone, and the caller goes on with others.

[Note: the end of the process] Python joins such threads before it ends, however long they take, and
one that waits for another rank takes as long as the group's time limit: a rank that failed would
stay for half an hour, and its launcher would not learn of it. So `_end`, which Python calls before
that, waits for what is under way: a minute, within which ranks that end together arrive, or seconds
where the program raised. Then waits in shared memory are given up (`is_ending`). A wait inside gloo
cannot be given up: the process runs its other handlers, and ends with status 1. No thread of ours
is left when the interpreter is taken down, where one that asks for its lock would abort the
process. tests/comm/test_end.py.

[Note: gloo lets go of tensors late] A thread of gloo's drops its reference to a tensor after it has
reported the collective as done. If that is the last reference, the thread asks for the
interpreter's lock; during the interpreter's shutdown Python ends the thread for that, and the
process aborts ("terminate called without an active exception"). So does a program of torch 2.13
alone that ends soon after a collective without `destroy_process_group`: 8 of 135 runs of two ranks,
and 62 of 75 where the last collective was not waited for; none of 78 with a pause. So `_end` ends
with one. Also after `destroy_process_group`: a group that the program holds, as Megatrons do, keeps
its threads (1 of 50 ranks)."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock
from time import sleep
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from megatron_distopt.comm.groups import Group, is_initialized, were_used

_log = logging.getLogger("megatron_distopt")

_threads: WeakKeyDictionary[ProcessGroup, ThreadPoolExecutor] = WeakKeyDictionary()
_lock = Lock()
_ending = Event()
#: How long the end of the process waits for other ranks: after an exception of the program, without
#: one, and after waits in shared memory were given up.
_SECONDS_AFTER_AN_EXCEPTION, _SECONDS_AT_END, _SECONDS_TO_GIVE_UP = 5.0, 60.0, 5.0
#: See [Note: gloo lets go of tensors late]; its threads need less than a millisecond on an idle
#: processor.
_SECONDS_FOR_GLOO = 0.1


@dataclass(frozen=True, eq=False)
class Pending:
    """What is under way: a collective, messages, or nothing at all."""

    waits: Sequence[Callable[[], object]] = ()  # each waits for a part of it, or raises its error
    and_then: Callable[[], None] | None = None  # called when all parts are there
    #: Whether the device has carried it out; asked after `wait`.
    is_completed: Callable[[], bool] = lambda: True

    def wait(self) -> None:
        """Waits until the result is there: the CPU over gloo, the current stream of the device
        elsewhere.

        Raises:
            RanksDisagreeError: another rank ended, or did not come within the group's time limit.
        """
        for wait_for in self.waits:
            wait_for()
        if self.and_then is not None:
            self.and_then()


def begin_in_turn(act: Callable[[], None], group: Group) -> Pending:
    """Begins a collective in the thread of the group, after those that are under way in it."""
    with _lock:
        thread = _threads.get(group.own_handle)
        if thread is None:  # see [Note: a thread for each group]
            num_threads = torch.get_num_threads()  # torch counts them for every thread that asks
            name = "megatron_distopt collectives"
            thread = ThreadPoolExecutor(1, name, lambda: torch.set_num_threads(num_threads))
            _threads[group.own_handle] = thread
    # Without gradients, because the caller's mode is that of its own thread.
    return Pending([thread.submit(torch.no_grad()(act)).result])


def wait_for_turn(group: Group) -> None:
    """Waits for the collectives that are under way in the group: the messages of the next one have
    the same tags."""
    with _lock:
        thread = _threads.get(group.own_handle)
    if thread is not None:
        thread.submit(int).result()


def drain() -> None:
    """Waits for what is under way in all groups; an error in it is raised where that collective is
    waited for."""
    for thread in list(_threads.values()):
        thread.submit(int).result()


def is_ending() -> bool:
    """Whether this process ends and no longer waits for other ranks, see [Note: the end of the
    process]."""
    return _ending.is_set()


def _end() -> None:
    """Ends the threads, and the process where one waits for a rank that is gone: [Note: the end of
    the process]."""
    with _lock:
        threads = list(_threads.values())
        _threads.clear()
    last = [thread.submit(int) for thread in threads]  # done once all before them are
    has_raised = getattr(sys, "last_value", None) is not None
    if wait(last, _SECONDS_AFTER_AN_EXCEPTION if has_raised else _SECONDS_AT_END).not_done:
        _log.error(
            "this rank is ending while it waits in a collective that other ranks did not join; "
            "read the logs of those ranks"
        )
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


# A process that was forked has the executors and not their threads. So what is under way ends
# before: in the child a param that was being gathered can be read, and what waits for it dropped.
# Where processes are never forked, there is nothing to register.
getattr(os, "register_at_fork", lambda **_: None)(before=drain, after_in_child=_threads.clear)
# Before Python joins the threads; `atexit` would be after that. Processes of `multiprocessing` call
# it, too.
threading._register_atexit(_end)  # type: ignore[attr-defined]
