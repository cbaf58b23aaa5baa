"""Signs of life: a rank whose node died is named within seconds, instead of being waited for in a
collective.

[Note: signs of life] Each rank counts in torch's store and reads the count of one other, the next
in a ring. Three things would falsify that. torch's own client is locked while the main thread waits
in it, so this thread has a client of its own. A call to a store whose node is gone never returns,
so a second thread watches the first. A process that stood still could not hear the others, so only
time in which this process was awake counts as their silence."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize

import torch.distributed as dist

from megatron_distopt.comm.agree import all_gather_results
from megatron_distopt.comm.groups import Group, default_store

if dist.is_available():
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_log = logging.getLogger("megatron_distopt")
#: Signs that a rank gives within the time limit. A lost one is named by all others within 3 more.
_NUM_SIGNS = 12
#: Subtracted from the count of a rank that ends in an orderly way, which makes it negative.
_DONE = 1 << 40
#: Limit for writing the last message, which a log handler that another thread has locked would
#: block forever.
_SECONDS_TO_SPEAK = 2.0


class LifeSigns:
    """Ends this process with a message once another rank shows no life any more, so that a launcher
    starts all anew.

    A rank shows life from a thread, also while its main thread computes, compiles, waits or is in
    Python's debugger. One that stands still as a whole for longer than the limit (SIGSTOP, gdb, one
    call that does not release Python's global lock) counts as lost. One that ended in an orderly
    way does not; of one that raised, the error is named.

    Args:
        everyone: all ranks of the job.
        timeout: seconds without a sign after which a rank counts as lost.
    """

    def __init__(self, everyone: Group, timeout: float) -> None:
        """Collective: ranks connect, and agree on a name for their counts that no earlier start of
        the job has used."""
        self._rank, self._size = everyone.rank, everyone.size
        self._timeout, self._interval = timeout, timeout / _NUM_SIGNS
        store = default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._serves = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = store  # torch's; held, because one that this process serves would end with it
        self._client: TCPStore | None = None
        told = all_gather_results(self._greeting, everyone, "set-up of protect_timeout")
        self._prefix = f"megatron_distopt/alive/{told[0][0]}"
        self._names = [
            f"rank {everyone.global_rank(rank)} on {node}" for rank, (_, node) in enumerate(told)
        ]
        self._watched, self._count, self._silence = (self._rank + 1) % self._size, 0, 0.0
        self.is_paused = False  # whether silence does not count for now
        self._num_done = 0  # ranks that ended in an orderly way
        self._num_unanswered = 0  # intervals since the store last answered
        # of a rank that ends by an exception
        self._ending, self._last_words = threading.Event(), ""
        self._talker: threading.Thread | None = None

    def _greeting(self) -> tuple[str, str]:
        """Connects before any rank counts: the store serves nobody while it looks up the host name
        of a new client."""
        if self._size > 1 and isinstance(self._store, TCPStore):
            self._client = self._connected(self._store)
        return uuid.uuid4().hex, socket.gethostname()

    def start(self) -> str | None:
        """Begins to show life and to watch; further calls do nothing.

        Returns:
            Why nothing is watched; None where it is.
        """
        if self._client is None:
            kind = type(self._store).__name__
            what = (
                f"torch's store is a {kind}, and only a TCPStore can be watched"
                if self._size > 1
                else "there is one rank"
            )
            return f"Lost ranks will not be noticed: {what}."
        if self._talker is None:
            self._talker = begin_thread(self._talk, "alive", self._store)
            begin_thread(self._watch_store, "alive, store")
            # after those that wait for files, and are alive meanwhile
            Finalize(None, self.stop, exitpriority=-1)
        return None

    def _connected(self, store: TCPStore) -> TCPStore:
        return TCPStore(
            store.host, store.port, is_master=False, timeout=timedelta(seconds=self._timeout)
        )

    def _talk(self, store: TCPStore) -> None:
        client, before = self._client, time.monotonic()
        while not self._ending.is_set():
            try:
                client = client or self._connected(store)
                now = time.monotonic()
                self._show_and_look(
                    PrefixStore(self._prefix, client), min(now - before, 2 * self._interval)
                )
                before, self._num_unanswered = now, 0
                if self._ending.wait(self._interval):
                    self._say_goodbye(PrefixStore(self._prefix, client))
            # the connection broke: `_watch_store` ends the process if that lasts
            except RuntimeError:
                client = None
                self._ending.wait(self._interval)

    def _show_and_look(self, store: Store, seconds: float) -> None:
        """Adds to the own count and reads that of the watched rank; none of these calls waits for
        another rank."""
        store.add(str(self._rank), 1)
        self._num_done = store.add("done", 0)
        if store.check(["lost"]):
            self._end(store.get("lost").decode())
        count = store.add(str(self._watched), 0)  # 0 of one that has not started yet
        is_silent = count and count == self._count and not self.is_paused
        self._silence = self._silence + seconds if is_silent else 0.0
        self._count = count
        if count < 0:
            self._watched = (self._watched + 1) % self._size
        elif self._silence >= self._timeout:
            what = f"{self._names[self._watched]} showed no life for {self._silence:.1f} s"
            store.set(
                "lost",
                f"{what}. If that rank is only slow, set protect_timeout to more than "
                f"{self._timeout:g} s",
            )

    def _watch_store(self) -> None:
        while not self._ending.wait(self._interval):
            self._num_unanswered += 1
            if self._num_unanswered > _NUM_SIGNS:
                if not self._num_done:
                    self._end(
                        f"torch's store did not answer for {self._timeout:g} s, so its node is "
                        "probably lost"
                    )
                _log.warning(
                    "Lost ranks are no longer noticed, because torch's store ended when the "
                    "first ranks did."
                )
                return

    def _end(self, reason: str) -> None:
        text = (
            f"{self._names[self._rank]} ends itself so that the launcher restarts all ranks: "
            f"{reason}."
        )
        begin_thread(_speak, "last words", text).join(_SECONDS_TO_SPEAK)
        # the others find it out before this end breaks their collectives, or their store
        time.sleep(self._interval)
        os._exit(1)

    def stop(self) -> None:
        """Says that this rank ends in an orderly way, or by which exception, and watches no
        longer."""
        if self._talker is None:
            return
        if (error := ended_by()) is not None:
            first_line = str(error).partition("\n")[0]
            self._last_words = (
                f"{self._names[self._rank]} ended by {type(error).__name__}: {first_line}"
            )
        self._ending.set()
        self._talker.join(2 * self._interval)

    def _say_goodbye(self, store: Store) -> None:
        if store.check(["lost"]):  # because of which, perhaps, this rank ends by an exception
            self._end(store.get("lost").decode())
        if self._last_words:
            store.set("lost", self._last_words)
        else:
            store.add(str(self._rank), -_DONE)
            store.add("done", 1)
        while self._serves and store.add("done", 0) < self._size:  # until `stop` waits no longer
            time.sleep(self._interval / 4)


def ended_by() -> BaseException | None:
    """The exception that ends this process, for what runs at its exit; None where it ends in an
    orderly way."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


def begin_thread(target: Callable[..., None], name: str, *args: object) -> threading.Thread:
    """Starts a thread that does not keep the process alive."""
    thread = threading.Thread(
        target=target, args=args, name=f"megatron_distopt {name}", daemon=True
    )
    thread.start()
    return thread


def _speak(text: str) -> None:
    _log.error("%s", text)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    logging.shutdown()
