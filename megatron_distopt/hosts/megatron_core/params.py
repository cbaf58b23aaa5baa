"""What the host reads off params: whether they are excluded from the norm, and `main_param`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes, param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.nn import Parameter

from megatron_distopt.config import DistOptConfig
from megatron_distopt.optimizer import ShardedOptimizer, find_accelerator

__all__ = ["idle_device", "is_excluded_from_norm", "publish_main_params"]


def idle_device(config: DistOptConfig) -> torch.device:
    """Where a rank without any param takes part in the statistics: the backend carries tensors of this device."""
    return torch.device(find_accelerator(config.accelerator).device_type)


def is_excluded_from_norm(param: Parameter, tp_group: Any) -> bool:
    """See the note of that name in optimizer/grad_norm.py; the host marks shared and duplicated params itself."""
    return not (param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, tp_group=tp_group))


def publish_main_params(sharded: ShardedOptimizer, named: Mapping[str, Parameter]) -> None:
    """`param.main_param`: live views of the main params, which the host's parameter norm and qk-clip read and write."""
    for param in named.values():
        if param.dtype != torch.float32:
            param.main_param, param.main_param_sharded = None, True  # type: ignore[attr-defined]
    for flat in sharded.flat_params:
        # Where a chain of the host's measures our params, its filters exclude those that are shared.
        flat.main.tensor_model_parallel = True  # type: ignore[attr-defined]
        flat.main.shared = flat.plan.key.excluded_from_norm  # type: ignore[attr-defined]
        for shard in flat.plan.shards if flat.owns_memory else ():
            _publish(named[shard.name], flat.cut(flat.main, shard))


def _publish(param: Any, main_param: Any) -> None:
    copy_tensor_model_parallel_attributes(main_param, param)
    if hasattr(param, "shared"):
        main_param.shared = param.shared
    param.main_param = main_param
