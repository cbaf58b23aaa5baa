"""Whole training steps by megatron-core's and DeepSpeed's distributed optimizers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from peers.adam import ADAM, CLIP_GRAD
from peers.core_optimizer import CoreOptimizer
from peers.state import groups_of
from peers.trainers import Trainer
from peers.transformer import TrainSetting, transformer


class Core(Trainer):
    """megatron-core with both overlaps, around the same module.

    Args:
        setting: of model and data.
        is_fused: see [Note: its Adam] in core_optimizer.py.
    """

    def __init__(self, setting: TrainSetting, *, is_fused: bool = False) -> None:
        self._core = CoreOptimizer(transformer(setting), bucket_size=setting.bucket_size, is_fused=is_fused)

    def train(self, tokens: Tensor) -> Tensor:
        self._core.zero_grad()
        loss = self._core.model(tokens)
        loss.backward()
        self._core.model.finish_grad_sync()
        self._core.optimizer.step()
        return loss.detach()

    def finish(self) -> None:
        self._core.model.start_param_sync(force_sync=True)

    def close(self) -> None:
        self._core.close()


class DeepSpeedZero(Trainer):
    """DeepSpeed's engine with a stage of ZeRO.

    Args:
        setting: of model and data.
        stage: 1 or 2.
        wire: what gradients are reduced in; "fp32" as the others do, or "bf16" as it does where nothing is said.
    """

    def __init__(self, setting: TrainSetting, stage: int, wire: str = "fp32") -> None:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        model = transformer(setting)
        adam = torch.optim.AdamW(groups_of(model), fused=True, **ADAM)
        self._engine = deepspeed.initialize(model=model, optimizer=adam, config=_config(setting, stage, wire))[0]

    def train(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._engine(tokens)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        self._engine.destroy()


def _config(setting: TrainSetting, stage: int, wire: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": setting.sequences,
        "bf16": {"enabled": True},
        "communication_data_type": wire,
        "gradient_clipping": CLIP_GRAD,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": setting.bucket_size,
            "allgather_bucket_size": setting.bucket_size,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
