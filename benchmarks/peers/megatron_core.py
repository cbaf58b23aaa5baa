"""megatron-core's own distributed optimizer with its dist_checkpointing, on a CPU.

The save is what Megatron-LM does by default: torch_dist, spread over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import megatron_on_cpu
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from peers.contestant import Contestant, Entry, Memory
from peers.state import Setting, Weights, fill_adam, tensors_of_adam, untouched_zeros

#: That megatron-core takes for 40 million elements where it overlaps the reduce-scatter.
_OVERLAP = {"overlap_grad_reduce": True}


class MegatronCore(Contestant):
    """Its optimizer over its DistributedDataParallel.

    Args:
        setting: of the state.
        sharding: `distrib_optim_sharding_type`.
    """

    def __init__(self, setting: Setting, sharding: str) -> None:
        megatron_on_cpu.install()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        self._metadata = {"distrib_optim_sharding_type": sharding}
        with untouched_zeros(), megatron_on_cpu.map_type_strings():
            self._model = _wrapped(setting)
            config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
            self._optimizer = get_megatron_optimizer(config, [self._model])
        fill_adam(self._inner)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._optimizer.chained_optimizers[0].optimizer

    def save(self, folder: Path) -> None:
        state = {"optimizer": self._sharded_state(is_loading=False)}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
        dist_checkpointing.save(state, str(folder), strategy)

    def load(self, folder: Path) -> None:
        state = {"optimizer": self._sharded_state(is_loading=True)}
        self._optimizer.load_state_dict(dist_checkpointing.load(state, str(folder))["optimizer"])

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        model_state = self._model.sharded_state_dict()
        return self._optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=self._metadata)

    def tensors(self) -> Iterator[Tensor]:
        return tensors_of_adam(self._inner)

    def close(self) -> None:
        self._inner.state.clear()
        del self._optimizer, self._model


def _wrapped(setting: Setting) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True, use_cpu_initialization=True
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, **_OVERLAP)
    return DistributedDataParallel(config, ddp, _Weights(config, setting))


class _Weights(MegatronModule):
    def __init__(self, config: TransformerConfig, setting: Setting) -> None:
        super().__init__(config)
        for name, param in Weights(setting).named_parameters():
            self.register_parameter(name, param)


def _memory(numel: int, ranks: int) -> Memory:
    """Params twice while they move, and copies of what lies in a larger storage."""
    return Memory((4 * ranks + 12) * numel, (2 * ranks + 24) * numel)


def _memory_gathered(numel: int, ranks: int) -> Memory:
    """Every rank gathers the whole state, a bucket beside it."""
    return Memory((16 * ranks + 12) * numel, (16 * ranks + 12) * numel)


DP_RESHARDABLE = Entry(
    "megatron-core dp_reshardable",
    "megatron-core's own optimizer and dist_checkpointing; loads at other data-parallel sizes",
    partial(MegatronCore, sharding="dp_reshardable"),
    _memory,
)
FULLY_RESHARDABLE = Entry(
    "megatron-core fully_reshardable",
    "the same in the format that loads at every parallel size",
    partial(MegatronCore, sharding="fully_reshardable"),
    _memory_gathered,
)
