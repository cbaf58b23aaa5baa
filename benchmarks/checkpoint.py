"""How long saving and loading the optimizer state takes, beside what a user would use instead.

    python benchmarks/checkpoint.py [--sizes 50 150 500] [--ranks 2 4] [--quick] [--folder DIR]
    [--json FILE]

Sizes are millions of elements: bf16 params, an fp32 main param and two moments each. All
contestants hold the same state and run one after the other in the same processes, round after
round. benchmarks/README.md says how every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import peers.environment  # noqa: F401 - before torch
from peers.checkpoint_readings import CheckpointReading, lines, read, summary, touch_free_memory
from peers.ranks import log, run_on_ranks
from peers.script import conclude, parser_of
from peers.state import Setting

#: 12 * HIDDEN**2 + 13 * HIDDEN elements a layer.
HIDDEN, HIDDEN_QUICK = 1024, 512
#: Many times the state of the quick form.
TOUCHED_QUICK_NBYTES = 1 << 29
#: Its save takes many times as long as any other, and it cannot load.
LEFT_OUT_QUICK = ("megatron-core fully_reshardable",)


def main() -> None:
    args = parse_args()
    touch_free_memory(TOUCHED_QUICK_NBYTES if args.quick else sys.maxsize)
    readings, failures = list[CheckpointReading](), list[str]()
    with tempfile.TemporaryDirectory(prefix="checkpoint_benchmark_", dir=args.folder) as scratch:
        for size, number in itertools.product(args.ranks, range(len(args.sizes))):
            folder = Path(scratch) / f"{size}_ranks_{number}"
            folder.mkdir()
            # New processes for every size: peers leave memory behind. Not daemons: megatron-core
            # starts more.
            logged, why = run_on_ranks(run, size, args, number, folder, daemon=False, minutes=60)
            readings += [CheckpointReading(**entry) for entry in logged]
            failures += [f"{args.sizes[number]} M: {why}"] if why else []
    found, where = summary(readings), file_system(args.folder or Path(tempfile.gettempdir()))
    result = {"file_system": where, "failures": failures, "ratios": found, "readings": readings}
    conclude(args, result, [*failures, *lines(found)])


def run(
    rank: int, size: int, path: Path, args: argparse.Namespace, number: int, folder: Path
) -> None:
    """On every rank: a round that is not counted, then rounds over all contestants, each begun by
    another one."""
    # In the ranks alone: they import all peers.
    from peers.checkpoint_contestants import ASYNC, GATHERED, SYNC, UNDISTRIBUTED
    from peers.checkpoint_peers import DP_RESHARDABLE, FULLY_RESHARDABLE, ZERO_1

    left_out = LEFT_OUT_QUICK if args.quick else ()
    everyone = (SYNC, GATHERED, ASYNC, UNDISTRIBUTED, DP_RESHARDABLE, FULLY_RESHARDABLE, ZERO_1)
    names = args.contestants or [entry.name for entry in everyone if entry.name not in left_out]
    entries = [entry for entry in everyone if entry.name in names]
    hidden = HIDDEN_QUICK if args.quick else HIDDEN
    layers = max(round(args.sizes[number] * 1e6 / (12 * hidden**2 + 13 * hidden)), 1)
    setting = Setting(layers, hidden, rank, size)
    for entry in entries:
        read(entry, setting, folder, -1)
    for turn in range(args.rounds[0 if len(args.rounds) == 1 else number]):
        for entry in (*entries[turn % len(entries) :], *entries[: turn % len(entries)]):
            reading = read(entry, setting, folder, turn)
            log(reading, path)
            if rank == 0:
                seconds = reading.save_seconds, reading.disk_seconds, reading.load_seconds
                print(
                    f"{size} ranks  round {turn}  {entry.name:32} {seconds} {reading.why_not}",
                    file=sys.stderr,
                )


def file_system(folder: Path) -> str:
    """Device and type of the mount that holds a folder."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind = max(inside, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "6 million elements, 2 ranks, 2 rounds, one peer less")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[50, 150, 500], help="millions of elements"
    )
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[3, 3, 1], help="of each size, or of all"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="data-parallel ranks")
    parser.add_argument(
        "--folder", type=Path, help="where to write; the system's folder for temporary files"
    )
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.ranks = [6], [2], [2]
    if len(args.rounds) not in (1, len(args.sizes)):
        parser.error(
            f"--rounds has {len(args.rounds)} numbers. Write 1 or {len(args.sizes)} of them, as "
            "--sizes."
        )
    return args


if __name__ == "__main__":
    main()
