"""Runs the marked commands of docs/plan.md, and writes below each what it prints.

A mark is a comment before the block, `<!-- output: NAME -->`, with the beginning of the titles of
the parts that are shown; `all` for all of them.

Usage: python scripts/plan_page.py
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megatron_distopt.cli import main as cli
from megatron_distopt.cli import plan_command
from megatron_distopt.cli.show import Answer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plan.md"
MARKED = re.compile(
    r"(<!-- output: ([\w ]+) -->\n```\n\$ megatron-distopt (plan [^\n]*)\n).*?(?=```\n)", re.DOTALL
)
#: Characters in a line.
WIDTH = 180


def printed(command: str, title: str) -> str:
    """What a command prints.

    Args:
        command: without the name of the program.
        title: what the titles of the wanted parts begin with, or "all".
    """
    answer = plan_command.answer(cli._parser().parse_args(shlex.split(command)))
    texts = [Answer({}, [part]).as_text(WIDTH) for part in answer.parts]
    return "\n\n".join(text for text in texts if title == "all" or text.startswith(title))


def with_outputs(page: str) -> str:
    """The page with everything that its marked commands print."""
    return MARKED.sub(lambda match: f"{match[1]}\n{printed(match[3], match[2])}\n", page)


if __name__ == "__main__":
    PAGE.write_text(with_outputs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
