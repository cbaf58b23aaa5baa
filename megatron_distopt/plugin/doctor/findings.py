"""What `megatron-distopt doctor` found, as values, and how they are shown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import groupby

__all__ = ["Finding", "Status", "as_json", "as_table", "can_start", "noted", "ok", "problem", "refused"]


class Status(Enum):
    """What a finding means for training."""

    #: As it should be.
    OK = "ok"
    #: Good to know; the optimizer could start.
    NOTE = "note"
    #: Training with this optimizer could not start.
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        section: "fork", "machine", "environment" or "launch".
        subject: what was looked at.
        status: what it means for training.
        text: what was found; of a problem also what is supported and what to type.
    """

    section: str
    subject: str
    status: Status
    text: str


def ok(section: str, subject: str, text: str) -> Finding:
    """As it should be."""
    return Finding(section, subject, Status.OK, text)


def noted(section: str, subject: str, text: str) -> Finding:
    """Good to know."""
    return Finding(section, subject, Status.NOTE, text)


def problem(section: str, subject: str, text: str) -> Finding:
    """Training could not start; `text` is a refusal."""
    return Finding(section, subject, Status.PROBLEM, text)


def refused(section: str, subject: str, reason: str | None, text: str) -> Finding:
    """A problem where there is a reason, or `text` where all is well."""
    return ok(section, subject, text) if reason is None else problem(section, subject, reason)


def can_start(findings: Sequence[Finding]) -> bool:
    """Whether there is no problem."""
    return all(finding.status is not Status.PROBLEM for finding in findings)


def as_table(findings: Sequence[Finding], width: int | None = None) -> str:
    """For people: one line a finding, and a verdict.

    Args:
        findings: sections together.
        width: of the terminal in characters, at which text is wrapped; None for one line each.

    >>> print(as_table([ok("fork", "flag", "--use-distributed-optimizer")]))
    fork
      ok       flag  --use-distributed-optimizer
    <BLANKLINE>
    no problem found: this optimizer could start
    """
    subjects = max((len(finding.subject) for finding in findings), default=0)
    lines: list[str] = []
    for section, of_it in groupby(findings, key=lambda finding: finding.section):
        lines.append(section)
        for finding in of_it:
            lines += _wrapped(f"  {finding.status.value:<7}  {finding.subject:<{subjects}}  ", finding.text, width)
        lines.append("")
    return "\n".join([*lines, _verdict(findings)])


def _wrapped(head: str, text: str, width: int | None) -> list[str]:
    if width is None or width < len(head) + 30:
        return [head + text]
    options = {"initial_indent": head, "subsequent_indent": " " * len(head)}
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False, **options)  # type: ignore[arg-type]


def _verdict(findings: Sequence[Finding]) -> str:
    count = sum(finding.status is Status.PROBLEM for finding in findings)
    if not count:
        return "no problem found: this optimizer could start"
    return f"{count} problem{'s' * (count > 1)}: this optimizer could not start"


def as_json(findings: Sequence[Finding]) -> str:
    """For programs: the same content as one document."""
    rows = [{**asdict(finding), "status": finding.status.value} for finding in findings]
    return json.dumps({"can_start": can_start(findings), "findings": rows}, indent=2)
