"""The tables of matrix owners in the docs are what their scripts make."""

from __future__ import annotations

from scripts.matrix_owners_table import MARKED, PAGE, row, with_tables
from scripts.packed_matrices import ROOT, table


def test_page_when_its_tables_are_made_anew_then_the_same() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [match[2] for match in MARKED.finditer(page)] == ["models", "sizes"]
    assert page == with_tables(page), "write the tables again: python scripts/matrix_owners_table.py"
    assert row("LLaMA 7B", 64, 40_000_000) in page


def test_decision_when_its_table_is_made_anew_then_the_same() -> None:
    page = ROOT / "docs" / "decisions" / "0007-matrix-owners.md"
    assert table() in page.read_text(encoding="utf-8"), "paste the output of python scripts/packed_matrices.py"
