"""Lightning: automatic optimization, accumulation, clipping and a scheduler by the Trainer,
checkpoints of the Trainer.

    torchrun --nproc-per-node 2 examples/recipes/lightning_module.py

Lightning wraps the model in DistributedDataParallel, which averages gradients: so
`gradient_clip_val` works as always. It calls `consolidate_state_dict` by itself before it saves a
checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import megatron_distopt


class Model(lightning.LightningModule):
    """A small one with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Called when the process group is there and the model is on its device, so `distribute`
        belongs here."""
        adamw = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        optimizer = megatron_distopt.distribute(self, adamw)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def dataset() -> TensorDataset:
    """Put your own here."""
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.cumsum(1).sin())


def train(folder: Path, epochs: int = 2, resume: Path | None = None) -> list[float]:
    """Trains up to an epoch, writes `last.ckpt`, and returns the losses of this process."""
    lightning.seed_everything(0, verbose=False)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # torchrun's --nproc-per-node
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, DataLoader(dataset(), batch_size=8), ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return model.losses


if __name__ == "__main__":
    train(Path("runs/lightning"))
    torch.distributed.destroy_process_group()
