"""The words of the kit: what a check is, where it runs, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

__all__ = ["SUBJECTS", "Check", "Found", "Outcome", "Place", "SkipError", "Status", "Where", "WrongError"]

#: What `--only` takes, in the order of the report.
SUBJECTS = ("correctness", "memory", "speed")
#: Modules that are no subject of their own.
_SUBJECT_OF = {"hosts": "correctness", "interruptions": "correctness"}


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
    """Raised by a check whose result is wrong; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Place:
    """Where a check runs.

    Args:
        device: of this rank.
        rank, size: of this process, and how many there are.
        folder: for files; all ranks have the same.
        seconds: how long measurements may take.
        memory_nbytes: of the smallest device; 0 where it does not say.
        without: contestants that are left out, because they ended the process of an earlier attempt.
        say: is told what is done now, so that a crash can be attributed to it.
    """

    device: torch.device
    rank: int
    size: int
    folder: Path
    seconds: float = 10.0
    memory_nbytes: int = 0
    without: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Found:
    """What a check that passes returns on rank 0.

    Args:
        detail: one line for the report.
        figures: for tables and plots; values that JSON has.
    """

    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One question.

    Args:
        name: short, unique.
        title: what is true when it passes.
        function: answers it, on all ranks at once.
        where: with how many ranks.
        limit: seconds after which it counts as hanging.
        least_ranks: fewer than these make no sense.
        is_mute: whether its ranks are in a group that does not communicate.
        is_separate: whether it needs processes of its own, because of what it imports.
    """

    name: str
    title: str
    function: Callable[[Place], Found]
    where: Where = Where.EVERY
    limit: float = 60.0
    least_ranks: int = 1
    is_mute: bool = False
    is_separate: bool = False

    @property
    def subject(self) -> str:
        """One of `SUBJECTS`, by the module that it lies in."""
        module = self.function.__module__.rpartition(".")[2]
        return _SUBJECT_OF.get(module, module)


@dataclass(frozen=True)
class Outcome:
    """How one check ended with one number of ranks.

    Args:
        subject, check, title: of the check.
        ranks: how many there were.
        status: see `Status`.
        seconds: that it took.
        detail: one line; the reason where it did not pass.
        figures: see `Found`.
    """

    subject: str
    check: str
    title: str
    ranks: int
    status: Status
    seconds: float = 0.0
    detail: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status.value, "figures": dict(self.figures)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        return cls(**{**found, "status": Status(found["status"])})
