"""Trains with the optimizer state in every precision, in every kind of host, and writes the table in docs/precision.md.

Usage: python scripts/precision_table.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "precision.md"
sys.path.insert(0, str(ROOT))

from megatron_distopt.optimizer import Precision  # noqa: E402
from tests.hosts.test_state_precision import ALL, HOSTS, Trained, train_all, verdict  # noqa: E402
from tests.support.spawn import run_ranks  # noqa: E402

HEAD = f"| main params | both moments | {' | '.join(HOSTS)} |\n|---|---|{'---|' * len(HOSTS)}\n"
MARKED = re.compile(r"(<!-- table: .*?-->\n).*?(?=<!-- end of table -->)", re.DOTALL)


def table() -> str:
    """Trains everything: some minutes."""
    trained: dict[str, dict[Precision, Trained]] = {
        host: run_ranks(train_all, 2, host, ALL, seconds=3000)[0] for host in HOSTS
    }
    rows = [
        f"| `{each.main_params_dtype}` | `{each.exp_avg_dtype}` | "
        f"{' | '.join(verdict(trained[host], each) for host in HOSTS)} |\n"
        for each in ALL
    ]
    return HEAD + "".join(rows)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKED.sub(lambda match: f"{match[1]}{table()}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
