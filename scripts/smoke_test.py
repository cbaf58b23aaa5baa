"""Two ranks train, save and load with the installed package: torchrun --nproc-per-node 2
smoke_test.py.

Equal to the bit to torch's own AdamW on the sum of both ranks' gradients, which are exact; started
by release.sh in an environment that has the package and torch alone.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import megatron_distopt

STEPS, SAVED_AT = 4, 2


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Of small integers, so that sums do not depend on their order."""
    return (torch.arange(32) % 5 + step + rank).float().view(4, 8)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ours, alone = model_of(), model_of()
    optimizer = megatron_distopt.distribute(ours, torch.optim.AdamW(ours.parameters(), lr=2.0**-6))
    reference = torch.optim.AdamW(alone.parameters(), lr=2.0**-6, fused=True)
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    for step in range(STEPS):
        ours(batch_of(step, rank)).sum().backward()
        sum(alone(batch_of(step, each)).sum() for each in range(world)).div(world).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        if step + 1 == SAVED_AT:
            optimizer.save(folders[0])
            weights = [param.detach().clone() for param in ours.parameters()]
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    apart = max((one - two).abs().max().item() for one, two in pairs)
    if apart > 2.0**-20:  # the gradients of a sum over both batches are added up in another order
        raise SystemExit(f"rank {rank}: {apart} apart from torch's AdamW")
    optimizer.load(folders[0])
    if not all(map(torch.equal, ours.parameters(), weights)):
        raise SystemExit(f"rank {rank}: a loaded checkpoint has other weights")
    if rank == 0:
        print(
            f"two ranks trained with {Path(megatron_distopt.__file__).parent} and torch "
            f"{torch.__version__}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
