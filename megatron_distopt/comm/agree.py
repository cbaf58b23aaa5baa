"""Checks over ranks: a difference between them is named instead of hanging in a collective.

Each costs a few small exchanges of objects, which ranks of one job send each other; none is read
from a file.

[Note: who is missing] A collective would wait for such a rank until torch's time limit, and then
not say why. So every rank writes two things into the store: that the package is loaded
(`show_presence`, as soon as there is a store), and whether it builds our optimizer (`meet`). A rank
that has the package and is slow is waited for; one that has shown nothing, although the waiting
rank did so when the store was made, runs without the package and is named much sooner."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megatron_distopt.comm.groups import Group, is_initialized, named_losses
from megatron_distopt.errors import RanksDisagreeError, refusal

T = TypeVar("T")

#: Sent with every value, so that a rank which is in some other exchange is recognised.
_TAG = "megatron_distopt"


@dataclass(frozen=True)
class Field:
    """One thing that must be equal on all ranks."""

    what: str  # its name in the error, e.g. "param names".
    items: tuple[str, ...]  # in an order that matters
    remedy: str = ""  # what to do in addition to starting all ranks alike


def two_that_differ(said: Sequence[Any]) -> tuple[int, int] | None:
    """Of what ranks said, one that said something unusual and one that said the usual; None where
    all said the same.

    >>> two_that_differ(["a", "a", "b"]), two_that_differ(["a", "a"])
    ((2, 0), None)
    """
    usual = max(dict.fromkeys(said), key=said.count)
    odd = next((rank for rank, each in enumerate(said) if each != usual), None)
    return None if odd is None else (odd, said.index(usual))


def exchange(value: T, group: Group) -> list[T]:
    """Collective: returns every rank's value, by rank of the group.

    Raises:
        RanksDisagreeError: another rank is in an exchange that is not ours: the package is off or
            missing there.
    """
    if group.size == 1:
        return [value]
    received: list[Any] = [None] * group.size
    with named_losses():
        dist.all_gather_object(received, (_TAG, value), group=group.handle)
    for rank, record in enumerate(received):
        if not (isinstance(record, tuple) and len(record) == 2 and record[0] == _TAG):
            rule, remedy = (
                f"run it on all {group.size} ranks",
                "Start every rank with the same flags and variables",
            )
            got = f"rank {group.global_rank(rank)} does not run megatron_distopt here"
            raise RanksDisagreeError(refusal("start-up", got, rule, remedy))
    return [record[1] for record in received]


def raise_together(check: Callable[[], T], group: Group, what: str = "start-up") -> T:
    """Collective: runs `check` on every rank and goes on only if it passed on all of them.

    One rank that raised while the others went into a collective would leave them hanging in it.
    That holds for every exception, not only for those of the package.

    Raises:
        Exception: this rank's own, as it was, or
        RanksDisagreeError: another rank's, with its number and text.
    """
    values: list[T] = []  # of this rank: it may be anything, and the others do not need it
    exchange_together(lambda: values.append(check()), group, what)
    return values[0]


def exchange_together(check: Callable[[], T], group: Group, what: str = "start-up") -> list[T]:
    """Collective: returns what `check` returned on every rank, by rank of the group, if it passed
    on all of them.

    Raises: as of `raise_together`.
    """
    own: Exception | None = None
    record: tuple[str, Any] = "", None
    try:
        record = "", check()
    except Exception as error:  # noqa: BLE001 - raised once the others know
        own, record = error, (str(error) or type(error).__name__, None)
    records = exchange(record, group)
    if own is not None:
        raise own
    for rank, (text, _) in enumerate(records):
        if text:
            rule, remedy = f"pass on all {group.size} ranks", "Mend what that rank reports"
            got = f"rank {group.global_rank(rank)} refused with «{text}»"
            raise RanksDisagreeError(refusal(what, got, rule, remedy))
    # there are values where nothing was raised
    return [value for _, value in records]  # type: ignore[misc]


def compare(fields: Sequence[Field], group: Group) -> None:
    """Collective: stops on the first field that is not equal on all ranks.

    Raises:
        RanksDisagreeError: on every rank, with the field, the first item that differs and the ranks
            in the minority.
    """
    digests = exchange(
        [sha256("\x1f".join(field.items).encode()).hexdigest() for field in fields], group
    )
    for index, field in enumerate(fields):
        column = [digest[index] for digest in digests]
        two = two_that_differ(column)
        if two is None:
            continue
        odd, usual = two
        items = exchange(field.items, group)
        pairs = enumerate(zip_longest(items[odd], items[usual], fillvalue="nothing"))
        number, (theirs, ours) = next(each for each in pairs if each[1][0] != each[1][1])
        odd_ranks = [rank for rank, digest in enumerate(column) if digest != column[usual]]
        numbers = ", ".join(str(group.global_rank(rank)) for rank in odd_ranks)
        raise RanksDisagreeError(
            f"Invalid {field.what}: rank {group.global_rank(odd)} has {theirs} as number {number} "
            f"where rank {group.global_rank(usual)} has {ours}. Must be the same on all "
            f"{group.size} ranks. Start rank(s) {numbers} with the code and options of the "
            f"others{field.remedy}."
        )


# --- before the first collective, ranks meet in torch's store, where a rank that does not come can
# be named

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: How long a rank that has loaded the package is waited for: as long as a collective over NCCL
#: waits by default.
SECONDS_TO_MEET = 600.0
#: How long a rank is waited for that has shown nothing of the package.
SECONDS_TO_SHOW = 40.0
#: Between two looks at who is missing; doubled after each, because every look asks the one process
#: that has the store.
SECONDS_TO_LOOK = 2.5

KEY, _HERE, _LOADED = "megatron_distopt", "here", "loaded"


def show_presence(why_not: str = "") -> Callable[[], None]:
    """Tells the other ranks that the package is loaded, now or when
    `torch.distributed.init_process_group` returns.

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
    default_store().set(_presence_of(dist.get_rank()), why_not or _LOADED)


