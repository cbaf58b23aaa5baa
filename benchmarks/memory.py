"""How many bytes an element each rank needs, beside what a user would use instead.

    python benchmarks/memory.py [--ranks 2 4] [--layers 4] [--hidden 1024] [--quick] [--json FILE]

bf16 params, fp32 grads, AdamW. The target is 6 + 12/n at n ranks: param 2, grad 4, the owned part of main param and two
moments. The model sees eight tokens, so that what is measured is not activations. benchmarks/README.md says how
every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
from peers.machine import about
from peers.memory_reading import MemoryReading, read
from peers.overlap_contestants import overlap_entries
from peers.ranks import log, run_on_ranks
from peers.report import table
from peers.script import add_training, parser_of, pick, settings_of, write
from peers.transformer import TrainSetting

#: Of the model, so small that nearly all of it is in its layers.
VOCABULARY, SEQUENCE = 256, 8


def main() -> None:
    args = parse_args()
    pick(overlap_entries(args.ours), args.contestants)
    start = time.monotonic()
    # What is freed goes back to the system at once, so that the high-water mark is that of live memory.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    readings: list[MemoryReading] = []
    failures = []
    for ranks in args.ranks:
        logged, why = run_on_ranks(run, ranks, args)
        readings += [MemoryReading(**entry) for entry in logged]
        failures += [why] if why else []
    found = [summary([r for r in readings if r.ranks == ranks]) for ranks in dict.fromkeys(r.ranks for r in readings)]
    result = {**about(args.load_before, time.monotonic() - start), "settings": settings_of(args), "ranks": found}
    write({**result, "failures": failures, "readings": readings}, args.json)
    for line in (*failures, *lines(found)):
        print(line)


def run(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """On every rank: each contestant with a small model, so that imports are over, then each with the real one.

    What imports leave is kept from the garbage collector, which would look through a million objects for each reading.
    """
    entries = pick(overlap_entries(args.ours), args.contestants)
    setting = TrainSetting(args.layers, args.hidden, VOCABULARY, SEQUENCE, 1, args.bucket_size, rank, size)
    for entry in entries:
        read(entry, replace(setting, layers=1, hidden=128))
        gc.freeze()
    for entry in entries:
        log(read(entry, setting), path)


def target(ranks: int) -> float:
    """Bytes an element: param 2, grad 4, main param and two moments of the owned part."""
    return 6 + 12 / ranks


def summary(readings: Sequence[MemoryReading]) -> dict[str, Any]:
    """Of one number of ranks; ratios first."""
    first = readings[0]
    by_name = {reading.contestant: reading for reading in readings if not reading.why_not}
    ours = by_name["ours"].step_peak if "ours" in by_name else None
    return {
        "ranks": first.ranks,
        "numel": first.numel,
        "target": target(first.ranks),
        "peak of a step, peer / ours": {
            name: reading.step_peak / ours for name, reading in by_name.items() if ours and name != "ours"
        },
        "bytes an element": {
            name: {
                "peak of a step": reading.step_peak / reading.numel,
                "held between steps": reading.held / reading.numel,
                "peak of building and first steps": reading.build_peak / reading.numel,
            }
            for name, reading in by_name.items()
        },
        "why_not": {reading.contestant: reading.why_not for reading in readings if reading.why_not},
    }


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    for ranks in found:
        goal = f"6 + 12/n = {ranks['target']:.2f}"
        yield f"\n{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements; bytes an element on a rank; {goal}"
        rows = [
            (name, *(f"{value:.2f}" for value in values.values()), "")
            for name, values in ranks["bytes an element"].items()
        ]
        rows += [(name, "-", "-", "-", why_not) for name, why_not in ranks["why_not"].items()]
        yield from table(("", "peak of a step", "held between", "peak of building", ""), rows)
    yield from ("", "; ".join(last_words(ranks) for ranks in found) or "nothing was run")


def last_words(ranks: dict[str, Any]) -> str:
    ours = ranks["bytes an element"].get("ours")
    goal = f"6 + 12/n = {ranks['target']:.2f}"
    own = "ours did not run" if ours is None else f"ours {ours['peak of a step']:.2f} bytes an element ({goal})"
    ratios = [f"{name}/ours {ratio:.2f}" for name, ratio in ranks["peak of a step, peer / ours"].items()]
    return f"{ranks['ranks']} ranks: " + ", ".join([own, *ratios])


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "a smaller model, 2 ranks")
    add_training(parser, layers=4, hidden=1024)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.layers = [2], 1
    return args


if __name__ == "__main__":
    main()
