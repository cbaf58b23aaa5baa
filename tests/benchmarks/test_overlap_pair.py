"""How benchmarks/overlap.py talks to its ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.overlap_orders import Order, Place
from peers.overlap_pair import Pair, PairEndedError

ORDER = Order("ours", 3, 1, 1, 1)
#: A rank that prints what a library would print, and answers without training.
ANSWERS = """
import json, os, sys
place = json.loads(sys.argv[1])
for line in sys.stdin:
    order = json.loads(line)
    print("from a library", flush=True)
    reading = {"contestant": order["contestant"], "ranks": place["size"], "numel": 8, "round": order["number"]}
    answer = {**reading, "seconds": [place["rank"] + 0.5], "losses": [4.0]}
    os.write(place["reply"], (json.dumps(answer) + "\\n").encode())
"""


@contextmanager
def _pair(program: str) -> Iterator[Pair]:
    places = [Place(rank, 2, "lo", "nowhere", -1, (), {}) for rank in range(2)]
    pair = Pair(places, lambda rank, command: [sys.executable, "-c", program, command[-1]])
    try:
        yield pair
    finally:
        pair.kill()


def test_ask_when_both_ranks_answer_then_is_their_readings_by_rank() -> None:
    with _pair(ANSWERS) as pair:
        for _ in range(2):
            readings = pair.ask(ORDER)
            assert [reading.seconds for reading in readings] == [(0.5,), (1.5,)]
            assert {(reading.contestant, reading.ranks, reading.round) for reading in readings} == {("ours", 2, 3)}


def test_ask_when_a_rank_dies_with_the_order_then_says_which_contestant_it_had() -> None:
    dies = "import sys; sys.stdin.readline(); sys.exit(3)"
    with _pair(dies) as pair, pytest.raises(PairEndedError, match=r"^rank 0 in 'ours': ended with 3$"):
        pair.ask(ORDER)


def test_stop_when_no_order_is_left_then_ranks_leave_by_themselves() -> None:
    with _pair(ANSWERS) as pair:
        pair.ask(ORDER)
        pair.stop()
        assert [process.returncode for process in pair.processes] == [0, 0]
