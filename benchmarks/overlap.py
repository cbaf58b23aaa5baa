"""How much of the communication of a training step is hidden where the network is slower than memory.

    sudo -E python benchmarks/overlap.py [--rates 1 5 25] [--rounds 3] [--quick] [--json FILE] [--plot FILE]

Two ranks in two network namespaces of this machine, joined by a pair of virtual interfaces whose rate is limited. Each
contestant of train.py trains at every rate, and once more without any communication; what a step takes longer is its
exposed communication. Needs Linux, root, ip and tc (iproute2); the namespaces are removed at the end, however it comes.
benchmarks/README.md says how every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
from peers.machine import about
from peers.namespaces import Wire, join, why_not
from peers.overlap_busy import Busy
from peers.overlap_contestants import FORWARD, best_of, picked
from peers.overlap_exposed import Context, WiredReading, slowest, summary
from peers.overlap_orders import Order
from peers.overlap_pair import Pair, PairEndedError, mute_pair, wired_pair
from peers.overlap_plot import draw_overlap
from peers.overlap_probe import Probe, measure
from peers.overlap_report import last_line, lines, name_of
from peers.plot import Drawing
from peers.ratios import spread
from peers.script import parser_of, settings_of, write
from peers.train_contestants import FORWARD_BACKWARD
from peers.trainers import TrainEntry

PROBE_SECONDS = 0.4
MODEL = ("layers", "hidden", "vocabulary", "sequence", "sequences", "bucket_size")


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw_overlap):
        return
    entries = picked(args.ours, args.contestants, quick=args.quick)
    refusal = why_not("python " + " ".join(sys.argv))
    if refusal:
        print(refusal, file=sys.stderr)
        raise SystemExit(2)
    start = time.monotonic()
    with join(args.delay_us) as wire:
        probes = {rate: probe(wire, rate) for rate in args.rates}
        readings, failures = run(entries, wire, args)
    found = summaries(readings, probes, best_of(entries))
    link = {"delay_us": wire.delay_us, "delay_us_asked": args.delay_us, "note": wire.note, "reached": probes}
    about_it = {**about(args.load_before, time.monotonic() - start), "settings": settings_of(args), "link": link}
    result = {**about_it, "rates": found, "failures": failures, "readings": readings}
    write(result, args.json)
    drawing.of_result(draw_overlap, {"rates": found})
    for line in (*lines(found), "", *(note for note in (wire.note, *failures) if note), last_line(found)):
        print(line)


def probe(wire: Wire, gigabits: float) -> Probe:
    """What plain TCP reaches at a rate."""
    wire.set_rate(gigabits)
    found = measure(wire, PROBE_SECONDS)
    reached = f"plain TCP reaches {found.gigabits:.2f} Gbit/s, {found.round_trip_us:.0f} us there and back"
    print(f"{name_of(gigabits)}: {reached}", file=sys.stderr)
    return found


def run(entries: Sequence[TrainEntry], wire: Wire, args: argparse.Namespace) -> tuple[list[WiredReading], list[str]]:
    """What was read, and why it ended early."""
    readings: list[WiredReading] = []
    try:
        with pairs(wire, args) as (mute, wired):
            for reading in rounds(entries, mute, wired, wire, args):
                readings.append(reading)
                tell(reading)
    except PairEndedError as error:
        return readings, [f"ended early: {error}"]
    return readings, []


@contextmanager
def pairs(wire: Wire, args: argparse.Namespace) -> Iterator[tuple[Pair, Pair]]:
    """The ranks that do not communicate, and those that do; ended afterwards, at once where something went wrong."""
    model = {name: getattr(args, name) for name in MODEL}
    started: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        try:
            started.append(mute_pair(Path(folder) / "store", args.ours, model))
            started.append(wired_pair(wire, args.ours, model))
            yield started[0], started[1]
        except BaseException:
            for pair in started:
                pair.kill()
            raise
        for pair in started:
            pair.stop()


def rounds(
    entries: Sequence[TrainEntry], mute: Pair, wired: Pair, wire: Wire, args: argparse.Namespace
) -> Iterator[WiredReading]:
    """A warm-up of every contestant with a small model, then rounds: without communication, then at each rate."""
    wire.set_rate(0.0)
    for entry in entries:
        for pair in (mute, wired):
            pair.ask(Order(entry.name, -1, 1, 1, 1))
    for number in range(args.rounds):
        for entry in (FORWARD, FORWARD_BACKWARD, *entries):
            order = Order(entry.name, number, args.warm_up, args.blocks, args.steps)
            yield asked(mute, order, None)
            for gigabits in args.rates if entry.trains else ():
                wire.set_rate(gigabits)
                yield asked(wired, order, gigabits)


def asked(pair: Pair, order: Order, gigabits: float | None) -> WiredReading:
    """Ranks that communicate agree on what they read; the others are put together."""
    busy = Busy()
    answers = pair.ask(order)
    return WiredReading(gigabits, busy.cores(), slowest(answers) if gigabits is None else answers[0])


def tell(each: WiredReading) -> None:
    reading = each.reading
    where = "without communication" if each.gigabits is None else name_of(each.gigabits)
    print(
        f"round {reading.round}  {reading.contestant:28} {where:22} {reading.why_not or spread(reading.seconds)}",
        file=sys.stderr,
    )


def summaries(readings: Sequence[WiredReading], probes: dict[float, Probe], best: str) -> list[dict[str, Any]]:
    """Of each rate at which something was read."""
    alone = [each.reading for each in readings if each.gigabits is None]
    forward, both = (
        [statistics.median(reading.seconds) for reading in alone if reading.contestant == entry.name]
        for entry in (FORWARD, FORWARD_BACKWARD)
    )
    cores = os.cpu_count() or 1
    rates = [rate for rate in probes if any(each.gigabits == rate for each in readings)]
    return [summary(rate, readings, Context(probes[rate], forward, both, best, cores)) for rate in rates]


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = parser_of(__doc__, "a smaller model, one rate, 2 rounds, fewer variants")
    Drawing.add_arguments(parser)
    parser.add_argument("--ours", nargs="+", default=[], help="name=value of DistOptConfig: ours once more with these")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 5, 25], help="Gbit/s, 10**9 bits; 0: no limit")
    parser.add_argument("--delay-us", type=float, default=0.0, help="of the link, one way, where the kernel has netem")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--blocks", type=int, default=1, help="timed blocks of steps in a reading")
    parser.add_argument("--steps", type=int, default=6, help="of a block")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=128, help="tokens")
    parser.add_argument("--sequences", type=int, default=16, help="of a rank's microbatch")
    parser.add_argument("--bucket-size", type=int, default=1_000_000, help="for those that take it")
    args = parser.parse_args()
    for name, least in (("rates", 0), ("delay_us", 0), ("rounds", 1), ("blocks", 1), ("steps", 1)):
        given = getattr(args, name)
        if (min(given) if isinstance(given, list) else given) < least:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"Invalid {option}: {given}. Must be at least {least}. Write {option} {least} or more.")
    if args.quick:
        args.rates, args.rounds, args.blocks, args.steps = [5.0], 2, 1, 3
        args.layers, args.hidden, args.sequences, args.warm_up = 2, 256, 4, 1
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
