"""docs/one_parameter.md says what happens: it is executed on two ranks."""

from __future__ import annotations

import doctest
from pathlib import Path

from tests.support.spawn import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "one_parameter.md"


class _AcceptAnything(doctest.OutputChecker):
    """For rank 1, which must take part in every collective and whose numbers the page does not
    show."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return True


def run_page(rank: int, size: int) -> tuple[int, int, str]:
    checker = doctest.OutputChecker() if rank == 0 else _AcceptAnything()
    test = doctest.DocTestParser().get_doctest(
        PAGE.read_text(encoding="utf-8"), {}, PAGE.name, str(PAGE), 0
    )
    report: list[str] = []
    result = doctest.DocTestRunner(checker=checker).run(test, out=report.append)
    return result.failed, result.attempted, "".join(report)


def test_page_when_executed_on_two_ranks_then_prints_what_it_says() -> None:
    results = run_ranks(run_page, 2)
    failed, attempted, report = results[0]
    assert failed == 0, report
    # A page that lost its fences would run nothing.
    assert attempted > 25
    # Rank 1 is not compared, but an exception there is a failure as well.
    assert results[1][0] == 0, results[1][2]
