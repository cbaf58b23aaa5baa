"""Runs a program again that has failed and was written down: python -m tests.differential.rerun
FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.differential import programs
from tests.differential.pool import pool


def read(file: Path) -> programs.Program:
    """The program in the first line."""
    program: programs.Program = eval(file.read_text().partition("\n")[0], vars(programs))
    return program


def main() -> None:
    program = read(Path(sys.argv[1]))
    with pool() as running:
        sys.stdout.write(f"{program!r}\n{running.run(program)}\n")


if __name__ == "__main__":
    main()
