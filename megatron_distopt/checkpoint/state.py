"""The optimizer state of this rank, by parameter name.

State never refers to a position in a list or a buffer. The schema of the inner optimizer is discovered: a tensor as
large as its param is cut by parameter, anything else ("step") is kept with each parameter.

This is the state of *one rank*, for a restart at the same size: it is loaded into exactly the shards that it was taken
from, and anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import ParamShard
from megatron_distopt.optimizer import MainRun, ShardedOptimizer

__all__ = ["check_local_state_dict", "load_local_state_dict", "local_state_dict"]

_FORMAT = 1


def local_state_dict(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Param groups, loss scale, and for each owned param shard its main param and state.

    Tensors are views of the live state: copy them (`torch.save` does) before the next step.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.inner.param_groups]
    shards = {
        _key(shard): {"main": _cut(run, shard, run.main), **_state_of(optimizer, run, shard)}
        for run in optimizer.runs
        for shard in run.run.shards
    }
    return {
        "format": _FORMAT,
        "param_groups": groups,
        "loss_scale": optimizer.loss_scale.state_dict(),
        "param_shards": shards,
    }


def check_local_state_dict(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Whether `load_local_state_dict` would take it.

    Raises:
        CheckpointError
    """
    if state.get("format") != _FORMAT:
        remedy = "Load a state that optimizer.state_dict() returned"
        raise CheckpointError(refusal("optimizer state", f"format {state.get('format')}", f"be {_FORMAT}", remedy))
    ours = {_key(shard) for run in optimizer.runs for shard in run.run.shards}
    theirs = set(state["param_shards"])
    if ours != theirs:
        first = min(ours ^ theirs)
        got = f"{first} only in the {'optimizer' if first in ours else 'state'}"
        remedy = "Load each rank's own state at the data-parallel size at which it was saved"
        raise CheckpointError(refusal("optimizer state", got, "hold exactly this rank's param shards", remedy))
    if len(state["param_groups"]) != len(optimizer.inner.param_groups):
        rule = f"be {len(optimizer.inner.param_groups)}"
        remedy = "Build the optimizer with the param groups of the saved run"
        raise CheckpointError(refusal("number of param groups", len(state["param_groups"]), rule, remedy))


@torch.no_grad()
def load_local_state_dict(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Takes `local_state_dict` back, after checking all of it.

    Raises:
        CheckpointError: it was taken at another size, from another rank or from another model; nothing is changed then.
    """
    check_local_state_dict(optimizer, state)
    for group, saved in zip(optimizer.inner.param_groups, state["param_groups"], strict=True):
        group.update(saved)
    optimizer.loss_scale.load_state_dict(state["loss_scale"])
    for run in optimizer.runs:
        _load_run(optimizer, run, state["param_shards"])
        run.write_model()


def _key(shard: ParamShard) -> str:
    return f"{shard.name}[{shard.in_param.start}:{shard.in_param.stop}]"


def _cut(run: MainRun, shard: ParamShard, tensor: Tensor) -> Tensor:
    return tensor[run.run.in_run(shard).as_slice()]


def _state_of(optimizer: ShardedOptimizer, run: MainRun, shard: ParamShard) -> dict[str, Any]:
    state = optimizer.inner.state.get(run.main, {})
    return {key: _cut(run, shard, value) if _is_whole(run, value) else value for key, value in state.items()}


def _is_whole(run: MainRun, value: object) -> bool:
    return torch.is_tensor(value) and value.shape == run.main.shape


def _load_run(optimizer: ShardedOptimizer, run: MainRun, saved: Mapping[str, Mapping[str, Any]]) -> None:
    parts = [(shard, saved[_key(shard)]) for shard in run.run.shards]
    for shard, part in parts:
        _cut(run, shard, run.main).copy_(part["main"])
    keys = [key for key in parts[0][1] if key != "main"]
    if keys:
        optimizer.inner.state[run.main] = {
            key: _join(run, [(shard, part[key]) for shard, part in parts]) for key in keys
        }


def _join(run: MainRun, parts: list[tuple[ParamShard, Any]]) -> Any:
    """One value for the run: whole tensors from their pieces, "step" and the like from the first."""
    first_shard, first = parts[0]
    if not (torch.is_tensor(first) and first.shape == (first_shard.in_param.numel,)):
        return first.clone() if torch.is_tensor(first) else first
    whole = torch.zeros(run.main.shape, dtype=first.dtype, device=run.main.device)
    for shard, piece in parts:
        _cut(run, shard, whole).copy_(piece)
    return whole
