"""All checks, and with how many ranks each of them runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_check import correctness, hosts, interruptions, memory, speed
from gpu_check.checks import SUBJECTS, Check, Outcome, Status, Where
from gpu_check.machine import rank_counts

__all__ = ["CHECKS", "Batch", "batches_of", "impossible"]

CHECKS: tuple[Check, ...] = (
    *correctness.CHECKS,
    *interruptions.CHECKS,
    *hosts.CHECKS,
    *memory.CHECKS,
    *speed.CHECKS,
)


@dataclass(frozen=True)
class Batch:
    """Checks that the same processes carry out.

    Args:
        subject: of all of them.
        ranks: how many processes.
        checks: in this order.
        is_mute: see `Check`.
    """

    subject: str
    ranks: int
    checks: tuple[Check, ...]
    is_mute: bool = False


def batches_of(count: int, subjects: Sequence[str] = SUBJECTS, checks: Sequence[Check] = CHECKS) -> Iterator[Batch]:
    """What is to be run with that many devices: subject by subject, few ranks first."""
    for subject in SUBJECTS:
        for ranks in rank_counts(count):
            here = [check for check in checks if subject in subjects and _runs(check, subject, ranks, count)]
            for is_mute in (False, True):
                part = [check for check in here if check.is_mute is is_mute]
                together = [check for check in part if not check.is_separate]
                apart = [[check] for check in part if check.is_separate]
                yield from (Batch(subject, ranks, tuple(found), is_mute) for found in (together, *apart) if found)


def _runs(check: Check, subject: str, ranks: int, count: int) -> bool:
    if check.subject != subject or ranks < check.least_ranks:
        return False
    is_one, is_all = ranks == 1, ranks == count
    runs = {Where.ONE: is_one, Where.ALL: is_all, Where.ENDS: is_one or is_all, Where.EVERY: True}
    return runs[check.where]


def impossible(count: int, subjects: Sequence[str] = SUBJECTS, checks: Sequence[Check] = CHECKS) -> list[Outcome]:
    """Checks that need more devices than there are, as skipped."""
    return [
        Outcome(
            check.subject,
            check.name,
            check.title,
            count,
            Status.SKIPPED,
            detail=f"needs {check.least_ranks} devices, and this machine has {count}",
        )
        for check in checks
        if check.subject in subjects and check.least_ranks > count
    ]
