"""Ranks meet in torch's store, where a rank that does not come can be named; in a collective they
would wait for it until torch's time limit, and then not say why.

[Note: who is missing] Before an optimizer is built, every rank writes two things into the store:
that the package is loaded (`show_presence`, as soon as there is a store), and whether it builds our
optimizer (`meet`). A rank that has the package and is slow is waited for; one that has shown
nothing, although the waiting rank did so when the store was made, runs without the package and is
named much sooner.

[Note: a call on one rank] After `if rank == 0: optimizer.save(...)` the rank would wait in a
collective until the time limit of the group, or meet there a collective of the user's with other
tensors, which aborts the process. So before the first collective of such a call all ranks meet
(`meet_in_call`). A rank that evaluates or writes comes a minute later, and nothing is wrong. So a
wait is first a line in the log, which names the call and who is missing. It is an error where it
cannot end: a rank that is missing waits in another one of these calls, its process has ended, or
the time limit of the group is over, within which a collective would have had to begin, too. A rank
in `step()` or in a collective of the user's writes nothing, because every step would pay for that;
it may still come. A rank that was killed writes nothing either; then the launcher or `LifeSigns`
ends the others.

[Note: a meeting] A rank asks the store four times, and the one that comes last lets all others go
on. While they wait, only the one that came first asks for the words of all others. A meeting ends
once, for all ranks alike: all have come, or the text of the error.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_distopt.comm.groups import FAKE, Group, default_store, is_initialized, named_losses
from megatron_distopt.errors import AccessError, RanksDisagreeError

_log = logging.getLogger("megatron_distopt")
#: How long a rank that has loaded the package is waited for: as long as a collective over NCCL
#: waits by default.
SECONDS_TO_MEET = 600.0
#: How long a rank is waited for that has shown nothing of the package.
SECONDS_TO_SHOW = 40.0
#: Between two looks at who is missing; doubled after each, up to the second number, because every
#: look asks the one process that has the store.
SECONDS_TO_LOOK, _MOST_SECONDS_TO_LOOK = 2.5, 10.0
#: Missing ranks that a message lists.
_MOST_NAMED = 8
#: Followed by a rank, the keys under which it says which meeting it is in, and that it has the
#: package.
_WORD, _PRESENCE = "megatron_distopt/word of ", "megatron_distopt/presence of "
#: Values in the store: the word of a rank whose process has ended, the end of a meeting to which
#: all have come, and the presence of a rank that uses the package.
_ENDED, _ALL_CAME, _LOADED = "ended", "all came", "loaded"


def show_presence(why_not: str = "") -> Callable[[], None]:
    """Tells the other ranks that the package is loaded, now or when
    `torch.distributed.init_process_group` returns.

    Returns:
        A function that puts `init_process_group` back.
    """
    if not dist.is_available():
        return lambda: None

    def write() -> None:
        default_store().set(f"{_PRESENCE}{dist.get_rank()}", why_not or _LOADED)

    if is_initialized():
        write()
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        write()

    dist.init_process_group = init_process_group

    def undo() -> None:
        if dist.init_process_group is init_process_group:
            dist.init_process_group = original

    return undo


def meet(group: Group, why_not: str = "") -> None:
    """Waits until every rank of the group has said that it builds our optimizer.

    Args:
        group: the ranks that have to come.
        why_not: why this rank does not build it; the others raise, and this one goes on at once.

    Raises:
        RanksDisagreeError: a rank does not build it, or did not come.
    """
    if group.size == 1:
        return
    meeting = Meeting("start", group)

    def refuse(reasons: dict[int, str]) -> None:
        meeting.end(
            f"megatron_distopt is not used on {_named(reasons)}. Either all {group.size} ranks "
            "must use it or none. Start every rank with the package installed and with the same "
            "flags and variables."
        )

    def judge(missing: dict[int, str], seconds: float, is_over: bool) -> None:
        late = absent = f"not here after {seconds:.0f} seconds" if is_over else ""
        if seconds >= SECONDS_TO_SHOW and meeting.value(f"{_PRESENCE}{meeting.own}"):
            absent = "not loaded"
        reasons: dict[int, str] = {}
        for rank in missing:
            presence = meeting.value(f"{_PRESENCE}{rank}")
            reason = {_LOADED: late, "": absent}.get(presence, presence)
            if reason:
                reasons[rank] = reason
        if reasons:
            refuse(reasons)

    if why_not:
        refuse({meeting.own: why_not})
    meeting.come()
    if not why_not:
        meeting.wait(judge, SECONDS_TO_MEET)


def meet_in_call(call: str, group: Group) -> None:
    """Collective: waits until every rank of the group has made a public call; not for calls of
    every step. See [Note: a call on one rank].

    Args:
        call: its name.
        group: the ranks that have to make it.

    Raises:
        RanksDisagreeError: not all ranks made it, and the wait for the others cannot end.
        AccessError: this process was forked from a rank.
    """
    if group.size == 1 or group.backend == FAKE:
        return
    meeting = Meeting(f"{call}()", group)
    meeting.come()
    said = set[str]()

    def judge(missing: dict[int, str], seconds: float, is_over: bool) -> None:
        late = f"not within {seconds:.0f} s" if is_over else "not yet"
        named = _named({rank: word or late for rank, word in missing.items()})
        text = (
            f"{call}() was called on rank {meeting.own}, but not on {named}. Call it on all "
            f"{group.size} ranks, outside of any 'if rank == 0'."
        )
        if is_over or any(missing.values()):
            meeting.end(text)
            meeting.skip(len(missing))
        elif seconds > 2 * SECONDS_TO_LOOK and text not in said:
            said.add(text)
            _log.warning("%s", text)

    meeting.wait(judge, group.time_limit)


def _named(reasons: dict[int, str]) -> str:
    named = [f"rank {rank} ({reason})" for rank, reason in reasons.items()]
    if len(named) > _MOST_NAMED:
        named[_MOST_NAMED:] = ["..."]
    return ", ".join(named)


class Meeting:
    """A place of the program to which the ranks of a group come, see [Note: a meeting].

    Args:
        name: of the place.
        group: of the ranks.

    Attributes:
        own: this rank, of all ranks.
    """

    def __init__(self, name: str, group: Group) -> None:
        self._store = default_store()
        self._ranks = [group.global_rank(rank) for rank in range(group.size)]
        self.own = self._ranks[group.rank]
        if _process_of(self._store, self.own) != os.getpid():
            raise AccessError(
                f"{name} was called in a process that was forked from rank {self.own}, and "
                "collectives do not work there. Call it in the process of the rank itself."
            )
        # A process may join process groups one after the other, with other ranks.
        digest = sha256(str(self._ranks).encode()).hexdigest()[:16]
        self._meetings = f"megatron_distopt/meetings of {digest}/"
        self._counter = self._meetings + name
        self._end = self._key_of_end(self._store.add(self._counter, 0))

    def come(self) -> None:
        """Says that this rank is there."""
        with named_losses():
            num_before = self._store.add(self._counter, 1) - 1
            self._is_first = num_before % len(self._ranks) == 0
            self._end = self._key_of_end(num_before)
            self._store.set(f"{_WORD}{self.own}", self._end)
            if (num_before + 1) % len(self._ranks) == 0:
                self.end(_ALL_CAME)
                self._store.delete_key(self._key_of_end(num_before - len(self._ranks)))

    def _key_of_end(self, num_before: int) -> str:
        return f"{self._counter} {num_before // len(self._ranks)}"

    def end(self, how: str) -> None:
        """Ends the meeting for all ranks, if it has not ended."""
        self._store.compare_set(self._end, "", how)

    def skip(self, num_missing: int) -> None:
        """Makes the next call another meeting, after one that did not come about."""
        self._store.add(self._counter, num_missing)

    def wait(self, judge: Callable[[dict[int, str], float, bool], None], limit: float) -> None:
        """Waits until the meeting has ended.

        Args:
            judge: called meanwhile with the ranks that have not come, with why they will not (empty
                where they may), with the seconds so far, and whether these are over the limit.
            limit: seconds after which every rank looks, not only the first.

        Raises:
            RanksDisagreeError: not all ranks have come.
        """
        began, pause = time.monotonic(), SECONDS_TO_LOOK
        with named_losses():
            while not self._has_ended(pause):
                seconds = time.monotonic() - began
                if self._is_first or seconds >= limit:
                    words = {rank: self.value(f"{_WORD}{rank}") for rank in self._ranks}
                    late = {rank: word for rank, word in words.items() if word != self._end}
                    missing = {rank: self._reason(word) for rank, word in late.items()}
                    if missing:
                        judge(missing, seconds, seconds >= limit)
                pause = min(2 * pause, _MOST_SECONDS_TO_LOOK)
            how = self._store.get(self._end).decode()
        if how != _ALL_CAME:
            raise RanksDisagreeError(how)

    def _has_ended(self, seconds: float) -> bool:
        try:
            self._store.wait([self._end], timedelta(seconds=seconds))
        except RuntimeError:  # the time is up
            return False
        return True

    def _reason(self, word: str) -> str:
        # A word outlives its meeting, whose end stays in the store.
        if word == _ENDED:
            return _ENDED
        if word.startswith(self._meetings) and self.value(word) != _ALL_CAME:
            name, _, _ = word.removeprefix(self._meetings).partition(" ")
            return f"in {name}"
        return ""

    def value(self, key: str) -> str:
        """What the store has under a key; empty where it has none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""


@functools.cache
def _process_of(store: Store, own: int) -> int:
    """The id of this rank's process, whose end is announced to the ranks that may wait for it."""
    Finalize(None, _tell_end, (store, own), exitpriority=0)
    return os.getpid()


def _tell_end(store: Store, own: int) -> None:
    with suppress(RuntimeError):  # the store may be gone
        store.set_timeout(timedelta(seconds=SECONDS_TO_LOOK))
        store.set(f"{_WORD}{own}", _ENDED)
