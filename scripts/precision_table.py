"""Trains with the optimizer state in every precision and every place, in every kind of host, and writes the tables in
docs/precision.md.

Usage: python scripts/precision_table.py [HOST...]

HOST is torch, megatron_2023 or megatron_core: whose columns are written, those of all of them where none is named. It
takes some minutes for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.hosts.test_state_precision import ALL, train_all, verdict  # noqa: E402
from tests.sim.test_state_places import PARAM_ROWS, ROWS, Cells, compare_params, compare_places  # noqa: E402
from tests.support.spawn import run_ranks  # noqa: E402
from tests.support.state_table import HOSTS, PARAMS, PRECISIONS  # noqa: E402

#: Of a column.
_SECONDS = 3000


def column(host: str) -> Cells:
    """Of the first table: trains everything."""
    trained = run_ranks(train_all, 2, host, ALL, seconds=_SECONDS)[0]
    places = run_ranks(compare_places, 2, host, ALL, (1,), seconds=_SECONDS)[0]
    return {row: (verdict(trained, each), *places[row]) for row, each in ROWS.items()}


def main(hosts: list[str]) -> None:
    for host in hosts or HOSTS:
        PRECISIONS.write(tuple(ROWS), {host: column(host)})
        PARAMS.write(PARAM_ROWS, {host: run_ranks(compare_params, 2, host, seconds=_SECONDS)[0]})


if __name__ == "__main__":
    main(sys.argv[1:])
