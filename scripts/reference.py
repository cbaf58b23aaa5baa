"""Writes the tables of options and of what excludes what in docs/reference.md, between their marker
comments.

Usage: python scripts/reference.py
"""

from __future__ import annotations

from pathlib import Path

from megatron_distopt.compatibility import EXCLUSIONS
from megatron_distopt.config import OPTIONS
from megatron_distopt.options import flag_of, variable_of

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->"


def reference_table() -> str:
    """The options as a Markdown table."""
    lines = [
        "| option | flag and environment variable | values | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, each in OPTIONS.items():
        ours = f"`{flag_of(name)}`, `{variable_of(name)}`"
        spelled = "in a Megatron, the host's own flag" if each.by_host else ours
        default = repr(each.default).replace("'", '"')
        lines.append(f"| `{name}` | {spelled} | {each.values} | `{default}` | {each.meaning} |")
    return "\n".join(lines)


def exclusion_table() -> str:
    """The features that exclude each other as a Markdown table."""
    rows = (
        f"| {feature.value} | {other.value} | {instead} |"
        for feature, excluded in EXCLUSIONS.items()
        for other, instead in excluded.items()
    )
    return "\n".join(["| this | excludes | instead |", "|---|---|---|", *rows])


def with_table(page: str) -> str:
    """The page with the tables between their markers replaced."""
    for name, table in (("options", reference_table()), ("exclusions", exclusion_table())):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
