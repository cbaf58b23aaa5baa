"""Writes the tables in docs/matrix_owners.md: how even matrix owners are on models of public sizes.

Usage: python scripts/matrix_owners_table.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "matrix_owners.md"
sys.path.insert(0, str(ROOT))

from megatron_distopt.layout import default_bucket_size, lay_out, plan_owners  # noqa: E402
from megatron_distopt.layout.balance import balance_of  # noqa: E402
from tests.support.large_models import LARGE_MODELS, matrices_of, params_of  # noqa: E402

MARKED = re.compile(r"(<!-- table of (\w+): .*?-->\n).*?(?=<!-- end of table -->)", re.DOTALL)
HEAD = (
    "| model | ranks | bucket size | buckets | padding | matrices that travel | rounds | extra on the wire "
    "| sent by a rank (most), MB | cost, imbalance (bound) | state, imbalance |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def row(name: str, num_ranks: int, bucket_size: int | None) -> str:
    """One model on so many ranks."""
    model = LARGE_MODELS[name]
    layout = lay_out(params_of(model), num_shards=num_ranks, bucket_size=bucket_size)
    plan = plan_owners(layout, matrices_of(model))
    found = balance_of(plan)
    size = "one bucket" if bucket_size is None else f"{bucket_size / 1e6:.0f}M"
    cells = (
        *(name, f"{num_ranks:,}", size, f"{len(layout.buckets)}", f"{100 * found.padding:.3f} %"),
        *(f"{found.num_travelling} of {found.num_blocks}", f"{plan.num_rounds}", f"{100 * found.extra_wire:.2f} %"),
        f"{found.travel_nbytes / 1e6:.0f} ({found.most_travel_nbytes / 1e6:.0f})",
        f"{found.cost_imbalance:.2f} ({found.least_cost_imbalance:.2f})",
        f"{found.state_imbalance:.2f}",
    )
    return f"| {' | '.join(cells)} |\n"


def _models() -> Iterator[str]:
    for name, model in LARGE_MODELS.items():
        numel = sum(param.numel for param in params_of(model))
        for num_ranks in (8, 64, 512, 4096):
            yield row(name, num_ranks, default_bucket_size(numel, num_ranks))


def _sizes() -> Iterator[str]:
    for num_ranks in (2, 8, 64, 512):
        for bucket_size in (40_000_000, 200_000_000, 840_000_000, None):
            yield row("LLaMA 7B", num_ranks, bucket_size)


def with_tables(text: str) -> str:
    """The page with its tables made anew."""
    tables = {"models": _models, "sizes": _sizes}
    return MARKED.sub(lambda match: f"{match[1]}{HEAD}{''.join(tables[match[2]]())}", text)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
