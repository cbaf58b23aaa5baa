"""A plain torch loop: accumulation, clipping, a scheduler, and a checkpoint that loads at any
number of ranks.

    torchrun --nproc-per-node 2 examples/recipes/torch_loop.py --steps 10 --checkpoint runs/loop
    torchrun --nproc-per-node 3 examples/recipes/torch_loop.py --steps 20 --checkpoint runs/loop   #
    goes on at step 10

The model is not wrapped in DistributedDataParallel: `step()` averages gradients over the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_distopt

SAMPLES, MICROBATCHES = 24, 2  # of a step, over all ranks; of a step, on each rank


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step, the same at any number of ranks; put your data loader here."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    return inputs, inputs.cumsum(1).sin()


def train(steps: int, checkpoint: Path) -> list[float]:
    """Trains up to a step and returns the losses, averaged over all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = megatron_distopt.distribute(model, adamw, overlap_grad_reduce=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    first = 0
    if checkpoint.exists():
        optimizer.load(checkpoint / "optimizer")  # the weights come with it
        scheduler.load_state_dict(torch.load(checkpoint / "scheduler.pt"))
        first = scheduler.last_epoch

    losses = []
    for step in range(first, steps):
        parts = [torch.chunk(each.chunk(num_ranks)[rank], MICROBATCHES) for each in batch_of(step)]
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            is_last = number == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else optimizer.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets) / MICROBATCHES
                loss.backward()
            total += loss.detach()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        dist.all_reduce(total)
        losses.append(total.item() / num_ranks)
        if rank == 0:
            print(
                f"step {step} loss {losses[-1]:.4f} norm {norm:.3f} lr "
                f"{scheduler.get_last_lr()[0]:.5f}"
            )

    optimizer.save(checkpoint / "optimizer")  # on all ranks
    if rank == 0:
        torch.save(scheduler.state_dict(), checkpoint / "scheduler.pt")
    dist.barrier()
    return losses


def main() -> None:
    """What torchrun starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/torch_loop"))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")  # "nccl", and a model on its device, where there are GPUs
    train(arguments.steps, arguments.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
