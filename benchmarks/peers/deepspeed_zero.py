"""DeepSpeed's ZeRO stage 1 with its engine's own calls, on its CPU accelerator.

Its first rank writes the bf16 model params, too: 2 bytes an element more than the others write.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from torch import Tensor

from peers.contestant import Contestant, Entry, Memory
from peers.state import Setting, Weights, fill_adam, groups_of, tensors_of_adam, untouched_zeros

_TAG = "saved"
_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
}


class DeepSpeedZero(Contestant):
    """An engine around torch's AdamW."""

    def __init__(self, setting: Setting) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        with untouched_zeros():
            model = Weights(setting)
            adam = torch.optim.AdamW(groups_of(model), lr=1e-3)
            self._engine = deepspeed.initialize(model=model, optimizer=adam, config=_CONFIG)[0]
        fill_adam(self._inner)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._engine.optimizer.optimizer

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=_TAG)

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag=_TAG)

    def tensors(self) -> Iterator[Tensor]:
        return tensors_of_adam(self._inner)

    def close(self) -> None:
        self._engine.destroy()
        self._inner.state.clear()
        del self._engine


def _memory(numel: int, ranks: int) -> Memory:
    """Params twice while they move; every rank reads the files of all."""
    return Memory((4 * ranks + 14) * numel, (14 * ranks + 12) * numel)


ZERO_1 = Entry("deepspeed zero-1", "DeepSpeed's engine.save_checkpoint", DeepSpeedZero, _memory)
