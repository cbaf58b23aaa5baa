"""Writes the table of options in docs/reference.md, between its two marker comments, as DistOptConfig declares them.

Usage: python scripts/reference.py
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_distopt.config import FREE_OPTIONS, OPTIONS, DistOptConfig, flag_of
from megatron_distopt.plugin.arguments import _HELP

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->"


def options_table() -> str:
    """One row an option: its name in Python, flag, environment variable, default and meaning."""
    rows = ["| option | flag and environment variable | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {_set_by(name)} | `{_default(name)}` | {_meaning(name)} |" for name in OPTIONS]
    return "\n".join(rows) + "\n"


def _set_by(name: str) -> str:
    if name not in FREE_OPTIONS:
        return "in a Megatron, the host's own flag"
    return f"`{flag_of(name)}`, `MEGATRON_DISTOPT_{name.upper()}`"


def _default(name: str) -> str:
    return repr(getattr(DistOptConfig, name)).replace("'", '"')


def _meaning(name: str) -> str:
    return (_HELP.get(name) or _documented()[name]).replace("|", "\\|")


def _documented() -> dict[str, str]:
    """The entries of Args in the docstring, where several names may share one."""
    arguments = str(DistOptConfig.__doc__).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", arguments, flags=re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for names, text in entries for name in names.split(", ")}


def with_table(page: str) -> str:
    """The page with the table between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{options_table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
