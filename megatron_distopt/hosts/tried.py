"""What was run, and where: the first table of docs/hosts.md, as data. A row is added by who ran it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TRIED", "Tried", "as_markdown"]


@dataclass(frozen=True)
class Tried:
    """One run of a host with this package.

    Args:
        host: whose.
        version: or commit.
        what: was run.
        where: devices, backend, versions of what matters.
        date: year-month-day of the last run.
        result: "passes", or what did not.
    """

    host: str
    version: str
    what: str
    where: str
    date: str
    result: str


TRIED = (
    Tried(
        "plain (any torch module)",
        "torch 2.13.0",
        "`tests/hosts/test_plain.py`, `tests/optimizer/`: DP 1, 2, 3, 4; fp32, bf16, fp16, mixed",
        "CPU, gloo, torch 2.13.0",
        "2026-11-21",
        "passes",
    ),
    Tried(
        "megatron-core (PyPI)",
        "0.16.1",
        "`tests/hosts/`: GPTModel, DP, TP, PP, virtual PP and products up to 4 ranks, fp32, bf16, fp16, with the "
        "host's overlaps; `scripts/quickstart.sh` with both launchers",
        "CPU, gloo, torch 2.13.0, deepspeed 0.19.8",
        "2026-11-21",
        "passes",
    ),
)

_HEADER = ("host", "version or commit", "what was run", "where", "date", "result")


def as_markdown(rows: Sequence[Tried] = TRIED) -> str:
    """The table, as docs/hosts.md has it between its two marker comments.

    >>> print(as_markdown([Tried("mine", "1.0", "a step", "CPU", "2026-01-02", "passes")]))
    | host | version or commit | what was run | where | date | result |
    |---|---|---|---|---|---|
    | mine | 1.0 | a step | CPU | 2026-01-02 | passes |
    """
    cells = [(row.host, row.version, row.what, row.where, row.date, row.result) for row in rows]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in [_HEADER, *cells]]
    return "\n".join([lines[0], "|---" * len(_HEADER) + "|", *lines[1:]])
