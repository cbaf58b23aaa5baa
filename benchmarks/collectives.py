"""How fast gradients are added up and params are collected over gloo, from pair to pair and by torch's own collectives.

    python benchmarks/collectives.py [--sizes 1 4 16 64 256] [--ranks 2 4] [--quick] [--json FILE]

Sizes are MB of bucket. All ways run in the same processes, one after the other, round after round; the time is that of
the slowest rank. "ours" is what ranks of one machine do, "messages" what ours does between machines. The last line has
how many times faster than torch's they are from 4 MB up, at the worst and at the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch  # noqa: E402 - it reads the number of threads when it is imported
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from peers.report import Spread, over  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_distopt.comm import Group, collectives, pairwise  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Below it nobody promises anything: latency counts there.
LEAST_MB = 4.0
Way = Callable[[Tensor, Tensor, Group], object]


def by_torch_sum(bucket: Tensor, shard: Tensor, group: Group) -> None:
    collectives._reduce_scatter(shard, bucket, group=group.handle)


def by_torch_gather(bucket: Tensor, shard: Tensor, group: Group) -> None:
    collectives._all_gather(bucket, shard, group=group.handle)


WAYS: dict[str, dict[str, Way]] = {
    "reduce-scatter": {
        "ours": pairwise.reduce_scatter,
        "messages": pairwise.sum_by_messages,
        "torch": by_torch_sum,
    },
    "all-gather": {
        "ours": pairwise.all_gather,
        "messages": pairwise.gather_by_messages,
        "torch": by_torch_gather,
    },
}


def main() -> None:
    args = parse_args()
    results: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (ranks, args.sizes, args.rounds, folder), nprocs=ranks)
            results += json.loads((Path(folder) / "results.json").read_text())
    for each in results:
        print(line_of(each))
    if args.json:
        about = {"command": "python benchmarks/collectives.py " + " ".join(sys.argv[1:]), "torch": torch.__version__}
        load = {"load_before": args.load_before, "cores": os.cpu_count()}
        args.json.write_text(json.dumps({**about, **load, "results": results}, indent=1) + "\n")
    print(summary_of(results))


def run(rank: int, size: int, sizes: list[float], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = Group.of()
    found = [measure(what, name, megabytes, rounds, group) for what in WAYS for name in DTYPES for megabytes in sizes]
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(found, default=dataclasses.asdict))
    dist.barrier()
    dist.destroy_process_group()


def measure(what: str, dtype: str, megabytes: float, rounds: int, group: Group) -> dict[str, Any]:
    """Collective: one warm-up of each way, then rounds."""
    numel = int(megabytes * 1e6) // DTYPES[dtype].itemsize // group.size * group.size
    bucket = torch.ones(numel, dtype=DTYPES[dtype])
    shard = bucket.view(group.size, -1)[group.rank]
    seconds: dict[str, list[float]] = {name: [] for name in WAYS[what]}
    for number in range(rounds + 1):
        for name, way in WAYS[what].items():
            bucket.fill_(1.0)
            took = timed(lambda way=way: way(bucket, shard, group))
            if number:
                seconds[name].append(took)
    about = {"what": what, "dtype": dtype, "ranks": group.size, "megabytes": megabytes, "seconds": seconds}
    return {
        **about,
        "torch / way": {
            name: over(dict(enumerate(seconds["torch"])), dict(enumerate(taken))) for name, taken in seconds.items()
        },
    }


def timed(act: Callable[[], object]) -> float:
    """Collective: seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    act()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def line_of(each: dict[str, Any]) -> str:
    speeds = {name: each["megabytes"] / 1e3 / statistics.median(taken) for name, taken in each["seconds"].items()}
    about = f"{each['what']:<15}{each['dtype']}  {each['ranks']} ranks {each['megabytes']:6.1f} MB"
    parts = [f"{name} {speed:5.2f} GB/s" for name, speed in speeds.items()]
    parts += [f"torch/{name} {Spread(**each['torch / way'][name])}" for name in speeds if name != "torch"]
    return "  ".join([about, *parts])


def summary_of(results: list[dict[str, Any]]) -> str:
    parts = []
    for what, ways in WAYS.items():
        large = [each for each in results if each["what"] == what and each["megabytes"] >= LEAST_MB]
        for name in ways if large else ():
            ratios = [each["torch / way"][name]["median"] for each in large]
            parts += [f"{what} torch/{name} {min(ratios):.2f} to {max(ratios):.2f}"] * (name != "torch")
    return f"from {LEAST_MB:.0f} MB up: " + ", ".join(parts)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 1, 4, 16, 64, 256], help="MB of bucket")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="4 and 16 MB, 3 rounds")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    args.load_before = os.getloadavg()
    if args.quick:
        args.sizes, args.rounds = [4.0, 16.0], 3
    return args


if __name__ == "__main__":
    main()
