"""Checks over ranks: a difference between them is named instead of hanging in a collective.

Each check exchanges a few small objects between the ranks of the job. None is read from a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_distopt.comm.groups import Group, named_losses
from megatron_distopt.errors import RanksDisagreeError

T = TypeVar("T")

#: Sent with every value, so that a rank that takes part in some other exchange is recognised.
_TAG = "megatron_distopt"


@dataclass(frozen=True)
class Field:
    """One thing that must be equal on all ranks."""

    what: str  # its name in the error, e.g. "param names".
    items: tuple[str, ...]  # in an order that matters
    remedy: str = ""  # what to do in addition to starting all ranks alike


def two_that_differ(said: Sequence[Any]) -> tuple[int, int] | None:
    """The first rank with an unusual value and the first with the most common one; None where all
    values are equal.

    >>> two_that_differ(["a", "a", "b"]), two_that_differ(["a", "a"])
    ((2, 0), None)
    """
    usual, _ = Counter(said).most_common(1)[0]
    for rank, each in enumerate(said):
        if each != usual:
            return rank, said.index(usual)
    return None


def all_gather_objects(value: T, group: Group) -> list[T]:
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
            raise RanksDisagreeError(
                f"Rank {group.global_rank(rank)} does not run megatron_distopt here, and it must "
                f"run on all {group.size} ranks. Start every rank with the same flags and "
                "variables."
            )
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
    all_gather_results(lambda: values.append(check()), group, what)
    return values[0]


def all_gather_results(check: Callable[[], T], group: Group, what: str = "start-up") -> list[T]:
    """Collective: returns what `check` returned on every rank, by rank of the group, if it passed
    on all of them.

    Raises: like `raise_together`.
    """
    own: Exception | None = None
    record: tuple[str, Any] = "", None
    try:
        record = "", check()
    except Exception as error:  # noqa: BLE001 - raised once the others know
        own, record = error, (str(error) or type(error).__name__, None)
    records = all_gather_objects(record, group)
    if own is not None:
        raise own
    for rank, (text, _) in enumerate(records):
        if text:
            raise RanksDisagreeError(
                f"During {what}, rank {group.global_rank(rank)} raised «{text}». This must pass "
                f"on all {group.size} ranks. Fix what that rank reports."
            )
    # there are values where nothing was raised
    return [value for _, value in records]  # type: ignore[misc]


def compare(fields: Sequence[Field], group: Group) -> None:
    """Collective: stops on the first field that is not equal on all ranks.

    Raises:
        RanksDisagreeError: on every rank, with the field, the first item that differs and the ranks
            in the minority.
    """
    digests = all_gather_objects(
        [sha256("\x1f".join(field.items).encode()).hexdigest() for field in fields], group
    )
    for index, field in enumerate(fields):
        column = [digest[index] for digest in digests]
        two = two_that_differ(column)
        if two is None:
            continue
        odd, usual = two
        items = all_gather_objects(field.items, group)
        pairs = enumerate(zip_longest(items[odd], items[usual], fillvalue="nothing"))
        number, (theirs, ours) = next(each for each in pairs if each[1][0] != each[1][1])
        odd_ranks = [rank for rank, digest in enumerate(column) if digest != column[usual]]
        numbers = ", ".join(str(group.global_rank(rank)) for rank in odd_ranks)
        raise RanksDisagreeError(
            f"Ranks differ in {field.what}: rank {group.global_rank(odd)} has {theirs} as item "
            f"{number} where rank {group.global_rank(usual)} has {ours}. They must be equal on "
            f"all {group.size} ranks. Start rank(s) {numbers} with the code and options of the "
            f"others{field.remedy}."
        )
