"""What this version of megatron-core can do, read off its signatures and attributes and never off a version string."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import param_is_not_shared
from torch.nn import Parameter


def call_with_known(function: Callable[..., Any], *args: Any, **optional: Any) -> Any:
    """Calls `function` with those of the keyword arguments that this version of it has.

    >>> call_with_known(lambda param: param, 1, tp_group=2)
    1
    """
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in optional.items() if name in known})


def expert_tensor_group() -> Any:
    """Returns the tensor-parallel group of experts, or None where the host has no group of their own."""
    find = getattr(parallel_state, "get_expert_tensor_parallel_group", None)
    return None if find is None else find(check_initialized=False)


def is_excluded_from_norm(param: Parameter, tp_group: Any, expert_tp_group: Any) -> bool:
    """See the note of that name in optimizer/grad_norm.py; the host marks shared and duplicated params itself.

    Args:
        param: of the model.
        tp_group: tensor-parallel group; megatron-core 0.16 and later ask for it.
        expert_tp_group: that of experts, which megatron-core 0.19 and later count by.
    """
    is_original: bool = call_with_known(
        tensor_parallel.param_is_not_tensor_parallel_duplicate,
        param,
        tp_group=tp_group,
        expert_tp_group=expert_tp_group,
    )
    return not (param_is_not_shared(param) and is_original)


def stats_group_of(optimizer: Any) -> Any:
    """Returns the process group of gradient statistics; None for all ranks.

    Args:
        optimizer: of the host's class; megatron-core 0.9 calls the group model-parallel.
    """
    find = getattr(optimizer, "get_grad_stats_parallel_group", None) or optimizer.get_model_parallel_group
    return find()


@contextmanager
def with_values(config: Any, values: Mapping[str, object]) -> Iterator[None]:
    """In the block a config of the host has other values in those fields that it has; after it, its own again.

    Args:
        config: the object that the host's optimizer keeps, so that a copy would not do.
        values: by name of the field.
    """
    before = {name: getattr(config, name) for name in values if hasattr(config, name)}
    for name in before:
        setattr(config, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
