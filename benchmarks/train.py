"""How long whole training steps take, beside what a user would use instead.

    python benchmarks/train.py [--ranks 2 4] [--rounds 5] [--layers 6] [--hidden 512] [--quick]
    [--json FILE]

A small transformer in bf16 with fp32 main params: forward, backward, reduce, clip, step, gather,
over gloo. All contestants train the same model on the same data and run one after the other in the
same processes, round after round. benchmarks/README.md says how every figure is read, and what came
out.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import peers.environment  # noqa: F401 - before torch
from peers.ranks import log, run_on_ranks
from peers.report import spread
from peers.script import add_training, conclude, parser_of, pick
from peers.train_contestants import FORWARD_BACKWARD, train_entries
from peers.train_readings import WARM_UP, Pace, TrainReading, lines, read, summary
from peers.transformer import TrainSetting


def main() -> None:
    args = parse_args()
    pick(train_entries(args.ours), args.contestants)
    found, failures = [], []
    for ranks in args.ranks:
        logged, why = run_on_ranks(run, ranks, args)
        readings = [
            TrainReading(**{**entry, "seconds": tuple(entry["seconds"])}) for entry in logged
        ]
        failures += [why] if why else []
        found += [summary(readings)] if readings else []
    conclude(args, {"ranks": found, "failures": failures}, [*failures, *lines(found)])


def run(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """On every rank: a warm-up of every contestant with a small model, then rounds over them."""
    if args.messages:
        os.environ["MEGATRON_DISTOPT_SHARED_MEMORY"] = "no"
    entries = pick(train_entries(args.ours), args.contestants)
    setting = TrainSetting(
        args.layers,
        args.hidden,
        args.vocabulary,
        args.sequence,
        args.sequences,
        args.bucket_size,
        rank,
        size,
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
                    f"{size} ranks  round {number}  {entry.name:28} "
                    f"{reading.why_not or spread(reading.seconds)}",
                    file=sys.stderr,
                )


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "a smaller model, 2 ranks, 2 rounds")
    add_training(parser, layers=6, hidden=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=3, help="timed blocks of steps in a round")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=64, help="tokens")
    parser.add_argument("--sequences", type=int, default=1, help="of a rank's microbatch")
    text = "ours sends messages, as it does between machines, in all of its forms"
    parser.add_argument("--messages", action="store_true", help=text)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.rounds, args.blocks, args.steps, args.layers = [2], 2, 2, 2, 2
    return args


if __name__ == "__main__":
    main()
