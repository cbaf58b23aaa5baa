"""Before their first collective, ranks meet in torch's store, where a rank that does not come can be named.

[Note: who is missing] A collective would wait for such a rank until torch's time limit, and then not say why. So every
rank writes two things into the store: that the package is loaded (`show_presence`, as soon as there is a store), and
whether it builds our optimizer (`meet`). A rank that has the package and is slow is waited for; one that has shown
nothing, although the waiting rank did so when the store was made, runs without the package and is named much sooner.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_distopt.comm.groups import Group, is_initialized
from megatron_distopt.errors import RanksDisagreeError, refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: How long a rank that has loaded the package is waited for: as long as a collective over NCCL waits by default.
SECONDS_TO_MEET = 600.0
#: How long a rank is waited for that has shown nothing of the package.
SECONDS_TO_SHOW = 40.0
#: Between two looks at who is missing; doubled after each, because every look asks the one process that has the store.
SECONDS_TO_LOOK = 2.5

_KEY, _HERE, _LOADED = "megatron_distopt", "here", "loaded"


def show_presence(why_not: str = "") -> Callable[[], None]:
    """Tells the other ranks that the package is loaded, now or when `torch.distributed.init_process_group` returns.

    Args:
        why_not: why it will not be used on this rank, where that is known.

    Returns:
        A function that puts `init_process_group` back.
    """
    if not dist.is_available():
        return lambda: None
    if is_initialized():
        _write_presence(why_not)
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _write_presence(why_not)

    dist.init_process_group = init_process_group

    def undo() -> None:
        if dist.init_process_group is init_process_group:
            dist.init_process_group = original

    return undo


def _write_presence(why_not: str) -> None:
    _store().set(_presence_of(dist.get_rank()), why_not or _LOADED)


def _presence_of(global_rank: int) -> str:
    return f"{_KEY}/presence of {global_rank}"


def meet(group: Group, why_not: str = "") -> None:
    """Waits until every rank of the group has said that it builds our optimizer.

    Args:
        group: the ranks that have to come.
        why_not: why this rank does not build it; the others raise, and this one goes on at once.

    Raises:
        RanksDisagreeError: a rank does not build it, or did not come.
    """
    store, keys = _store(), _keys_of(group)
    store.set(keys[group.rank], why_not or _HERE)
    if why_not or group.size == 1:
        return
    _wait(store, keys, group)
    answers = [answer.decode() for answer in store.multi_get(keys)]
    _refuse({rank: answer for rank, answer in enumerate(answers) if answer != _HERE}, group)


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _keys_of(group: Group) -> list[str]:
    """One for each rank, and others at each meeting of the same ranks.

    Meetings are counted in the store: a process may join process groups one after the other, with other ranks.
    """
    ranks = [group.global_rank(rank) for rank in range(group.size)]
    name = f"{_KEY}/meeting of {sha256(str(ranks).encode()).hexdigest()[:16]}"
    number = _store().add(f"{name}/{ranks[group.rank]}", 1)
    return [f"{name}/{number}/{rank}" for rank in ranks]


def _wait(store: Store, keys: Sequence[str], group: Group) -> None:
    began, pause = time.monotonic(), SECONDS_TO_LOOK
    while True:
        try:
            store.wait(list(keys), timedelta(seconds=pause))
            return
        except RuntimeError:  # the time is up
            missing = _missing(store, keys, range(group.size))
            _refuse(_reasons(store, missing, group, time.monotonic() - began), group)
            pause = min(2 * pause, SECONDS_TO_SHOW / 4)


def _missing(store: Store, keys: Sequence[str], ranks: Sequence[int]) -> list[int]:
    """The ranks whose keys are not there, by halves: few are missing, and every question costs a message."""
    if store.check([keys[rank] for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _missing(store, keys, ranks[:half]) + _missing(store, keys, ranks[half:])


def _reasons(store: Store, missing: Sequence[int], group: Group, seconds: float) -> dict[int, str]:
    """Why ranks are waited for no longer, by rank; the others may still come. See [Note: who is missing]."""
    late = f"not here after {seconds:.0f} seconds" if seconds >= SECONDS_TO_MEET else ""
    has_shown = bool(_presence_in(store, group.global_rank(group.rank)))
    absent = "not loaded" if has_shown and seconds >= SECONDS_TO_SHOW else late
    reason_of = {_LOADED: late, "": absent}
    presences = {rank: _presence_in(store, group.global_rank(rank)) for rank in missing}
    reasons = {rank: reason_of.get(presence, presence) for rank, presence in presences.items()}
    return {rank: reason for rank, reason in reasons.items() if reason}


def _presence_in(store: Store, global_rank: int) -> str:
    key = _presence_of(global_rank)
    return store.get(key).decode() if store.check([key]) else ""


def _refuse(reasons: dict[int, str], group: Group) -> None:
    if reasons:
        named = ", ".join(f"rank {group.global_rank(rank)} ({reason})" for rank, reason in reasons.items())
        rule = f"be used on all {group.size} ranks or on none"
        remedy = "Start every rank with the package installed and with the same flags and variables"
        raise RanksDisagreeError(refusal("start-up", f"megatron_distopt is not used on {named}", rule, remedy))
