"""How much of the communication of a training step is hidden where the network is slower than memory.

    sudo -E python benchmarks/overlap.py [--rates 1 5 25] [--rounds 3] [--quick] [--json FILE]

Two ranks in two network namespaces of this machine, joined by a pair of virtual interfaces whose rate is limited. Each
contestant of train.py trains at every rate, and once more without any communication; what a step takes longer is its
exposed communication. Needs Linux, root, ip and tc (iproute2); the namespaces are removed at the end, however it comes.
benchmarks/README.md says how every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import json
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
from peers.crew import Crew, Member
from peers.machine import about
from peers.namespaces import NUM_ENDS, Link, join, why_not
from peers.overlap_contestants import FORWARD, best_of, picked
from peers.overlap_probe import Probe, measure
from peers.overlap_rank import TIME_LIMIT
from peers.overlap_report import Context, WiredReading, lines, name_of, slowest, summary
from peers.report import spread
from peers.script import parser_of, settings_of, write
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import TrainReading
from peers.trainers import TrainEntry

PROBE_SECONDS = 0.4
STORE_PORT = 29500
MODEL = ("layers", "hidden", "vocabulary", "sequence", "sequences", "bucket_size")


def main() -> None:
    args = parse_args()
    entries = picked(args.ours, args.contestants, quick=args.quick)
    refusal = why_not("python " + " ".join(sys.argv))
    if refusal:
        print(refusal, file=sys.stderr)
        raise SystemExit(2)
    start = time.monotonic()
    with join() as link:
        probes = {rate: probe(link, rate) for rate in args.rates}
        readings, failures = run(entries, link, args)
    found = summaries(readings, probes, best_of(entries))
    about_it = {**about(args.load_before, time.monotonic() - start), "settings": settings_of(args), "reached": probes}
    result = {**about_it, "rates": found, "failures": failures, "readings": readings}
    write(result, args.json)
    for line in (*failures, *lines(found)):
        print(line)


def probe(link: Link, gigabits: float) -> Probe:
    """What plain TCP reaches at a rate."""
    link.set_rate(gigabits)
    found = measure(link, PROBE_SECONDS)
    reached = f"plain TCP reaches {found.gigabits:.2f} Gbit/s, {found.round_trip_us:.0f} us there and back"
    print(f"{name_of(gigabits)}: {reached}", file=sys.stderr)
    return found


class LostError(RuntimeError):
    """A rank ended, or did not answer in time."""


def run(entries: Sequence[TrainEntry], link: Link, args: argparse.Namespace) -> tuple[list[WiredReading], list[str]]:
    """What was read, and why it ended early."""
    readings: list[WiredReading] = []
    try:
        with pairs(link, args) as (mute, wired):
            for reading in rounds(entries, mute, wired, link, args):
                readings.append(reading)
                tell(reading)
    except LostError as error:
        return readings, [f"ended early: {error}"]
    return readings, []


@contextmanager
def pairs(link: Link, args: argparse.Namespace) -> Iterator[tuple[Crew, Crew]]:
    """Two ranks that do not communicate, and two in the namespaces; ended afterwards, at once after an error."""
    model = {name: getattr(args, name) for name in MODEL}
    started: list[Crew] = []
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        tcp = f"tcp://{link.address(0)}:{STORE_PORT}"
        try:
            for store in (str(Path(folder) / "store"), tcp):
                members = []
                for rank in range(NUM_ENDS):
                    interface = link.interface(rank) if store == tcp else "lo"
                    place = {"rank": rank, "size": NUM_ENDS, "interface": interface, "store": store}
                    about = json.dumps({**place, "ours": args.ours, "model": model})
                    command = [sys.executable, "-m", "peers.overlap_rank", about]
                    inside = link.inside(rank, command) if store == tcp else command
                    # Addresses of the link have no names, which torch would warn of.
                    members.append(Member(inside, {"TORCH_CPP_LOG_LEVEL": "ERROR"}))
                started.append(Crew(members, Path(__file__).resolve().parent))
            yield started[0], started[1]
        except BaseException:
            for crew in started:
                crew.kill()
            raise
        for crew in started:
            crew.stop()


def rounds(
    entries: Sequence[TrainEntry], mute: Crew, wired: Crew, link: Link, args: argparse.Namespace
) -> Iterator[WiredReading]:
    """A warm-up of every contestant with a small model, then rounds: without communication, then at each rate."""
    link.set_rate(0.0)
    for entry in entries:
        for crew in (mute, wired):
            ask(crew, entry.name, -1, args)
    for number in range(args.rounds):
        for entry in (FORWARD, FORWARD_BACKWARD, *entries):
            yield WiredReading(None, 0.0, slowest(ask(mute, entry.name, number, args)))
            for gigabits in args.rates if entry.trains else ():
                link.set_rate(gigabits)
                start, busy = time.monotonic(), busy_seconds()
                answers = ask(wired, entry.name, number, args)
                cores = (busy_seconds() - busy) / (time.monotonic() - start)
                yield WiredReading(gigabits, cores, answers[0])  # ranks that communicate agree on what they read


def ask(crew: Crew, name: str, number: int, args: argparse.Namespace) -> list[TrainReading]:
    """By rank.

    Raises:
        LostError: no answer will come.
    """
    order = {"contestant": name, "number": number, "pace": (args.warm_up, args.blocks, args.steps)}
    answers = crew.ask(order, TIME_LIMIT.total_seconds() + 60)
    lost = [rank for rank, found in enumerate(answers) if found is None]
    if lost:
        how = crew.how_ended(lost[0]) if lost[0] in crew.ended else "no answer in time"
        raise LostError(f"rank {lost[0]} in {name!r}: {how}")
    return [
        TrainReading(**{**found, "seconds": tuple(found["seconds"]), "losses": tuple(found["losses"])})
        for found in answers
    ]


def busy_seconds() -> float:
    """Processor time of the machine since it was started, the kernel's share for the network included.

    What the kernel does for a packet when an interrupt arrives belongs to no process; only the whole machine shows it.
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle, waiting, stolen = ticks[3], ticks[4], ticks[7]
    return (sum(ticks) - idle - waiting - stolen) / os.sysconf("SC_CLK_TCK")


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


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "a smaller model, one rate, 2 rounds, fewer variants")
    parser.add_argument("--ours", nargs="+", default=[], help="name=value of DistOptConfig: ours once more with these")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 5, 25], help="Gbit/s, 10**9 bits; 0: no limit")
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
    for name, least in (("rates", 0), ("rounds", 1), ("blocks", 1), ("steps", 1)):
        given = getattr(args, name)
        if (min(given) if isinstance(given, list) else given) < least:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"Invalid {option}: {given}. Must be at least {least}. Write {option} {least} or more.")
    if args.quick:
        args.rates, args.rounds, args.blocks, args.steps = [5.0], 2, 1, 3
        args.layers, args.hidden, args.sequences, args.warm_up = 2, 256, 4, 1
    return args


if __name__ == "__main__":
    main()
