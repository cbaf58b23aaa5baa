"""The optimizer state of one rank, by param name, for a restart at the same size.

It is loaded into exactly the shards that it was taken from, and refused anywhere else. State never refers to a position
in a list or a buffer. What the inner optimizer keeps is found out from its state: a tensor as large as its main param
is cut by param, and anything else ("step") is kept with each param.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.owned_state import check_local_owned, local_owned, take_local_owned
from megatron_distopt.checkpoint.whole_model import shards_of
from megatron_distopt.config import LOW_PRECISION
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import ParamShard
from megatron_distopt.optimizer.inner import IMPLEMENTATION, bring_into_form, moments_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_FORMAT = 1
#: The run that loads chooses the kernel that updates, not the run that saved.
_NOT_SAVED = ("params", *IMPLEMENTATION)
#: Inner optimizers that keep the same state.
_INTERCHANGEABLE = ("torch_fused", "torch_foreach", LOW_PRECISION)


def local_state_dict(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Param groups, loss scale, and for each owned param shard its main param and state.

    Tensors are views of the live state: copy them (`torch.save` does) before the next step.

    Returns:
        "format"; "inner", the inner optimizer's name; "param_groups"; "loss_scale"; and "param_shards":
        {"name[start:stop]": {"main": 1-D fp32, "cut": {key: 1-D, as long as main}, "whole": {key: anything}}}; "owned",
        what `OwnedParam.split` returns by the name of the param.
    """
    shards = {
        _key(shard): {"main": _main_of(flat, shard), **_state_of(optimizer, flat, shard)}
        for flat, shard in shards_of(optimizer)
    }
    return {
        "format": _FORMAT,
        "inner": optimizer.plan.choice.name,
        "param_groups": [_without_implementation(group) for group in optimizer.inner.param_groups],
        "loss_scale": optimizer.loss_scale.state_dict(),
        "param_shards": shards,
        "owned": local_owned(optimizer),
    }


