"""How many bytes an element each rank needs, beside what a user would use instead.

    python benchmarks/memory.py [--ranks 2 4] [--layers 4] [--hidden 1024] [--quick] [--json FILE]

bf16 params, fp32 grads, AdamW. The target is 6 + 12/n at n ranks: param 2, grad 4, the owned part
of main param and two moments. The model sees eight tokens, so that what is measured is not
activations. benchmarks/README.md says how every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
from peers.memory_reading import MemoryReading, read, target
from peers.ranks import log, run_on_ranks
from peers.report import reports
from peers.script import add_training, conclude, parser_of, pick
from peers.train_contestants import train_entries
from peers.transformer import TrainSetting

#: Of the model, so small that nearly all of it is in its layers.
VOCABULARY, SEQUENCE = 256, 8


def main() -> None:
    args = parse_args()
    pick(train_entries(args.ours), args.contestants)
    # What is freed goes back to the system at once, so that the high-water mark is that of live
    # memory.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    readings: list[MemoryReading] = []
    failures = []
    for ranks in args.ranks:
        logged, why = run_on_ranks(run, ranks, args)
        readings += [MemoryReading(**entry) for entry in logged]
        failures += [why] if why else []
    found = [
        summary([r for r in readings if r.ranks == ranks])
        for ranks in dict.fromkeys(r.ranks for r in readings)
    ]
    result = {"ranks": found, "failures": failures, "readings": readings}
    conclude(args, result, [*failures, *lines(found)])


def run(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """On every rank: each contestant with a small model, so that imports are over, then each with
    the real one.

    What imports leave is kept from the garbage collector, which would look through a million
    objects for each reading.
    """
    entries = pick(train_entries(args.ours), args.contestants)
    setting = TrainSetting(
        args.layers, args.hidden, VOCABULARY, SEQUENCE, 1, args.bucket_size, rank, size
    )
    for entry in entries:
        read(entry, replace(setting, layers=1, hidden=128))
        gc.freeze()
    for entry in entries:
        log(read(entry, setting), path)


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
            name: reading.step_peak / ours
            for name, reading in by_name.items()
            if ours and name != "ours"
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


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table a number of ranks; the last line has the ratios."""
    header = ("", "peak of a step", "held between", "peak of building", "")
    return reports(found, _heading, header, _rows, _last_words)


def _heading(ranks: Mapping[str, Any]) -> str:
    goal = f"6 + 12/n = {ranks['target']:.2f}"
    return (
        f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements; bytes an element on a "
        f"rank; {goal}"
    )


def _rows(ranks: Mapping[str, Any]) -> list[tuple[str, ...]]:
    ran = [
        (name, *(f"{each:.2f}" for each in values.values()), "")
        for name, values in ranks["bytes an element"].items()
    ]
    return ran + [(name, "-", "-", "-", why_not) for name, why_not in ranks["why_not"].items()]


def _last_words(ranks: Mapping[str, Any]) -> str:
    ours = ranks["bytes an element"].get("ours")
    goal = f"6 + 12/n = {ranks['target']:.2f}"
    own = (
        "ours did not run"
        if ours is None
        else f"ours {ours['peak of a step']:.2f} bytes an element ({goal})"
    )
    ratios = [
        f"{name}/ours {ratio:.2f}" for name, ratio in ranks["peak of a step, peer / ours"].items()
    ]
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
