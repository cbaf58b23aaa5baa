"""How benchmarks tell ranks what to do: orders, answers, and ranks that end or hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers import crew
from peers.crew import Crew, Member

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: A rank that prints what a library would print, says what it does, and answers with its rank and the order.
ANSWERS = """
import sys
from peers.crew import answer, orders
for order in orders():
    print("from a library", flush=True)
    answer({"at": f"order {order['number']}"})
    answer({"rank": int(sys.argv[1]), **order})
"""
ENDS = "import sys; sys.stdin.readline(); sys.exit(3)"
HANGS = "import sys, time; sys.stdin.readline(); time.sleep(60)"


@contextmanager
def _ranks(*programs: str) -> Iterator[Crew]:
    members = [Member([sys.executable, "-c", each, str(rank)], {}) for rank, each in enumerate(programs)]
    found = Crew(members, BENCHMARKS)
    try:
        yield found
    finally:
        found.kill()


def test_ask_when_all_ranks_answer_then_is_their_answers_by_rank() -> None:
    with _ranks(ANSWERS, ANSWERS) as ranks:
        for number in range(2):
            assert ranks.ask({"number": number}, 60) == [{"rank": rank, "number": number} for rank in range(2)]
            assert ranks.doing == f"order {number}"
        ranks.stop()
        assert [process.returncode for process in ranks.processes] == [0, 0]


def test_ask_when_a_rank_ends_with_the_order_then_the_others_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "FOLLOW_SECONDS", 0.5)
    with _ranks(HANGS, ENDS) as ranks:
        start = time.monotonic()
        assert ranks.ask({}, 60) == [None, None]
        assert time.monotonic() - start < 30
        assert ranks.ended == {1}
        assert ranks.how_ended(1) == "ended with status 3"


def test_ask_when_a_rank_hangs_then_it_has_no_answer() -> None:
    with _ranks(HANGS) as ranks:
        assert ranks.ask({}, 0.5) == [None]
        assert ranks.ended == set()
