"""The words of the kit: what a check is, where it runs, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

#: What `--only` takes, in the order of the report.
SUBJECTS = ("correctness", "memory", "speed")


class Status(Enum):
    """How a check ended."""

    PASSES = "passes"
    FAILS = "fails"
    #: It could not run here, or there was no time left; the outcome's detail says why.
    SKIPPED = "skipped"


class Where(Enum):
    """With how many ranks a check runs; each has a device of its own."""

    ONE = "one rank"
    EVERY = "1, 2, 4, ... and all ranks"
    ENDS = "one rank and all ranks"
    ALL = "all ranks"


class SkipError(Exception):
    """Raised by a check, on all ranks, where it cannot run here; the message is the reason."""


class WrongError(AssertionError):
    """Raised by a check whose result is wrong; the message says what was expected and what was
    found."""


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: torch.device  # of this rank
    rank: int
    size: int
    folder: Path  # for files; all ranks have the same
    seconds: float = 10.0  # for measurements
    memory_nbytes: int = 0  # of the smallest device; 0 where it does not say
    without: tuple[str, ...] = ()  # contestants that ended the process of an earlier attempt
    # is told what is done now, so that a crash can be attributed to it
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Found:
    """What a check that passes returns on rank 0."""

    detail: str  # one line for the report
    figures: Mapping[str, Any] = field(default_factory=dict)  # for tables; values that JSON has


@dataclass(frozen=True)
class Check:
    """One question."""

    name: str  # short, unique
    title: str  # what is true when it passes
    function: Callable[[Place], Found]  # answers it, on all ranks at once
    subject: str = "correctness"
    where: Where = Where.EVERY
    limit: float = 60.0  # seconds without news after which it counts as hanging
    least_ranks: int = 1  # fewer make no sense
    is_separate: bool = False  # it needs processes of its own, because of what it imports


@dataclass(frozen=True)
class Outcome:
    """How one check ended with one number of ranks."""

    subject: str
    check: str
    title: str
    ranks: int
    status: Status
    seconds: float = 0.0
    detail: str = ""  # one line; the reason where it did not pass
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, check: Check, ranks: int, status: Status, detail: str, **more: Any) -> Outcome:
        return cls(check.subject, check.name, check.title, ranks, status, detail=detail, **more)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status.value, "figures": dict(self.figures)}
