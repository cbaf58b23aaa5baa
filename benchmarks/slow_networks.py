"""How long a training step takes between nodes on a slow network, by what gradients are sent in.

    sudo -E python benchmarks/slow_networks.py [--rates 1 5 25] [--local-sizes 2 1] [--quick]
    [--json FILE] python benchmarks/slow_networks.py --conversion [--device DEVICE]     only what a
    core, or a device, needs to write
                                                                          and read an element

Two nodes are network namespaces of this machine, joined by a pair of virtual interfaces whose rate
is limited, with two ranks each, and then with one. In each round every contestant trains some steps
at every rate. Needs Linux, root, ip and tc (iproute2); the namespaces are removed at the end,
however it comes. benchmarks/README.md says how every figure is read, and docs/overlap.md what came
out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
import torch
from overlap import LostError, ask, probe
from peers.crew import Crew, Member
from peers.namespaces import NUM_ENDS, Link, join, why_not
from peers.overlap_readings import name_of
from peers.report import table
from peers.script import conclude, parser_of
from peers.train_contestants import BF16, FP32, INT8, REDUCING_ENTRIES
from peers.train_readings import TrainReading, losses_apart

from megatron_distopt.comm.codes import AsCodes, stretches_of
from megatron_distopt.comm.pairwise import AsNumbers
from megatron_distopt.layout import ParamSpec, lay_out
from megatron_distopt.layout.buckets import BLOCK_NUMEL

STORE_PORT = 29500
NAMES = [entry.name for entry in REDUCING_ENTRIES]
#: Of the largest tensor after which glibc keeps what is freed.
_FREED_NBYTES = 31 << 20
MODEL = ("layers", "hidden", "vocabulary", "sequence", "sequences", "bucket_size")
#: At 1 Gbit/s and two ranks a node: how many times as fast as these INT8 has to be.
GOALS = {FP32: 1.7, BF16: 1.25}
_HEADER = (
    "",
    "s a step",
    "quartiles",
    "over int8's",
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
    if args.conversion:
        print("\n".join(conversion(torch.device(args.device))))
        return
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
    """Of one rate and one number of ranks a node; a ratio is that of a step to the median of int8's
    in its round."""
    own = [
        each.reading
        for each in readings
        if (each.gigabits, each.local_size) == (gigabits, local_size)
    ]
    middles = {
        each.round: statistics.median(each.seconds)
        for each in own
        if each.contestant == INT8 and each.seconds
    }
    contestants = dict[str, Any]()
    for name in dict.fromkeys(each.contestant for each in own):
        found = [each for each in own if each.contestant == name]
        timed = [each for each in found if each.seconds and each.round in middles]
        contestants[name] = {"why_not": next((each.why_not for each in found if each.why_not), "")}
        if timed:
            contestants[name] |= {
                "seconds": quartiles([step for each in timed for step in each.seconds]),
                "over int8's": quartiles(
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
                for figure in (values["seconds"], values["over int8's"]):
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
            ratio = each["contestants"][name].get("over int8's", {"median": 0.0})["median"]
            yield (
                f"goal: {name} takes at least {goal} times as long as {INT8}; "
                f"{'met' if ratio >= goal else 'NOT met'}"
            )


def conversion(device: torch.device, repeats: int = 30) -> Iterator[str]:
    """The fastest of several repeats, of one thread or of a device."""
    numel = 1 << 20 if device.type == "cpu" else 1 << 27
    torch.set_num_threads(1)
    # as a training does; without it each message is new memory
    torch.zeros(_FREED_NBYTES, dtype=torch.uint8)

    def clock() -> float:
        if device.type == "cpu":
            return time.thread_time()
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    layout = lay_out([ParamSpec("weight", 2 * numel)], num_shards=2, alignment_numel=BLOCK_NUMEL)
    coded = AsCodes(stretches_of(layout, 0, frozenset(["weight"])), step=1, node=0)
    chunk, values, into = (
        slice(0, numel),
        torch.randn(numel, device=device),
        torch.zeros(numel, device=device),
    )

    def fastest(act: Callable[[AsNumbers], object], form: AsNumbers) -> float:
        taken = []
        for _ in range(repeats):
            start = clock()
            act(form)
            taken.append(clock() - start)
        return min(taken) * 1e9 / numel

    for name, form in (("bfloat16", AsNumbers(torch.bfloat16)), ("int8", coded)):
        message = form.write(values, 0, chunk)
        written = fastest(lambda form: form.write(values, 0, chunk), form)
        read = fastest(lambda form, message=message: into.add_(form.read(message, 0, chunk)), form)  # type: ignore[misc]
        yield f"{name}: {written:.3g} ns an element to write, {read:.3g} to read and add"


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "a small model, 1 Gbit/s, 2 nodes of 2, 2 rounds")
    parser.add_argument(
        "--conversion", action="store_true", help="only ns an element to write and read"
    )
    parser.add_argument("--device", default="cpu", help="with --conversion: one that torch knows")
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
        name for name in NAMES if name in (args.contestants or NAMES) or name in (FP32, BF16, INT8)
    ]
    if args.quick:
        args.rates, args.local_sizes, args.rounds, args.hidden = [1.0], [2], 2, 128
    return args


if __name__ == "__main__":
    main()
