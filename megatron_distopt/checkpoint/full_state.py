"""The whole state in torch's format on one rank, gathered value by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.checkpoint.sharded_value import ShardedValue
from megatron_distopt.checkpoint.torch_state import TorchParams, torch_state_dict
from megatron_distopt.comm import Group, exchange_together
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box

__all__ = ["full_state_dict"]


@dataclass(frozen=True)
class _Held:
    """What a rank holds of one value.

    Args:
        shape, dtype: of the whole value.
        boxes: of a sharded one, in order; None for what is kept once.
        kept: what is kept once, on the CPU: a number or a text; None for a sharded value.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...] | None
    kept: Any = None


@torch.no_grad()
def full_state_dict(params: TorchParams) -> dict[str, Any]:
    """Collective: the state of all params in whole tensors on the CPU of the data-parallel group's first rank.

    One value of one rank is under way at a time. What it returns is what one rank's `torch_state_dict` would be, for
    `torch.save` and for any optimizer of the same params.

    Args:
        params: of the optimizer.

    Returns:
        The state on rank 0 of the data-parallel group; {} on the others.

    Raises:
        CheckpointError: params are cut over other ranks, too.
    """
    state = torch_state_dict(params)
    told = exchange_together(lambda: _checked(params, state), params.data, "full_state_dict")
    wanted: dict[tuple[int, str], None] = dict.fromkeys(key for of_rank in told for key in of_rank)
    values = {(number, kind): value for number, each in state["state"].items() for kind, value in each.items()}
    gathered = {key: _gather(values.get(key), [of_rank.get(key) for of_rank in told], params) for key in wanted}
    if params.data.rank != 0:
        return {}
    full: dict[int, dict[str, Any]] = {}
    for (number, kind), value in sorted(gathered.items(), key=lambda item: item[0][0]):
        if value is not None:
            full.setdefault(number, {})[kind] = value
    return {"state": full, "param_groups": state["param_groups"]}


def _checked(params: TorchParams, state: Mapping[str, Any]) -> dict[tuple[int, str], _Held]:
    cut = [each.name for each in params.share.placements.values() if each.dim is not None]
    if cut:
        got, remedy = f"{cut[0]!r}, which is cut over other ranks, too", "Call optimizer.save(folder)"
        raise CheckpointError(refusal("full_state_dict", got, "be of params that every rank has whole", remedy))
    return {
        (number, kind): _held(value)
        for number, values in state["state"].items()
        for kind, value in values.items()
        if not (isinstance(value, ShardedValue) and not value.boxes and value.dim() == 0)  # a count that others know
    }


def _held(value: Any) -> _Held:
    if not torch.is_tensor(value):
        return _Held((), torch.float32, None, value)
    shape = tuple(value.shape)
    if isinstance(value, ShardedValue):
        return _Held(shape, value.dtype, value.boxes)
    return _Held(shape, value.dtype, None, value.cpu()) if value.dim() == 0 else _Held(shape, value.dtype, ())


def _gather(own: Tensor | None, told: Sequence[_Held | None], params: TorchParams) -> Any:
    """Collective: one value, on the first rank.

    Args:
        own: this rank's.
        told: what each rank holds of it.
        params: of the optimizer.
    """
    group = params.data
    first = next(each for each in told if each is not None)
    if first.boxes is None:
        return first.kept
    if own is not None and not isinstance(own, ShardedValue):
        return own.detach().cpu().clone()  # one rank, which has it whole
    if group.rank != 0:
        if isinstance(own, ShardedValue) and own.boxes:
            dist.send(_carried(own, group), dst=group.global_rank(0), group=group.handle)
        return None
    whole = torch.zeros(first.shape, dtype=first.dtype)
    for rank, held in enumerate(told):
        if held is not None and held.boxes:
            flat = _carried(own, group) if rank == 0 else _received(held, rank, params)
            _place(flat.cpu(), held.boxes, whole)
    return whole


def _carried(value: Tensor | None, group: Group) -> Tensor:
    """All boxes of this rank one after the other, 1-D, on a device that the group's backend carries."""
    if not isinstance(value, ShardedValue):
        raise CheckpointError(
            refusal("sharded value", repr(value), "be there on the rank that told of it", "Report this")
        )
    flat = torch.cat([part.reshape(-1) for part in value.parts])
    return flat.cpu() if "gloo" in group.backend else flat


def _received(held: _Held, rank: int, params: TorchParams) -> Tensor:
    numel, group = sum(box.numel for box in held.boxes or ()), params.data
    device = torch.device("cpu") if "gloo" in group.backend else params.share.optimizer.device
    flat = torch.empty(numel, dtype=held.dtype, device=device)
    dist.recv(flat, src=group.global_rank(rank), group=group.handle)
    return flat


def _place(flat: Tensor, boxes: Sequence[Box], whole: Tensor) -> None:
    parts = torch.split(flat, [box.numel for box in boxes])
    for box, part in zip(boxes, parts, strict=True):
        whole[box.as_slices()] = part.view(box.sizes)