def _presence_of(global_rank: int) -> str:
    return f"{KEY}/presence of {global_rank}"


def meet(group: Group, why_not: str = "") -> None:
    """Waits until every rank of the group has said that it builds our optimizer.

    Args:
        group: the ranks that have to come.
        why_not: why this rank does not build it; the others raise, and this one goes on at once.

    Raises:
        RanksDisagreeError: a rank does not build it, or did not come.
    """
    store, keys = default_store(), _keys_of(group)
    store.set(keys[group.rank], why_not or _HERE)
    if why_not or group.size == 1:
        return

    def look(seconds: float) -> None:
        _refuse(_reasons(store, keys, group, seconds), group)

    wait_for(store, keys, look)
    answers = {rank: answer.decode() for rank, answer in enumerate(store.multi_get(keys))}
    _refuse({rank: answer for rank, answer in answers.items() if answer != _HERE}, group)


def default_store() -> Store:
    """Through which all ranks of the job can leave words for each other."""
    return dist.distributed_c10d._get_default_store()


def _keys_of(group: Group) -> list[str]:
    """One for each rank, and others at each meeting of the same ranks.

    Meetings are counted in the store: a process may join process groups one after the other, with
    other ranks.
    """
    ranks = [group.global_rank(rank) for rank in range(group.size)]
    name = f"{KEY}/meeting of {short_digest(ranks)}"
    counter = f"{name}/{ranks[group.rank]}"
    number = default_store().add(counter, 1)
    return [f"{name}/{number}/{rank}" for rank in ranks]


def short_digest(ranks: Sequence[int]) -> str:
    """A name for these ranks that is short, however many they are."""
    return sha256(str(ranks).encode()).hexdigest()[:16]


def wait_for(store: Store, keys: Sequence[str], look: Callable[[float], None]) -> None:
    """Waits until all keys are in the store; meanwhile `look` is called with the seconds so far,
    and may raise."""
    began, pause = time.monotonic(), SECONDS_TO_LOOK
    while True:
        try:
            store.wait(list(keys), timedelta(seconds=pause))
            return
        except RuntimeError:  # the time is up
            look(time.monotonic() - began)
            pause = min(2 * pause, SECONDS_TO_SHOW / 4)


def _missing(store: Store, keys: Sequence[str], ranks: Sequence[int]) -> list[int]:
    """The ranks whose keys are not there, by halves: few are missing, and every question costs a
    message."""
    if store.check([keys[rank] for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _missing(store, keys, ranks[:half]) + _missing(store, keys, ranks[half:])


def _reasons(store: Store, keys: Sequence[str], group: Group, seconds: float) -> dict[int, str]:
    """Why ranks are waited for no longer, by rank; the others may still come. See [Note: who is
    missing]."""

    def presence_of(rank: int) -> str:
        return value_in(store, _presence_of(group.global_rank(rank)))

    late = absent = ""
    if seconds >= SECONDS_TO_MEET:
        late = absent = f"not here after {seconds:.0f} seconds"
    if seconds >= SECONDS_TO_SHOW and presence_of(group.rank):
        absent = "not loaded"
    reason_of = {_LOADED: late, "": absent}
    reasons: dict[int, str] = {}
    for rank in _missing(store, keys, range(group.size)):
        presence = presence_of(rank)
        if reason := reason_of.get(presence, presence):
            reasons[rank] = reason
    return reasons


def value_in(store: Store, key: str) -> str:
    """What the store has under a key; empty where it has none."""
    return store.get(key).decode() if store.check([key]) else ""


def _refuse(reasons: dict[int, str], group: Group) -> None:
    if reasons:
        named = ", ".join(
            f"rank {group.global_rank(rank)} ({reason})" for rank, reason in reasons.items()
        )
        rule = f"be used on all {group.size} ranks or on none"
        remedy = "Start every rank with the package installed and with the same flags and variables"
        raise RanksDisagreeError(
            refusal("start-up", f"megatron_distopt is not used on {named}", rule, remedy)
        )