def check_local_state_dict(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Checks a state as `load_local_state_dict` does, and changes nothing.

    Raises:
        CheckpointError
    """
    if state.get("format") != _FORMAT:
        remedy = "Load a state that optimizer.local_state_dict() returned"
        raise CheckpointError(refusal("optimizer state", f"format {state.get('format')}", f"be {_FORMAT}", remedy))
    missing = sorted({"inner", "param_groups", "loss_scale", "param_shards"} - set(state))
    if missing:
        remedy = "Load a state that optimizer.local_state_dict() returned"
        raise CheckpointError(refusal("optimizer state", f"without {missing}", "be whole", remedy))
    _check_inner(optimizer, state)
    _check_shards(optimizer, state["param_shards"])
    check_local_owned(optimizer, state.get("owned", {}))
    ours, theirs = set(optimizer.loss_scale.state_dict()), set(state["loss_scale"])
    if ours != theirs:
        rule, remedy = f"hold {sorted(ours)}", "Use the loss_scale option of the saved run"
        raise CheckpointError(refusal("loss scale in the state", sorted(theirs), rule, remedy))


@torch.no_grad()
def load_local_state_dict(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Loads what `local_state_dict` returned, after checking all of it.

    Raises:
        CheckpointError: it was taken at another size, from another rank or from another model; nothing is changed then.
    """
    check_local_state_dict(optimizer, state)
    for group, saved in zip(optimizer.inner.param_groups, state["param_groups"], strict=True):
        group.update(_without_implementation(saved))
    optimizer.loss_scale.load_state_dict(state["loss_scale"])
    keys = {shard.name: _in_common(state["param_shards"][_key(shard)]) for _, shard in shards_of(optimizer)}
    optimizer.separate(keys.get)
    for flat in optimizer.flat_params:
        _load_flat(optimizer, flat, state["param_shards"])
        flat.write_model()
    take_local_owned(optimizer, state.get("owned", {}))
    optimizer.forget_deferred_check()


def _key(shard: ParamShard) -> str:
    return f"{shard.name}[{shard.in_param.start}:{shard.in_param.stop}]"


def _without_implementation(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_SAVED}


def _main_of(flat: FlatParam, shard: ParamShard) -> Tensor:
    """A copy for an fp32 param: its main param is a view of the param buffer, all of which would be saved with it."""
    main = flat.cut(flat.main, shard)
    return as_plain(main) if flat.owns_memory else main.clone()


def _state_of(optimizer: ShardedOptimizer, flat: FlatParam, shard: ParamShard) -> dict[str, Any]:
    state = optimizer.inner.state.get(flat.main, {})
    cut = moments_of(optimizer.inner, flat.main)
    whole = {key: value for key, value in state.items() if key not in cut}
    return {"cut": {key: as_plain(flat.cut(value, shard)) for key, value in cut.items()}, "whole": whole}


def _check_inner(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    ours, theirs = optimizer.plan.choice.name, state["inner"]
    if ours != theirs and not {ours, theirs} <= set(_INTERCHANGEABLE):
        rule, remedy = f"be of {ours}", "Choose the inner optimizer of the saved run, by name"
        raise CheckpointError(refusal("optimizer state", f"of {theirs}", rule, remedy))
    number = len(optimizer.inner.param_groups)
    if len(state["param_groups"]) != number:
        remedy = "Build the optimizer with the param groups of the saved run"
        raise CheckpointError(refusal("number of param groups", len(state["param_groups"]), f"be {number}", remedy))


def _check_shards(optimizer: ShardedOptimizer, saved: Mapping[str, Mapping[str, Any]]) -> None:
    ours = {_key(shard) for _, shard in shards_of(optimizer)}
    if ours != set(saved):
        first = min(ours ^ set(saved))
        got = f"{first} only in the {'optimizer' if first in ours else 'state'}"
        remedy = "Load each rank's own state at the data-parallel size at which it was saved"
        raise CheckpointError(refusal("optimizer state", got, "hold exactly this rank's param shards", remedy))
    usual: dict[int, tuple[set[str], set[str]]] = {}  # keys of params with moments, by param group
    for flat, shard in shards_of(optimizer):
        part, group = saved[_key(shard)], flat.plan.key.group
        tensors = [part["main"], *part["cut"].values()]
        keys = usual.setdefault(group, (set(part["cut"]), set(part["whole"]))) if part["cut"] else None
        is_alike = keys in (None, (set(part["cut"]), set(part["whole"])))
        is_alike = is_alike and (not part["cut"] or optimizer.plan.choice.moments <= set(part["cut"]))
        if not is_alike or any(tensor.shape != (shard.in_param.numel,) for tensor in tensors):
            rule = f"hold 1-D tensors of {shard.in_param.numel} elements and the keys of its group and its optimizer"
            remedy = "Load a state that optimizer.local_state_dict() returned"
            raise CheckpointError(refusal(f"state of {_key(shard)}", "other shapes or keys", rule, remedy))


def _in_common(part: Mapping[str, Any]) -> tuple[object, ...]:
    """What the param shards of a flat param must have in common: their moments and the count of updates."""
    numbers = {key: value.tolist() if torch.is_tensor(value) else value for key, value in part["whole"].items()}
    return tuple(sorted(part["cut"])), repr(sorted(numbers.items()))


def _load_flat(optimizer: ShardedOptimizer, flat: FlatParam, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """A state that was taken before the first update has no moments; the flat param must have none then either."""
    parts = [(shard, saved[_key(shard)]) for shard in flat.plan.shards]
    for shard, part in parts:
        flat.cut(flat.main, shard).copy_(part["main"])
    state = {key: _place(optimizer, flat, key, value) for key, value in parts[0][1]["whole"].items()}
    for key in parts[0][1]["cut"]:
        state[key] = _join(flat, [(shard, part["cut"][key]) for shard, part in parts])
    optimizer.inner.state.pop(flat.main, None)
    if state:
        optimizer.inner.state[flat.main] = state
    bring_into_form(optimizer.inner, flat.main)


def _join(flat: FlatParam, parts: list[tuple[ParamShard, Tensor]]) -> Tensor:
    whole = torch.zeros(flat.main.shape, dtype=parts[0][1].dtype, device=flat.main.device)
    for shard, piece in parts:
        flat.cut(whole, shard).copy_(piece)
    return whole


def _place(optimizer: ShardedOptimizer, flat: FlatParam, key: str, value: Any) -> Any:
    """A copy on the device where torch's `load_state_dict` puts it: "step" where the kernel reads it."""
    if not torch.is_tensor(value):
        return value
    group = optimizer.inner.param_groups[flat.plan.key.group]
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return value.to(flat.main.device, copy=True) if on_device else value.clone()
