"""How long saving and loading the optimizer state takes, beside what a user would use instead.

    python benchmarks/checkpoint.py [--sizes 50 150 500] [--ranks 2 4] [--quick] [--folder DIR] [--json FILE]

Sizes are millions of elements: bf16 params, an fp32 main param and two moments each. All contestants hold the same
state and run one after the other in the same processes, round after round. benchmarks/README.md says how every
figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]
# Of the ranks, too. Warnings of the peers are about the CPU and about their own imports.
os.environ.update(PYTHONWARNINGS="ignore", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch  # noqa: E402 - DeepSpeed reads its variable when it is imported
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from peers import machine, ranks  # noqa: E402
from peers.measuring import Reading, read, touch_free_memory  # noqa: E402
from peers.report import lines_of, result_of  # noqa: E402
from peers.state import Setting  # noqa: E402

#: 12 * HIDDEN**2 + 13 * HIDDEN elements a layer.
HIDDEN, HIDDEN_QUICK = 1024, 512
#: Many times the state of the quick form.
TOUCHED_QUICK_NBYTES = 1 << 29
TIME_LIMIT = timedelta(hours=1)
#: Its save takes many times as long as any other, and it cannot load.
LEFT_OUT_QUICK = ("megatron-core fully_reshardable",)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the ranks do."""

    layers: int  # of the model
    hidden: int  # its width
    rounds: int  # over all contestants
    names: tuple[str, ...]  # of the contestants; all but those left out where there is none
    left_out: tuple[str, ...]  # names, too
    folder: Path  # where to write
    log: Path  # a line for every reading, so that a rank that is killed takes nothing with it


def main() -> None:
    args = parse_args()
    start = time.monotonic()
    touch_free_memory(TOUCHED_QUICK_NBYTES if args.quick else sys.maxsize)
    with tempfile.TemporaryDirectory(prefix="checkpoint_benchmark_", dir=args.folder) as scratch:
        log, failures = Path(scratch) / "readings.jsonl", []
        log.touch()
        for size, number in itertools.product(args.ranks, range(len(args.sizes))):
            folder = Path(scratch) / f"{size}_ranks_{number}"
            folder.mkdir()
            try:
                # New processes for every size: peers leave memory behind. Not daemons: megatron-core starts more.
                mp.spawn(run, (size, plan_of(args, number, folder, log)), nprocs=size, daemon=False)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                failures.append(f"{size} ranks, {args.sizes[number]} M: {error}")
                print(failures[-1], file=sys.stderr)
        readings = [Reading(**json.loads(line)) for line in log.read_text().splitlines()]
        result = {**about(args, time.monotonic() - start), "failures": failures, **result_of(readings)}
    for line in lines_of(result):
        print(line)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def plan_of(args: argparse.Namespace, number: int, folder: Path, log: Path) -> Plan:
    """Of one of the sizes."""
    hidden = HIDDEN_QUICK if args.quick else HIDDEN
    layers = max(round(args.sizes[number] * 1e6 / (12 * hidden**2 + 13 * hidden)), 1)
    rounds = args.rounds[0 if len(args.rounds) == 1 else number]
    left_out = LEFT_OUT_QUICK if args.quick else ()
    return Plan(layers, hidden, rounds, tuple(args.contestants), left_out, folder, log)


def is_wanted(name: str, plan: Plan) -> bool:
    return name in plan.names if plan.names else name not in plan.left_out


def run(rank: int, size: int, plan: Plan) -> None:
    """On every rank: a round that is not counted, then rounds over all contestants, each begun by another one."""
    import peers.table  # in the ranks alone: it imports all peers

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    store = dist.FileStore(str(plan.folder.with_suffix(".store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIME_LIMIT)
    entries = [entry for entry in peers.table.ENTRIES if is_wanted(entry.name, plan)]
    setting = Setting(plan.layers, plan.hidden, rank, size)
    for entry in entries:
        read(entry, setting, plan.folder, -1)
    for number in range(plan.rounds):
        for entry in (*entries[number % len(entries) :], *entries[: number % len(entries)]):
            log(read(entry, setting, plan.folder, number), plan.log)
    dist.destroy_process_group()


def log(reading: Reading, path: Path) -> None:
    ranks.log(reading, path)
    if dist.get_rank() == 0:
        seconds = " ".join(
            "     -" if value is None else f"{value:6.2f}"
            for value in (reading.save_seconds, reading.disk_seconds, reading.load_seconds)
        )
        line = f"{reading.ranks} ranks {reading.numel / 1e6:4.0f} M  round {reading.round}  {reading.contestant:32}"
        print(f"{line} {seconds}  {reading.why_not}", file=sys.stderr, flush=True)


def about(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Hardware, versions and command."""
    known: dict[str, Any] = machine.about(args.load_before, seconds)
    disk = file_system(args.folder or Path(tempfile.gettempdir()))
    return {**known, "machine": {**known["machine"], "file_system": disk}}


def file_system(folder: Path) -> str:
    """Device and type of the mount that holds a folder."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind = max(inside, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[50, 150, 500], help="millions of elements")
    parser.add_argument("--rounds", type=int, nargs="+", default=[3, 3, 1], help="of each size, or of all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="data-parallel ranks")
    parser.add_argument("--contestants", nargs="+", default=[], help="names; all where left out")
    parser.add_argument("--quick", action="store_true", help="6 million elements, 2 ranks, 2 rounds, one peer less")
    parser.add_argument("--folder", type=Path, help="where to write; the system's folder for temporary files")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    args.load_before = os.getloadavg()
    if args.quick:
        args.sizes, args.rounds, args.ranks = [6], [2], [2]
    if len(args.rounds) not in (1, len(args.sizes)):
        parser.error(f"Invalid --rounds: {len(args.rounds)} numbers. Must be 1 or {len(args.sizes)}, as --sizes.")
    return args


if __name__ == "__main__":
    main()
