"""Writes the table of options in docs/reference.md, between its two marker comments, as DistOptConfig declares them.

Usage: python scripts/reference.py
"""

from __future__ import annotations

from pathlib import Path

from megatron_distopt.config import OPTIONS
from megatron_distopt.options import SetBy, flag_of, variable_of

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->"


def reference_table() -> str:
    """The options as a Markdown table."""
    lines = ["| option | flag and environment variable | values | default | meaning |", "|---|---|---|---|---|"]
    for name, each in OPTIONS.items():
        is_free = each.set_by is SetBy.FLAG
        spelled = f"`{flag_of(name)}`, `{variable_of(name)}`" if is_free else "in a Megatron, the host's own flag"
        default = repr(each.default).replace("'", '"')
        lines.append(f"| `{name}` | {spelled} | {each.values} | `{default}` | {each.meaning} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{reference_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
