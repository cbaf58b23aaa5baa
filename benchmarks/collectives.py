"""How fast gradients are added up and params are collected over gloo, from pair to pair and by
torch's own collectives.

    python benchmarks/collectives.py [--sizes 1 4 16 64 256] [--ranks 2 4] [--quick] [--json FILE]

Sizes are MB of bucket. All ways run in the same processes, one after the other, round after round;
the time is that of the slowest rank. "ours" is what ranks of one machine do, "messages" what ours
does between machines. The last line has how many times faster than torch's they are from 4 MB up,
at the worst and at the best.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import peers.environment  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from peers.ranks import exchange, log, now, run_on_ranks
from peers.report import Spread, over, table
from peers.script import conclude, parser_of
from torch import Tensor

from megatron_distopt.comm import Group, collectives, pairwise
from megatron_distopt.comm.group_nodes import alone

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Below it nobody promises anything: latency counts there.
LEAST_MB = 4.0
Way = Callable[[Tensor, Tensor, Group], object]


def by_torch_sum(bucket: Tensor, shard: Tensor, group: Group) -> None:
    getattr(dist, collectives.REDUCE_SCATTER)(shard, bucket, group=group.handle)


def by_torch_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    getattr(dist, collectives.ALL_GATHER)(bucket, shard, group=group.handle)


def between_pairs(collective: Callable[..., None], *, messages: bool = False) -> Way:
    """Ours, in the memory that ranks share or by messages."""

    def act(bucket: Tensor, shard: Tensor, group: Group) -> None:
        collective(bucket, group, alone(group) if messages else None)

    return act


_SUM, _GATHER = pairwise.reduce_scatter, pairwise.all_gather
WAYS: dict[str, dict[str, Way]] = {
    "reduce-scatter": {
        "ours": between_pairs(_SUM),
        "messages": between_pairs(_SUM, messages=True),
        "torch": by_torch_sum,
    },
    "all-gather": {
        "ours": between_pairs(_GATHER),
        "messages": between_pairs(_GATHER, messages=True),
        "torch": by_torch_gather,
    },
}


@dataclass(frozen=True)
class CollectiveReading:
    """One collective of one length."""

    what: str
    dtype: str
    ranks: int
    megabytes: float
    seconds: dict[str, list[float]]  # of the slowest rank, by way and round

    def ratio(self, way: str) -> Spread | None:
        """torch's time over that of a way, in the same rounds."""
        return over(dict(enumerate(self.seconds["torch"])), dict(enumerate(self.seconds[way])))


def main() -> None:
    args = parse_args()
    readings, failures = list[CollectiveReading](), list[str]()
    for ranks in args.ranks:
        logged, why = run_on_ranks(run, ranks, args)
        readings += [CollectiveReading(**entry) for entry in logged]
        failures += [why] if why else []
    conclude(args, {"results": readings, "failures": failures}, [*failures, *lines(readings)])


def run(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    group = Group.of()
    for what in WAYS:
        for dtype in DTYPES:
            for megabytes in args.sizes:
                log(measure(what, dtype, megabytes, args.rounds, group), path)


def measure(
    what: str, dtype: str, megabytes: float, rounds: int, group: Group
) -> CollectiveReading:
    """Collective: one warm-up of each way, then rounds."""
    numel = int(megabytes * 1e6) // DTYPES[dtype].itemsize // group.size * group.size
    bucket = torch.ones(numel, dtype=DTYPES[dtype])
    shard = bucket.view(group.size, -1)[group.rank]
    seconds: dict[str, list[float]] = {name: [] for name in WAYS[what]}
    for number in range(rounds + 1):
        for name, way in WAYS[what].items():
            bucket.fill_(1.0)
            start = now()
            way(bucket, shard, group)
            took = max(exchange(time.perf_counter() - start))
            if number:
                seconds[name].append(took)
    return CollectiveReading(what, dtype, group.size, megabytes, seconds)


def lines(readings: Sequence[CollectiveReading]) -> Iterator[str]:
    """A row a collective; the last line has the least and the most ratio of each way to torch's."""
    header = (
        "GB/s and torch's time / that of a way",
        "ranks",
        "MB",
        "ours",
        "torch / ours",
        "messages",
        "",
        "torch",
        "",
    )
    rows, ratios = [], dict[str, list[float]]()
    for each in readings:
        row = [f"{each.what}, {each.dtype}", f"{each.ranks}", f"{each.megabytes:g}"]
        for way in WAYS[each.what]:
            ratio = each.ratio(way)
            speed = each.megabytes / 1e3 / statistics.median(each.seconds[way])
            row += [f"{speed:.2f}", "" if way == "torch" else str(ratio)]
            if ratio and way != "torch" and each.megabytes >= LEAST_MB:
                ratios.setdefault(f"{each.what} torch/{way}", []).append(ratio.median)
        rows.append(row)
    yield from table(header, rows)
    parts = [f"{name} {min(found):.2f} to {max(found):.2f}" for name, found in ratios.items()]
    yield f"from {LEAST_MB:.0f} MB up: " + ", ".join(parts)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "4 and 16 MB, 3 rounds", has_contestants=False)
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.25, 1, 4, 16, 64, 256], help="MB of bucket"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds = [4.0, 16.0], 3
    return args


if __name__ == "__main__":
    main()
