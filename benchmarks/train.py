"""How long whole training steps take, beside what a user would use instead.

    python benchmarks/train.py [--ranks 2 4] [--rounds 5] [--layers 6] [--hidden 512] [--quick] [--json FILE]
                               [--plot FILE]

A small transformer in bf16 with fp32 main params: forward, backward, reduce, clip, step, gather, over gloo. All
contestants train the same model on the same data and run one after the other in the same processes, round after round.
benchmarks/README.md says how every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
from peers.machine import about
from peers.overlap_contestants import overlap_entries
from peers.plot import Drawing
from peers.plot_training import draw_train
from peers.ranks import log, run_on_ranks
from peers.ratios import Spread, over, spread
from peers.script import add_training, parser_of, pick, settings_of, table, write
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import Pace, TrainReading, read
from peers.transformer import TrainSetting

from megatron_distopt.comm import shared_memory

#: So that imports, first allocations and first connections are over before anything is timed.
WARM_UP = Pace(1, 1, 1)
#: Largest relative difference of any loss from ours. All compute in bf16, those with fp32 params cast at other places:
#: up to 2e-4. Without clipping it is 2e-3 after six steps, with params gathered at every other step 1e-2.
TOLERANCE = 1e-3


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw_train):
        return
    pick(overlap_entries(args.ours), args.contestants)
    start = time.monotonic()
    found, failures = [], []
    for ranks in args.ranks:
        logged, why = run_on_ranks(run, ranks, args)
        readings = [TrainReading(**{**entry, "seconds": tuple(entry["seconds"])}) for entry in logged]
        failures += [why] if why else []
        found += [summary(readings)] if readings else []
    result = {**about(args.load_before, time.monotonic() - start), "settings": settings_of(args), "ranks": found}
    write({**result, "failures": failures}, args.json)
    drawing.of_result(draw_train, result)
    for line in (*lines(found), *failures):
        print(line)


def run(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """On every rank: a warm-up of every contestant with a small model, then rounds over them."""
    if args.messages:
        shared_memory.may_share_memory = lambda: False
    entries = pick(overlap_entries(args.ours), args.contestants)
    setting = TrainSetting(
        args.layers, args.hidden, args.vocabulary, args.sequence, args.sequences, args.bucket_numel, rank, size
    )
    pace = Pace(2, args.blocks, args.steps)
    for entry in (FORWARD_BACKWARD, *entries):
        read(entry, replace(setting, layers=1, hidden=128), WARM_UP, -1)
    for number in range(args.rounds):
        for entry in (FORWARD_BACKWARD, *entries):
            reading = read(entry, setting, pace, number)
            log(reading, path)
            if rank == 0:
                print(
                    f"{size} ranks  round {number}  {entry.name:28} {reading.why_not or spread(reading.seconds)}",
                    file=sys.stderr,
                )


def summary(readings: Sequence[TrainReading]) -> dict[str, Any]:
    """Of one number of ranks; ratios first."""
    names = list(dict.fromkeys(reading.contestant for reading in readings))
    rounds = {name: [r for r in readings if r.contestant == name] for name in names}
    seconds = {name: [statistics.median(r.seconds) for r in found if r.seconds] for name, found in rounds.items()}
    alone = seconds[FORWARD_BACKWARD.name]
    beyond = {name: [max(s - a, 0.0) for s, a in zip(values, alone, strict=False)] for name, values in seconds.items()}
    trained = names[1:]
    return {
        "ranks": readings[0].ranks,
        "numel": readings[0].numel,
        "peer / ours": {name: over(seconds[name], seconds["ours"]) for name in trained if name != "ours"},
        "beyond forward and backward, peer / ours": {
            name: over(beyond[name], beyond["ours"]) for name in trained if name != "ours"
        },
        "seconds": {name: spread([s for r in rounds[name] for s in r.seconds]) for name in names},
        "cpu_seconds": {name: spread([r.cpu_seconds for r in rounds[name] if r.seconds]) for name in names},
        "sent_nbytes_an_element": {
            name: spread([r.sent_nbytes / r.numel for r in rounds[name] if r.seconds]) for name in names
        },
        "loss_deviation": {name: deviation(rounds[name], rounds["ours"]) for name in trained},
        "last_loss": {name: rounds[name][0].losses[-1] for name in trained if rounds[name][0].losses},
        "why_not": {name: rounds[name][0].why_not for name in names if rounds[name][0].why_not},
        "readings": readings,
    }


def deviation(peer: Sequence[TrainReading], ours: Sequence[TrainReading]) -> float | None:
    """The largest relative difference of any loss in any round."""
    pairs = [
        pair for one, other in zip(peer, ours, strict=False) for pair in zip(one.losses, other.losses, strict=False)
    ]
    return max((abs(one / other - 1.0) for one, other in pairs), default=None)


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    for ranks in found:
        yield ""
        yield f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements"
        header = ("", "peer / ours", "beyond fwd+bwd", "ms a step", "cpu ms", "sent B/element", "loss apart", "")
        yield from table(header, [row(name, ranks) for name in ranks["seconds"]])
    yield ""
    yield "; ".join(last_words(ranks) for ranks in found) or "nothing was run"


def row(name: str, ranks: dict[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = ranks["seconds"][name]
    if seconds is None:
        return (name, "-", "-", "-", "-", "-", "-", ranks["why_not"].get(name, ""))
    off = ranks["loss_deviation"].get(name)
    note = "" if off is None or off <= TOLERANCE else f"NOT THE SAME WORK: losses differ by more than {TOLERANCE:.1%}"
    beyond = ranks["beyond forward and backward, peer / ours"].get(name)
    return (
        name,
        str(ranks["peer / ours"].get(name) or ""),
        "" if beyond is None else f"{beyond.median:.2f}",
        str(seconds.times(1e3)),
        f"{ranks['cpu_seconds'][name].median * 1e3:.0f}",
        f"{ranks['sent_nbytes_an_element'][name].median:.2f}",
        "" if off is None else f"{off:.1e}",
        note,
    )


def last_words(ranks: dict[str, Any]) -> str:
    ratios = [f"{name}/ours {ratio.median:.2f}" for name, ratio in ranks["peer / ours"].items() if ratio]
    return f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.0f} M: " + ", ".join(ratios)


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = parser_of(__doc__, "a smaller model, 2 ranks, 2 rounds")
    add_training(parser, layers=6, hidden=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=3, help="timed blocks of steps in a round")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=64, help="tokens")
    parser.add_argument("--sequences", type=int, default=1, help="of a rank's microbatch")
    text = "ours sends messages, as it does between machines, and shares no memory"
    parser.add_argument("--messages", action="store_true", help=text)
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.rounds, args.blocks, args.steps, args.layers = [2], 2, 2, 2, 2
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
