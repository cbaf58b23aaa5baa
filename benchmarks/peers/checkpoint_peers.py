"""Saving and loading by megatron-core and by DeepSpeed, on a CPU. Importing it imports both."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from peers.checkpoint_contestants import Contestant, Entry, Memory
from peers.core_optimizer import CoreOptimizer
from peers.state import Setting, Weights, fill_adam, groups_of, tensors_of_adam, untouched_zeros

#: Elements: what megatron-core takes where nothing is said.
_BUCKET_SIZE = 40_000_000
_TAG = "saved"


class MegatronCore(Contestant):
    """Its distributed optimizer and dist_checkpointing.

    The save is what Megatron-LM does by default: torch_dist, spread over the data-parallel ranks.

    Args:
        setting: of the state.
        sharding: `distrib_optim_sharding_type`.
    """

    def __init__(self, setting: Setting, sharding: str) -> None:
        self._metadata = {"distrib_optim_sharding_type": sharding}
        with untouched_zeros():
            self._core = CoreOptimizer(_Weights(setting), bucket_size=_BUCKET_SIZE)
        fill_adam(self._inner)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._core.optimizer.chained_optimizers[0].optimizer

    def save(self, folder: Path) -> None:
        state = {"optimizer": self._sharded_state(is_loading=False)}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
        dist_checkpointing.save(state, str(folder), strategy)

    def load(self, folder: Path) -> None:
        state = {"optimizer": self._sharded_state(is_loading=True)}
        self._core.optimizer.load_state_dict(
            dist_checkpointing.load(state, str(folder))["optimizer"]
        )

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        model_state = self._core.model.sharded_state_dict()
        return self._core.optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=self._metadata
        )

    def tensors(self) -> Iterator[Tensor]:
        return tensors_of_adam(self._inner)

    def close(self) -> None:
        self._inner.state.clear()
        self._core.close()


class _Weights(MegatronModule):
    def __init__(self, setting: Setting) -> None:
        shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1}
        super().__init__(TransformerConfig(**shape, bf16=True, use_cpu_initialization=True))
        for name, param in Weights(setting).named_parameters():
            self.register_parameter(name, param)


class DeepSpeedZero(Contestant):
    """DeepSpeed's engine with ZeRO stage 1 around torch's AdamW, on its CPU accelerator.

    Its first rank writes the bf16 model params, too: 2 bytes an element more than the others write.
    """

    def __init__(self, setting: Setting) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        with untouched_zeros():
            model = Weights(setting)
            adam = torch.optim.AdamW(groups_of(model), lr=1e-3)
            self._engine = deepspeed.initialize(model=model, optimizer=adam, config=config)[0]
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


# Params twice while they move, 12 bytes of state, and copies of what lies in a larger storage. In
# the format that loads at every parallel size, every rank gathers the whole state, a bucket beside
# it.
DP_RESHARDABLE = Entry(
    "megatron-core dp_reshardable",
    partial(MegatronCore, sharding="dp_reshardable"),
    Memory(4, 12),
    Memory(2, 24),
)
FULLY_RESHARDABLE = Entry(
    "megatron-core fully_reshardable",
    partial(MegatronCore, sharding="fully_reshardable"),
    Memory(16, 12),
    Memory(16, 12),
)
# Every rank reads the files of all.
ZERO_1 = Entry("deepspeed zero-1", DeepSpeedZero, save=Memory(4, 14), load=Memory(14, 12))
