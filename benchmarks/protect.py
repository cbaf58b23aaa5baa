"""What snapshots in memory cost a step, and how long it takes to go on from one and from a
checkpoint on disk.

    torchrun --nproc-per-node 2 benchmarks/protect.py

Each rank is a node of its own, with a folder of its own below /dev/shm, so that every snapshot is
sent as well. Blocks of steps with and without snapshots take turns, with the same model and data;
what is printed is the median ratio of neighbouring blocks. At the end of a block with snapshots the
last one is waited for, so that nothing is left to the next block. With `--peer` and lm-resiliency
installed, DistributedDataParallel with torch's AdamW trains the same model with and without its
copies in the memory of a peer, at the same number of steps between two of them; they are of the
whole state of each rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import megatron_distopt


class Training:
    """A stack of linear layers that trains in fp32, whose speed depends less on the processor than
    that of bf16."""

    def __init__(self, width: int, layers: int, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.optimizer = megatron_distopt.distribute(self.model, adamw, **options)
        self.batch, self.step = torch.randn(256, width), 0

    def train(self, steps: int) -> float:
        """Seconds that so many steps take."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.keep_step()
        self.finish()
        dist.barrier()
        return time.perf_counter() - start

    def keep_step(self) -> None:
        if self.optimizer.session.protection is not None:
            self.optimizer.protect(self.step)

    def finish(self) -> None:
        if self.optimizer.session.protection is not None:
            self.optimizer.session.protection.finish()


class PeerTraining(Training):
    """The same with DistributedDataParallel, and with lm-resiliency where `every` is given."""

    def __init__(self, width: int, layers: int, every: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch, self.step, self.every = torch.randn(256, width), 0, every
        if every:
            checkpointing = importlib.import_module("lm_resiliency.checkpointing")
            config = checkpointing.InMemoryCkptConfig(
                interval=every,
                replication_jump=1,
                disk_flush_interval=0,
                disk_folder=tempfile.mkdtemp(),
                run_id="bench",
            )
            self.manager = checkpointing.InMemoryCheckpointManager(config)

    def keep_step(self) -> None:
        if self.every and self.step % self.every == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            self.manager.save(state, self.step)

    def finish(self) -> None:
        if self.every:
            self.manager.finalize_replication()


def ratios_of(
    plain: Training, protected: Training, steps: int, blocks: int
) -> tuple[float, list[float]]:
    """Milliseconds of a step without snapshots, and the ratio of each pair of blocks."""
    pairs = [(plain.train(steps), protected.train(steps)) for _ in range(blocks)]
    without = statistics.median(each for each, _ in pairs)
    return 1e3 * without / steps, [each / before for before, each in pairs]


def timed(call: object) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()  # type: ignore[operator]
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=6, help="pairs of blocks")
    parser.add_argument("--every", type=int, default=100, help="steps between two snapshots")
    parser.add_argument("--peer", action="store_true", help="measure lm-resiliency as well")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    memory = Path("/dev/shm") / f"distopt-bench-{os.environ['TORCHELASTIC_RUN_ID']}"
    folder = str(memory / f"node-{dist.get_rank()}")
    plain = Training(args.width, args.layers)
    protected = Training(args.width, args.layers, protect_every=args.every, protect_folder=folder)
    protected.optimizer.resume()
    plain.train(40)
    protected.train(40)
    chosen = args.every
    steps = max(chosen, 20)
    ours = ratios_of(plain, protected, steps, args.blocks)
    protected.train(chosen)  # of which there is a snapshot
    disk = [tempfile.mkdtemp()]
    dist.broadcast_object_list(disk)
    seconds = {
        "save": timed(lambda: protected.optimizer.save(disk[0])),
        "load": timed(lambda: protected.optimizer.load(disk[0])),
        "resume": timed(protected.optimizer.resume),
    }
    measured = {"ours": ours}
    if args.peer:
        pair = PeerTraining(args.width, args.layers), PeerTraining(args.width, args.layers, chosen)
        ratios_of(*pair, chosen, 1)
        measured["lm-resiliency"] = ratios_of(*pair, steps, args.blocks)
    if dist.get_rank() == 0:
        found = {
            "params": sum(param.numel() for param in plain.model.parameters()),
            "steps between two snapshots": chosen,
            "steps of a block": steps,
            **{f"s, {name}": round(each, 3) for name, each in seconds.items()},
        }
        for name, (milliseconds, ratios) in measured.items():
            found[f"{name}: ms a step without"] = round(milliseconds, 2)
            found[f"{name}: ratio, median and all"] = [
                round(each, 4) for each in (statistics.median(ratios), *ratios)
            ]
        print(json.dumps(found, indent=1))
    dist.barrier()
    for folder_name in (str(memory), disk[0]):
        shutil.rmtree(folder_name, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
