"""The end of a script that `scripts.py` writes: starts the ranks and says how the program went.

It is text for that script; here it imports what the script has above it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.differential.compare import judge
from tests.differential.ours import run_our_rank
from tests.differential.reference import run_reference


def one_rank(results: Any, number: int, rank: int, size: int, folder: Path) -> None:
    """The body of a rank's process."""
    phase = globals()[f"phase_{number}"]
    # As bytes: torch would share the memory of tensors, which ends with this process.
    results.put((rank, pickle.dumps(run_our_rank(phase, rank, size, folder, number))))


def all_ranks(number: int, size: int, folder: Path, seconds: float = 180.0) -> list[Any]:
    """What the ranks of one phase saw, by rank; None for one that did not end."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    args = [(results, number, rank, size, folder) for rank in range(size)]
    processes = [context.Process(target=one_rank, args=each, daemon=True) for each in args]
    for process in processes:
        process.start()
    got: dict[int, Any] = {}
    try:
        while len(got) < size:
            rank, result = results.get(timeout=seconds)
            got[rank] = pickle.loads(result)
    except Exception as error:  # noqa: BLE001 - queue.Empty, which multiprocessing does not name
        sys.stdout.write(f"ranks {sorted(set(range(size)) - set(got))} did not end: {error!r}\n")
    for process in processes:
        process.kill()
    return [got.get(rank) for rank in range(size)]


def main(ranks: list[int], *, precision: str, may_refuse: bool) -> None:
    """Runs all phases. Exits with 1 where the program fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        ours, reference = Path(folder) / "ours", Path(folder) / "reference"
        ours.mkdir()
        reference.mkdir()
        for number, size in enumerate(ranks):
            theirs = run_reference(globals()[f"phase_{number}"], size, reference)
            outcome = judge(all_ranks(number, size, ours), theirs, precision, may_refuse)
            sys.stdout.write(f"phase {number} on {size} ranks: {outcome.kind} {outcome.text}\n")
            if outcome.kind != "equal":
                sys.exit(outcome.kind == "failed")
