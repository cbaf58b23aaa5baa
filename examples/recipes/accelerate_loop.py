"""HuggingFace Accelerate: accumulation, clipping by Accelerate, a scheduler, `save_state` and
`load_state`.

    torchrun --nproc-per-node 2 examples/recipes/accelerate_loop.py

Accelerate wraps the model in DistributedDataParallel, which averages gradients: so
`accelerator.clip_grad_norm_` works as always. `distribute` comes before `prepare`, and `save_state`
needs one line of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import megatron_distopt


def dataset() -> TensorDataset:
    """Put your own here."""
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.cumsum(1).sin())


def train(folder: Path, epochs: int = 2) -> list[float]:
    """Trains, goes back to the checkpoint of the first epoch, trains on, and returns the losses of
    this process."""
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(accelerator.device)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    distributed = megatron_distopt.distribute(model, adamw)
    scheduler = torch.optim.lr_scheduler.LinearLR(distributed, total_iters=100)
    loader = DataLoader(dataset(), batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, distributed, loader, scheduler)
    # save_state writes what rank 0 has. This makes it the state of all ranks; without it save_state
    # is refused.
    accelerator.register_save_state_pre_hook(lambda *_: distributed.consolidate_state_dict())

    losses = []
    for epoch in range(epochs + 1):
        if epoch == 1:
            accelerator.save_state(str(folder))
        if epoch == epochs:
            accelerator.load_state(str(folder))
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.print(f"epoch {epoch} loss {sum(losses[-len(loader) :]) / len(loader):.4f}")
    return losses


if __name__ == "__main__":
    train(Path("runs/accelerate"))
    torch.distributed.destroy_process_group()
