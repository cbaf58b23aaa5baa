"""HuggingFace Trainer: a small GPT-2 with random weights, clipping by the Trainer, checkpoints that
it resumes from.

    torchrun --nproc-per-node 2 examples/recipes/huggingface_trainer.py

The Trainer wraps the model in DistributedDataParallel, which averages gradients: so its
`max_grad_norm` works as always. `Distributed` is all that a program needs of this page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import megatron_distopt


class Distributed(Trainer):
    """A Trainer whose optimizer is distributed. `optim` and its options in TrainingArguments mean
    what they mean."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As the Trainer does it, for a model that is on its device."""
        if self.optimizer is None:
            adamw = super().create_optimizer(*args, **kwargs)
            self.optimizer = megatron_distopt.distribute(self.model, adamw)
            self.add_callback(WholeState(self.optimizer))
        return self.optimizer


class WholeState(TrainerCallback):
    """The Trainer saves what rank 0 has. This makes it the state of all ranks; without it saving is
    refused.

    Args:
        optimizer: what `distribute` returned.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """On all ranks."""
        if control.should_save:
            self.optimizer.consolidate_state_dict()

    on_epoch_end = on_step_end


def dataset() -> list[dict[str, Tensor]]:
    """Put your own here."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 64, (64, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder: Path, max_steps: int = 8, resume: str | None = None) -> list[float]:
    """Trains up to a step and returns the losses and gradient norms that the Trainer logged."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = Distributed(model=GPT2LMHeadModel(config), args=arguments, train_dataset=dataset())
    trainer.train(resume_from_checkpoint=resume)
    return [
        entry[key]
        for entry in trainer.state.log_history
        for key in ("loss", "grad_norm")
        if key in entry
    ]


if __name__ == "__main__":
    train(Path("runs/trainer"))
    torch.distributed.destroy_process_group()
