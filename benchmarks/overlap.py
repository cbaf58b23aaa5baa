"""How much of the communication of a training step is hidden where the network is slower than
memory.

    sudo -E python benchmarks/overlap.py [--rates 1 5 25] [--rounds 3] [--quick] [--json FILE]

Two ranks in two network namespaces of this machine, joined by a pair of virtual interfaces whose
rate is limited. Each contestant of train.py trains at every rate, and once more without any
communication; what a step takes longer is its exposed communication. Needs Linux, root, ip and tc
(iproute2); the namespaces are removed at the end, however it comes. benchmarks/README.md says how
every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
from peers.crew import Crew, Member
from peers.namespaces import NUM_ENDS, Link, join, why_not
from peers.overlap_rank import TIME_LIMIT
from peers.overlap_readings import WiredReading, lines, name_of, slowest, summary
from peers.report import is_ours, spread
from peers.script import conclude, parser_of, pick
from peers.train_contestants import FORWARD, FORWARD_BACKWARD, MESSAGES, train_entries
from peers.train_readings import TrainReading
from peers.trainers import TrainEntry

PROBE_SECONDS = 0.4
STORE_PORT = 29500
MODEL = ("layers", "hidden", "vocabulary", "sequence", "sequences", "bucket_size")
LEFT_OUT_QUICK = (
    "fork of 2023, fused Adam",
    "megatron-core, fused Adam",
    "DeepSpeed ZeRO-1",
    "DeepSpeed ZeRO-2, bf16 wire",
)


def main() -> None:
    args = parse_args()
    entries = picked(args.ours, args.contestants, quick=args.quick)
    refusal = why_not("python " + " ".join(sys.argv))
    if refusal:
        print(refusal, file=sys.stderr)
        raise SystemExit(2)
    readings, reached, failures = list[WiredReading](), dict[float, float](), list[str]()
    with join() as link:
        try:
            with pairs(link, args) as (mute, wired):
                warm_up(entries, (mute, wired), link, args)
                for rate in args.rates:
                    reached[rate] = probe(wired, link, rate)
                for reading in rounds(entries, mute, wired, link, args):
                    readings.append(reading)
                    tell(reading)
        except LostError as error:
            failures = [f"ended early: {error}"]
    rates = [rate for rate in reached if any(each.gigabits == rate for each in readings)]
    found = [summary(rate, readings, reached[rate], os.cpu_count() or 1) for rate in rates]
    result = {
        "link": {"reached": reached},
        "rates": found,
        "failures": failures,
        "readings": readings,
    }
    conclude(args, result, [*failures, *lines(found)])


def picked(ours: Sequence[str], names: Sequence[str], *, quick: bool = False) -> list[TrainEntry]:
    """What `--contestants` names, and this package with and without its overlaps; fewer variants of
    peers if quick.

    In network namespaces of their own ranks do not share memory, so that ours sends messages in any
    case.
    """
    entries = [entry for entry in train_entries(ours) if entry.name != MESSAGES]
    wanted = names or [
        entry.name for entry in entries if not (quick and entry.name in LEFT_OUT_QUICK)
    ]
    return pick(entries, [*wanted, *(entry.name for entry in entries if is_ours(entry.name))])


class LostError(RuntimeError):
    """A rank ended, or did not answer in time."""


def probe(wired: Crew, link: Link, gigabits: float) -> float:
    """What plain TCP reaches at a rate, in Gbit/s, while nothing else runs."""
    link.set_rate(gigabits)
    order = {"probe_seconds": PROBE_SECONDS}
    found: float = max(
        answer["gigabits"] for answer in answers_of(wired, order, "the probe of the link")
    )
    print(f"{name_of(gigabits)}: plain TCP reaches {found:.2f} Gbit/s", file=sys.stderr)
    return found


@contextmanager
def pairs(link: Link, args: argparse.Namespace) -> Iterator[tuple[Crew, Crew]]:
    """Two ranks that do not communicate, and two in the namespaces; ended afterwards, at once after
    an error."""
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
                    about = json.dumps(
                        {**place, "address": link.address(1), "ours": args.ours, "model": model}
                    )
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


def warm_up(
    entries: Sequence[TrainEntry], crews: Sequence[Crew], link: Link, args: argparse.Namespace
) -> None:
    """Every contestant once with a small model."""
    link.set_rate(0.0)
    for entry in entries:
        for crew in crews:
            ask(crew, entry.name, -1, args)


def rounds(
    entries: Sequence[TrainEntry], mute: Crew, wired: Crew, link: Link, args: argparse.Namespace
) -> Iterator[WiredReading]:
    """Rounds over all contestants: without communication, then at each rate."""
    for number in range(args.rounds):
        for entry in (FORWARD, FORWARD_BACKWARD, *entries):
            yield WiredReading(None, 0.0, slowest(ask(mute, entry.name, number, args)))
            for gigabits in args.rates if entry.trains else ():
                link.set_rate(gigabits)
                start, busy = time.monotonic(), busy_seconds()
                answers = ask(wired, entry.name, number, args)
                cores = (busy_seconds() - busy) / (time.monotonic() - start)
                # ranks that communicate agree on what they read
                yield WiredReading(gigabits, cores, answers[0])


def ask(crew: Crew, name: str, number: int, args: argparse.Namespace) -> list[TrainReading]:
    """A reading of each rank."""
    order = {"contestant": name, "number": number, "pace": (args.warm_up, args.blocks, args.steps)}
    return [
        TrainReading(
            **{**found, "seconds": tuple(found["seconds"]), "losses": tuple(found["losses"])}
        )
        for found in answers_of(crew, order, repr(name))
    ]


def answers_of(crew: Crew, order: Mapping[str, Any], what: str) -> list[Any]:
    """By rank.

    Raises:
        LostError: no answer will come.
    """
    answers = crew.ask(order, TIME_LIMIT.total_seconds() + 60)
    lost = [rank for rank, found in enumerate(answers) if found is None]
    if lost:
        how = crew.how_ended(lost[0]) if lost[0] in crew.ended else "no answer in time"
        raise LostError(f"rank {lost[0]} in {what}: {how}")
    return answers


def busy_seconds() -> float:
    """Processor time of the machine since it was started, the kernel's share for the network
    included.

    What the kernel does for a packet when an interrupt arrives belongs to no process; only the
    whole machine shows it.
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle, waiting, stolen = ticks[3], ticks[4], ticks[7]
    return (sum(ticks) - idle - waiting - stolen) / os.sysconf("SC_CLK_TCK")


def tell(each: WiredReading) -> None:
    reading = each.reading
    where = "without communication" if each.gigabits is None else name_of(each.gigabits)
    print(
        f"round {reading.round}  {reading.contestant:28} {where:22} "
        f"{reading.why_not or spread(reading.seconds)}",
        file=sys.stderr,
    )


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "a smaller model, one rate, 2 rounds, fewer variants")
    parser.add_argument(
        "--ours",
        nargs="+",
        default=[],
        help="name=value of DistOptConfig: ours once more with these",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 5, 25], help="Gbit/s, 10**9 bits; 0: no limit"
    )
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
            parser.error(
                f"Invalid {option}: {given}. Must be at least {least}. Write {option} {least} or "
                "more."
            )
    if args.quick:
        args.rates, args.rounds, args.blocks, args.steps = [5.0], 2, 1, 3
        args.layers, args.hidden, args.sequences, args.warm_up = 2, 256, 4, 1
    return args


if __name__ == "__main__":
    main()
