"""The state of a run without the distributed optimizer, so that one can be switched on in the middle of training.

::

    {"optimizer": {"state": {number: {"exp_avg", ...}}, "param_groups": [{..., "params": [number]}]},
     "fp32_from_fp16_params": [[fp32, shaped as the param, ...]],  "grad_scaler": ...}      with 16-bit params
    {"state": ..., "param_groups": ...}                                                     with fp32 params alone

Numbers go through the groups, in a group in the order of its params; main params are those of its 16-bit params, in the
same order. Every rank holds all of it and takes what it owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.hosts.megatron_2023.state import (
    check_groups,
    check_moments,
    check_step_of,
    has_begun,
    install_state,
    load_groups,
    load_loss_scale,
    shards_of,
)
from megatron_distopt.optimizer import FlatParam

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = ["check_plain", "is_plain", "load_plain"]

_MAINS = "fp32_from_fp16_params"
_REMEDY = "Load a checkpoint of this model, or start from its weights with --no-load-optim"


@dataclass(frozen=True)
class _Saved:
    """What the state holds of one param; `main` is None for an fp32 param, whose value came with the model."""

    name: str
    main: Tensor | None
    state: Mapping[str, Any]

    @property
    def moments(self) -> dict[str, Tensor]:
        return {key: value for key, value in self.state.items() if torch.is_tensor(value) and value.dim() > 0}


def is_plain(state: Mapping[str, Any]) -> bool:
    """Whether this is the state of an optimizer that is not distributed."""
    return _MAINS in state or ("state" in state and "param_groups" in state)


def check_plain(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Whether `load_plain` would take it.

    Raises:
        CheckpointError
    """
    inner = _inner(state)
    saved = list(_params(optimizer, state))
    may_be_none = not has_begun(inner)
    for each in saved:
        shape = optimizer.start.named[each.name].shape
        tensors = [*each.moments.values(), *([] if each.main is None else [each.main])]
        for tensor in tensors:
            if tensor.shape != shape:
                got, rule = f"{list(tensor.shape)} for {each.name!r}", f"have the param's shape {list(shape)}"
                raise CheckpointError(refusal("optimizer state", got, rule, _REMEDY))
        check_moments(optimizer, "optimizer state", each.moments, may_be_none=may_be_none)
    check_step_of(optimizer, inner)


@torch.no_grad()
def load_plain(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Takes this rank's shards; after `check_plain`. The params are not gathered yet."""
    inner, owned = _inner(state), shards_of(optimizer.sharded)
    load_groups(optimizer.param_groups, inner["param_groups"])
    load_loss_scale(optimizer, state)
    for buffer in optimizer.sharded.buffers:
        buffer.collect()  # fp32 params came with the model, and packed ones are copies of it
    moments: dict[FlatParam, dict[str, Tensor]] = {flat: {} for flat in optimizer.sharded.flat_params}
    for saved in _params(optimizer, state):
        if saved.name not in owned:
            continue
        flat, shard = owned[saved.name]
        if saved.main is not None:
            flat.cut(flat.main, shard).copy_(saved.main.reshape(-1)[shard.in_param.as_slice()])
        for key, tensor in saved.moments.items():
            whole = moments[flat].setdefault(key, torch.zeros_like(flat.main))
            flat.cut(whole, shard).copy_(tensor.reshape(-1)[shard.in_param.as_slice()])
    install_state(optimizer, moments, check_step_of(optimizer, inner))


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """torch's own state dict in it."""
    inner: Mapping[str, Any] = state.get("optimizer", state)
    return inner


def _params(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> Iterator[_Saved]:
    """Every param of the run with what was saved of it.

    Raises:
        CheckpointError: a group has other params.
    """
    inner = _inner(state)
    matched = check_groups(optimizer.param_groups, inner["param_groups"])
    for group, saved in zip(optimizer.sharded.plan.groups, matched, strict=True):
        place = next(place for place, each in enumerate(inner["param_groups"]) if each is saved)
        mains = list(dict(enumerate(state.get(_MAINS, ()))).get(place, ()))
        numbers = list(saved.get("params", ()))
        has_main = [optimizer.start.named[name].dtype is not torch.float32 for name in group.names]
        if len(numbers) != len(group.names) or len(mains) != sum(has_main):
            got = f"{len(numbers)} params, {len(mains)} of them with a main param, in group {place}"
            rule = f"hold the run's {len(group.names)}, {sum(has_main)} of them of 16 bits"
            raise CheckpointError(refusal("optimizer state", got, rule, _REMEDY))
        left = iter(mains)
        for name, number, is_16_bit in zip(group.names, numbers, has_main, strict=True):
            yield _Saved(name, next(left) if is_16_bit else None, inner["state"].get(number, {}))
