"""Public calls that all ranks have to make: a rank that is alone in one is told so.

[Note: a call on one rank] After `if rank == 0: optimizer.save(...)` the rank would wait in a
collective until the time limit of the group, or meet there a collective of the user's with other
tensors, which aborts the process. So before the first collective of such a call all ranks meet in
torch's store, where a wait can be looked at and given up.

A rank that evaluates or writes comes a minute later, and nothing is wrong. So a wait is first a
line in the log, which names the call and who is missing. It is an error where it cannot end: a rank
that is missing waits in another one of these calls, its process has ended, or the time limit of the
group is over, within which a collective would have had to begin, too. A rank in `step()` or in a
collective of the user's leaves no word, because every step would pay for that: it may still come.
One that was killed leaves none either; a launcher ends the others then, as `LifeSigns` does.

A rank asks the store three times, and the one that comes last lets all others go on. While they
wait, only the one that came first asks for the words of all others. A meeting ends once, for all
ranks alike: all have come, or the text of the error.
"""

from __future__ import annotations

import functools
import logging
import os
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_distopt.comm.agree import (
    KEY,
    SECONDS_TO_LOOK,
    default_store,
    short_digest,
    value_in,
    wait_for,
)
from megatron_distopt.comm.groups import FAKE, Group, named_losses
from megatron_distopt.errors import AccessError, RanksDisagreeError

_log = logging.getLogger("megatron_distopt")
#: In front of a rank, the key under which it says in which call it is.
_WORD = f"{KEY}/word of "
#: The word of a rank whose process has ended, and how a meeting ends to which all have come.
_ENDED, _ALL_CAME = "ended", "all came"
#: Missing ranks that a message lists.
_MOST_NAMED = 8


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
    store = default_store()
    ranks = [group.global_rank(rank) for rank in range(group.size)]
    own = ranks[group.rank]
    if _process_of(store, own) != os.getpid():
        raise AccessError(
            f"{call}() was called in a process that was forked from rank {own}, where collectives "
            "do not work. Call it in the process of the rank."
        )
    calls = f"{KEY}/calls of {short_digest(ranks)}/"
    said = set[str]()

    def look(seconds: float) -> None:
        is_over = seconds >= group.time_limit
        if place and not is_over:
            return
        words = {rank: value_in(store, f"{_WORD}{rank}") for rank in ranks}
        reasons = {rank: _reason(word, calls, store) for rank, word in words.items() if word != end}
        if not reasons:
            return
        late = f"not within {seconds:.0f} s" if is_over else "not yet"
        named = [f"rank {rank} ({reason or late})" for rank, reason in reasons.items()]
        if len(named) > _MOST_NAMED:
            named[_MOST_NAMED:] = ["..."]
        text = (
            f"{call}() was called on rank {own}, and not on {', '.join(named)}. Call it on all "
            f"{len(ranks)} ranks, outside of any 'if rank == 0'."
        )
        if is_over or any(reasons.values()):
            store.compare_set(end, "", text)
            store.add(calls + call, len(reasons))  # the next call is another meeting
        elif seconds > 2 * SECONDS_TO_LOOK and text not in said:
            said.add(text)
            _log.warning("%s", text)

    with named_losses():
        number, place = divmod(store.add(calls + call, 1) - 1, len(ranks))
        end = f"{calls}{call} {number}"
        store.set(f"{_WORD}{own}", end)
        if place == len(ranks) - 1:
            store.compare_set(end, "", _ALL_CAME)
            store.delete_key(f"{calls}{call} {number - 1}")
        wait_for(store, [end], look)
        how = store.get(end).decode()
        if how != _ALL_CAME:
            raise RanksDisagreeError(how)


def _reason(word: str, calls: str, store: Store) -> str:
    """Why a rank with that word will not come; empty where it may come."""
    # A word outlives its meeting, whose end stays in the store.
    if word == _ENDED:
        return _ENDED
    if word.startswith(calls) and value_in(store, word) != _ALL_CAME:
        call, _, _ = word.removeprefix(calls).partition(" ")
        return f"in {call}()"
    return ""


@functools.cache
def _process_of(store: Store, own: int) -> int:
    """The process that is this rank; its end is told to those who may wait for it."""
    Finalize(None, _tell_end, (store, own), exitpriority=0)
    return os.getpid()


def _tell_end(store: Store, own: int) -> None:
    with suppress(RuntimeError):  # the store may be gone
        store.set_timeout(timedelta(seconds=SECONDS_TO_LOOK))
        store.set(f"{_WORD}{own}", _ENDED)
