"""How long a training step takes between nodes on a slow network, by what gradients are sent in.

    sudo -E python benchmarks/slow_networks.py [--rates 1 5 25] [--local-sizes 2 1] [--quick]
    [--json FILE]

Two nodes are network namespaces of this machine, joined by a pair of virtual interfaces whose rate
is limited, with two ranks each, and then with one. In each round every contestant trains some steps
at every rate. Needs Linux, root, ip and tc (iproute2); the namespaces are removed at the end,
however it comes. benchmarks/README.md says how every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
from overlap import LostError, ask, probe
from peers.crew import Crew, Member
from peers.namespaces import NUM_ENDS, Link, join, why_not
from peers.overlap_readings import name_of
from peers.report import table
from peers.script import conclude, parser_of
from peers.train_contestants import BF16, FP32, REDUCING_ENTRIES
from peers.train_readings import TrainReading, losses_apart

STORE_PORT = 29500
NAMES = [entry.name for entry in REDUCING_ENTRIES]
MODEL = ("layers", "hidden", "vocabulary", "sequence", "sequences", "bucket_size")
#: At 1 Gbit/s and two ranks a node: how many times as fast as this BF16 has to be.
GOALS = {FP32: 1.5}
_HEADER = (
    "",
    "s a step",
    "quartiles",
    "over bf16's",
    "quartiles",
    "MB of a node",
    "B/element",
    "losses",
    "",
)


@dataclass(frozen=True)
class NodeReading:
    """What one contestant took in one round, at one rate, with so many ranks a node."""

    gigabits: float
    local_size: int
    reading: TrainReading  # its bytes are those of a node


def main() -> None:
    args = parse_args()
    if refusal := why_not("python " + " ".join(sys.argv)):
        print(refusal, file=sys.stderr)
        raise SystemExit(2)
    readings, reached, failures = list[NodeReading](), dict[float, float](), list[str]()
    with join() as link:
        for local_size in args.local_sizes:
            try:
                with crew_of(link, local_size, args) as crew:
                    for name in args.contestants:  # once with a small model
                        ask(crew, name, -1, args)
                    reached |= {rate: probe(crew, link, rate) for rate in args.rates}
                    readings += rounds(crew, link, local_size, args)
            except LostError as error:
                failures.append(f"{local_size} a node ended early: {error}")
    found = [summary(rate, each, readings) for each in args.local_sizes for rate in args.rates]
    result = {
        "reached": reached,
        "failures": failures,
        "settings found": found,
        "readings": readings,
    }
    conclude(args, result, [*failures, *lines([each for each in found if each["numel"]], reached)])


@contextmanager
def crew_of(link: Link, local_size: int, args: argparse.Namespace) -> Iterator[Crew]:
    """So many ranks in each namespace; ended afterwards, at once after an error."""
    members, size = [], local_size * NUM_ENDS
    model = {**{name: getattr(args, name) for name in MODEL}, "computes_in_fp32": True}
    for rank in range(size):
        node = rank // local_size
        place = {
            "rank": rank,
            "size": size,
            "local_size": local_size,
            "interface": link.interface(node),
            "ours": [],
        }
        store = f"tcp://{link.address(0)}:{STORE_PORT + local_size}"
        about = json.dumps({**place, "store": store, "address": link.address(1), "model": model})
        command = link.inside(node, [sys.executable, "-m", "peers.overlap_rank", about])
        members.append(Member(command, {"TORCH_CPP_LOG_LEVEL": "ERROR"}))
    crew = Crew(members, Path(__file__).resolve().parent)
    try:
        yield crew
    except BaseException:
        crew.kill()
        raise
    crew.stop()


def rounds(
    crew: Crew, link: Link, local_size: int, args: argparse.Namespace
) -> Iterator[NodeReading]:
    """Every contestant in each round at each rate."""
    for number in range(args.rounds):
        for gigabits in args.rates:
            link.set_rate(gigabits)
            for name in args.contestants:
                found = ask(crew, name, number, args)[0]  # ranks agree on what they read
                print(
                    f"{local_size} a node, {name_of(gigabits)}, round {number}, {found}",
                    file=sys.stderr,
                )
                yield NodeReading(gigabits, local_size, found)


def quartiles(values: Sequence[float]) -> dict[str, float]:
    lower, median, upper = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": median, "lower": lower, "upper": upper}


def summary(gigabits: float, local_size: int, readings: Sequence[NodeReading]) -> dict[str, Any]:
    """Of one rate and one number of ranks a node; a ratio is that of a step to the median of bf16's
    in its round."""
    own = [
        each.reading
        for each in readings
        if (each.gigabits, each.local_size) == (gigabits, local_size)
    ]
    middles = {
        each.round: statistics.median(each.seconds)
        for each in own
        if each.contestant == BF16 and each.seconds
    }
    contestants = dict[str, Any]()
    for name in dict.fromkeys(each.contestant for each in own):
        found = [each for each in own if each.contestant == name]
        timed = [each for each in found if each.seconds and each.round in middles]
        contestants[name] = {"why_not": next((each.why_not for each in found if each.why_not), "")}
        if timed:
            contestants[name] |= {
                "seconds": quartiles([step for each in timed for step in each.seconds]),
                "over bf16's": quartiles(
                    [step / middles[each.round] for each in timed for step in each.seconds]
                ),
                "sent_nbytes": statistics.median(each.sent_nbytes for each in timed),
                "losses apart": losses_apart(
                    timed, [each for each in own if each.contestant == FP32]
                ),
            }
    numel = own[0].numel if own else 0
    return {
        "gigabits": gigabits,
        "local_size": local_size,
        "numel": numel,
        "contestants": contestants,
    }


def lines(found: Sequence[Mapping[str, Any]], reached: Mapping[float, float]) -> Iterator[str]:
    """A table for each rate and number of ranks a node, and whether the goals are met."""
    for each in found:
        rate, rows = each["gigabits"], list[Sequence[str]]()
        heading = f"{name_of(rate)} ({reached[rate]:.2f} reached), 2 nodes of {each['local_size']}"
        yield from ("", f"{heading}, {each['numel'] / 1e6:.1f} M elements")
        for name, values in each["contestants"].items():
            cells = ["-"] * (len(_HEADER) - 2)
            if "seconds" in values:
                sent, off = values["sent_nbytes"], values["losses apart"]
                cells = []
                for figure in (values["seconds"], values["over bf16's"]):
                    cells += [
                        f"{figure['median']:.3f}",
                        f"{figure['lower']:.3f} to {figure['upper']:.3f}",
                    ]
                cells += [
                    f"{sent / 1e6:.1f}",
                    f"{sent / each['numel']:.2f}",
                    "" if off is None else f"{off:.0e}",
                ]
            rows.append([name, *cells, values["why_not"]])
        yield from table(_HEADER, rows)
        for name, goal in GOALS.items() if (rate, each["local_size"]) == (1, 2) else ():
            ratio = each["contestants"][name].get("over bf16's", {"median": 0.0})["median"]
            yield (
                f"goal: {name} takes at least {goal} times as long as {BF16}; "
                f"{'met' if ratio >= goal else 'NOT met'}"
            )


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "a small model, 1 Gbit/s, 2 nodes of 2, 2 rounds")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 5, 25], help="Gbit/s, 10**9 bits"
    )
    parser.add_argument("--local-sizes", type=int, nargs="+", default=[2, 1], help="ranks a node")
    for name, default, text in (
        ("rounds", 3, "over all contestants and rates"),
        ("warm-up", 2, "steps that are not timed"),
        ("blocks", 3, "of steps that are timed, each by itself"),
        ("steps", 1, "of a block"),
        ("layers", 2, "of the model"),
        ("hidden", 512, "a multiple of 64"),
        ("vocabulary", 1024, "tokens that are known"),
        ("sequence", 16, "tokens"),
        ("sequences", 1, "of a rank's microbatch"),
        ("bucket-size", 1_000_000, "for those that take it"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    args = parser.parse_args()
    if unknown := [name for name in args.contestants if name not in NAMES]:
        parser.error(f"--contestants has {unknown[0]!r}. Write some of {NAMES}.")
    args.contestants = [
        name for name in NAMES if name in (args.contestants or NAMES) or name in (FP32, BF16)
    ]
    if args.quick:
        args.rates, args.local_sizes, args.rounds, args.hidden = [1.0], [2], 2, 128
    return args


if __name__ == "__main__":
    main()
