"""Checks over ranks: a difference between them is named instead of hanging in a collective.

Each costs a few small exchanges of objects, which ranks of one job send each other; none is read from a file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_distopt.comm.groups import Group, named_losses
from megatron_distopt.errors import RanksDisagreeError, refusal

T = TypeVar("T")

#: Sent with every value, so that a rank which is in some other exchange is recognised.
_TAG = "megatron_distopt"


@dataclass(frozen=True)
class Field:
    """One thing that must be equal on all ranks.

    Args:
        what: its name in the error, e.g. "param names".
        items: in an order that matters.
    """

    what: str
    items: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A short text that differs where the items do."""
        return hashlib.sha256("\x1f".join(self.items).encode()).hexdigest()


def exchange(value: T, group: Group) -> list[T]:
    """Collective: returns every rank's value, by rank of the group.

    Raises:
        RanksDisagreeError: another rank is in an exchange that is not ours: the package is off or missing there.
    """
    if group.size == 1:
        return [value]
    received: list[Any] = [None] * group.size
    with named_losses():
        dist.all_gather_object(received, (_TAG, value), group=group.handle)
    for rank, record in enumerate(received):
        if not (isinstance(record, tuple) and len(record) == 2 and record[0] == _TAG):
            rule, remedy = f"run it on all {group.size} ranks", "Start every rank with the same flags and variables"
            got = f"rank {group.global_rank(rank)} does not run megatron_distopt here"
            raise RanksDisagreeError(refusal("start-up", got, rule, remedy))
    return [record[1] for record in received]


def raise_together(check: Callable[[], T], group: Group, what: str = "start-up") -> T:
    """Collective: runs `check` on every rank and goes on only if it passed on all of them.

    One rank that raised while the others went into a collective would leave them hanging in it. That holds for every
    exception, not only for those of the package.

    Args:
        check: what may raise.
        group: all ranks that run it.
        what: its name in the error.

    Raises:
        Exception: this rank's own, as it was, or
        RanksDisagreeError: another rank's, with its number and text.
    """
    value, error = _tried(check)
    _raise_first(exchange(_text_of(error), group), error, group, what)
    return value  # type: ignore[return-value]  # there is one where nothing was raised


def exchange_together(check: Callable[[], T], group: Group, what: str = "start-up") -> list[T]:
    """Collective: returns what `check` returned on every rank, by rank of the group, if it passed on all of them.

    Args: as of `raise_together`; what `check` returns is sent to all ranks.

    Raises: as of `raise_together`.
    """
    value, error = _tried(check)
    records = exchange((_text_of(error), value), group)
    _raise_first([text for text, _ in records], error, group, what)
    return [each for _, each in records]  # type: ignore[misc]  # as above


def _tried(check: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return check(), None
    except Exception as error:  # noqa: BLE001 - raised once the others know
        return None, error


def _text_of(error: Exception | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _raise_first(texts: Sequence[str], own: Exception | None, group: Group, what: str) -> None:
    """Raises this rank's own error, or that of another rank."""
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text:
            rule, remedy = f"pass on all {group.size} ranks", "Mend what that rank reports"
            raise RanksDisagreeError(
                refusal(what, f"rank {group.global_rank(rank)} refused with «{text}»", rule, remedy)
            )


def compare(fields: Sequence[Field], group: Group) -> None:
    """Collective: stops on the first field that is not equal on all ranks.

    Raises:
        RanksDisagreeError: on every rank, with the field, the first item that differs and the ranks in the minority.
    """
    digests = exchange([field.digest for field in fields], group)
    for index, field in enumerate(fields):
        column = [digest[index] for digest in digests]
        if len(set(column)) > 1:
            raise RanksDisagreeError(_difference(field, group, column))


def _difference(field: Field, group: Group, digests: list[str]) -> str:
    """Collective: writes the text of the error."""
    items_by_rank = exchange(field.items, group)
    usual = Counter(digests).most_common(1)[0][0]
    odd_ranks = [rank for rank, digest in enumerate(digests) if digest != usual]
    theirs, ours = items_by_rank[odd_ranks[0]], items_by_rank[digests.index(usual)]
    number, left, right = next(
        (number, left, right)
        for number, (left, right) in enumerate(zip_longest(theirs, ours, fillvalue="nothing"))
        if left != right
    )
    odd, even = group.global_rank(odd_ranks[0]), group.global_rank(digests.index(usual))
    got = f"rank {odd} has {left} as number {number} where rank {even} has {right}"
    rule = f"be the same on all {len(digests)} ranks"
    numbers = ", ".join(str(group.global_rank(rank)) for rank in odd_ranks)
    remedy = f"Start rank(s) {numbers} with the code and options of the others"
    return refusal(field.what, got, rule, remedy)
