"""Writes the table of options in docs/reference.md, between its two marker comments, as DistOptConfig declares them.

Usage: python scripts/reference.py
"""

from __future__ import annotations

from pathlib import Path

from megatron_distopt.config import OPTIONS
from megatron_distopt.options import reference_table

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->"


def with_table(page: str) -> str:
    """The page with the table between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{reference_table(OPTIONS)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
