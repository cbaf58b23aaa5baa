"""Writes the table of compiled kernels in docs/kernels.md. It needs Triton and no GPU.

Usage: python scripts/kernels_table.py
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
sys.path.insert(0, str(ROOT))

from tests.support.compiled import CODED, SOME_CODED, TARGETS, VARIANTS, Compiled, compile_for  # noqa: E402

HEAD = (
    "| target | kernel | registers | bytes spilled | bytes of local memory | loads | stores |\n"
    "|---|---|---|---|---|---|---|\n"
)
MARKED = re.compile(r"(<!-- table: .*?-->\n).*?(?=<!-- end of table -->)", re.DOTALL)


def _widths(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{count} × {bits}" for bits, count in sorted(counts.items(), reverse=True)) or "none"


def _row(target: str, name: str, found: Compiled) -> str:
    cells = [target, name, found.registers, found.spilled_nbytes, found.local_nbytes]
    cells += [_widths(found.loads), _widths(found.stores)]
    return f"| {' | '.join(map(str, cells))} |\n"


def table() -> str:
    """Compiles everything."""
    variants = {**VARIANTS, **{f"update_coded: {name}": CODED[name] for name in SOME_CODED}}
    rows = [
        _row(target, name, compile_for(target, variant)) for target in TARGETS for name, variant in variants.items()
    ]
    return f"Triton {version('triton')}; widths in bits of one lane.\n\n{HEAD}{''.join(rows)}"


def main() -> None:
    with TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # ptxas says what it did only when it does it
        text = PAGE.read_text()
        PAGE.write_text(MARKED.sub(lambda match: f"{match[1]}{table()}", text))


if __name__ == "__main__":
    main()
