"""The optimizer state in the format of torch's own `state_dict`: param groups, and state by the params' numbers.

[Note: torch's format] On one data-parallel rank every value is a plain tensor of the param's shape, a view of the live
state, as in torch: torch.optim.AdamW loads it, and its own loads here. On several ranks a value is a `ShardedValue`, of
which torch.distributed.checkpoint saves and fills each rank's boxes. "main_param" is the fp32 main param of a 16-bit
param, which torch does not have and ignores.

A param that was never updated has the zeros and the count of 0 with which Adam and SGD begin, so that a new optimizer
has something that torch.distributed.checkpoint can fill. Of other classes only what is there is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.checkpoint.dcp import ShardedValue
from megatron_distopt.checkpoint.load_groups import needed_moments
from megatron_distopt.checkpoint.param_groups import step_of
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces
from megatron_distopt.comm import Group, exchange_together
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.inner import moments_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: Keys of a param's state: the fp32 main param of a 16-bit param, and the count of updates.
MAIN_PARAM, STEP = "main_param", "step"


@dataclass(frozen=True, eq=False)
class TorchParams:
    """The params of an optimizer as torch numbers them.

    Args:
        share: the sharded step, and where its params lie in the whole model.
        names: of the params in it, by param group, in the order of each group's "params".
        groups: the live param groups; their "params" are not read.
        data: the data-parallel group.
        everyone: all ranks that load together.
    """

    share: Share
    names: Sequence[Sequence[str]]
    groups: Sequence[MutableMapping[str, Any]]
    data: Group
    everyone: Group

    @property
    def numbered(self) -> list[str]:
        """Names in the order of torch's numbers."""
        return [name for names in self.names for name in names]

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all elements, see [Note: torch's format]."""
        return self.data.size == 1 and all(each.dim is None for each in self.share.placements.values())

    def pieces(self) -> Iterator[OwnedPiece]:
        """Everything that this rank owns, in the order of its buffers."""
        return owned_pieces(WholeModel([self.share]))

    def number_of(self, name: str) -> int:
        """The number of a param's group."""
        return next(number for number, names in enumerate(self.names) if name in names)


@dataclass(frozen=True, eq=False)
class _Here:
    """What this rank holds of the state; each answer is computed once."""

    params: TorchParams

    @cached_property
    def pieces(self) -> dict[str, list[OwnedPiece]]:
        found: dict[str, list[OwnedPiece]] = {}
        for piece in self.params.pieces():
            found.setdefault(piece.shard.name, []).append(piece)
        return found

    @cached_property
    def has_main(self) -> frozenset[str]:
        """Names of the 16-bit params, on all ranks."""
        return frozenset(
            slot.name
            for buffer in self.params.share.optimizer.buffers
            for slot in buffer.layout.slots
            if buffer.param.dtype != torch.float32 and buffer.holds(slot.name)
        )

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the params that the sharded step has, on all ranks."""
        return frozenset(name for group in self.params.share.optimizer.plan.groups for name in group.names)


def torch_state_dict(params: TorchParams) -> dict[str, Any]:
    """The state of all params, as `torch.optim.Optimizer.state_dict` returns it.

    Args:
        params: of the optimizer.

    Returns:
        {"state": {number: {"step", "exp_avg", ...}}, "param_groups": [{..., "params": [number, ...]}]}, see
        [Note: torch's format].
    """
    here, first, groups = _Here(params), 0, []
    for group, names in zip(params.groups, params.names, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", STEP)}
        groups.append({**options, "params": list(range(first, first + len(names)))})
        first += len(names)
    states = {number: _state_of(here, name) for number, name in enumerate(params.numbered)}
    return {"state": {number: state for number, state in states.items() if state is not None}, "param_groups": groups}


class StateByParam(Mapping[Parameter, dict[str, Any]]):
    """`optimizer.state` of a torch optimizer, made when it is read. Plain tensors in it are live.

    Args:
        params: of the optimizer, as they are now.
        name_of: each Parameter of its groups.
    """

    def __init__(self, params: TorchParams, name_of: Mapping[Parameter, str]) -> None:
        self._here, self._name_of = _Here(params), name_of

    def __getitem__(self, param: Parameter) -> dict[str, Any]:
        return _state_of(self._here, self._name_of[param]) or {}  # as in torch, where every param has an entry then

    def __iter__(self) -> Iterator[Parameter]:
        return (param for param, name in self._name_of.items() if _has_state(self._here, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return param in self._name_of and _has_state(self._here, self._name_of[param])  # type: ignore[index]

    def __setitem__(self, param: Parameter, state: object) -> NoReturn:
        _refuse_change()

    def __delitem__(self, param: Parameter) -> NoReturn:
        _refuse_change()

    def clear(self) -> NoReturn:
        """Refused, as is every other way to replace state."""
        _refuse_change()


def _refuse_change() -> NoReturn:
    rule, remedy = "be read here alone", "Change what optimizer.state_dict() returns and give it to load_state_dict"
    raise CheckpointError(refusal("optimizer.state", "changed", rule, remedy))


def _has_state(here: _Here, name: str) -> bool:
    """Whether there is anything to show of a param."""
    if name not in here.trained:
        return False
    pieces, inner = here.pieces.get(name, []), here.params.share.optimizer.inner
    return bool(_initial_kinds(here.params, name)) or any(inner.state.get(piece.flat.main) for piece in pieces[:1])


def _state_of(here: _Here, name: str) -> dict[str, Any] | None:
    """The state of one param; None where torch would have no entry."""
    if name not in here.trained:
        return None
    pieces = here.pieces.get(name, [])
    flat = pieces[0].flat if pieces else None
    initial = _initial_kinds(here.params, name)
    moments = moments_of(here.params.share.optimizer.inner, flat.main) if flat is not None else {}
    kinds = dict.fromkeys([*initial, *moments])
    scalars = _scalars(here, flat, has_begun=bool(moments)) if flat is not None else None
    if not kinds and not scalars:
        return None if here.params.is_whole else {}  # torch refuses a param without an entry, and others may have one
    state: dict[str, Any] = {kind: _value(here, name, moments.get(kind)) for kind in kinds}
    if name in here.has_main:
        state[MAIN_PARAM] = _value(here, name, None if flat is None else flat.main)
    return {**(_elsewhere(here, name) if scalars is None else scalars), **state}


def _value(here: _Here, name: str, flat: Tensor | None) -> Tensor:
    """One value of a param, as views of a tensor as long as the flat param; zeros where there is no such tensor."""
    share, pieces = here.params.share, here.pieces.get(name, [])
    dtype, device = (torch.float32, share.optimizer.device) if flat is None else (flat.dtype, flat.device)
    boxes = [piece.piece.in_global for piece in pieces]
    zeros = [torch.zeros(box.sizes, device=device) for box in boxes] if flat is None else []
    parts = zeros if flat is None else [piece.view(flat.detach()) for piece in pieces]
    if here.params.is_whole:
        return parts[0]
    shape = share.placements[name].global_shape
    return ShardedValue(shape, boxes, parts, dtype=dtype, device=device, writes=share.writes(name))


def is_adam(optimizer: ShardedOptimizer, number: int) -> bool:
    """Whether the inner optimizer begins with two moments of zero and a count of 0 in a param group."""
    return "exp_avg_sq" in needed_moments(optimizer, number)


def _initial_kinds(params: TorchParams, name: str) -> tuple[str, ...]:
    """Moments that are zero before the first update of a param, see [Note: torch's format]."""
    optimizer, number = params.share.optimizer, params.number_of(name)
    group = params.groups[number]
    if is_adam(optimizer, number):
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))
    has_momentum = group.get("momentum") or is_muons_group(group)  # Muon keeps it for a factor of 0 as well
    has_buffer = "momentum_buffer" in needed_moments(optimizer, number) and has_momentum
    return ("momentum_buffer",) if has_buffer and not group.get("dampening") else ()


def _scalars(here: _Here, flat: FlatParam, *, has_begun: bool) -> dict[str, Any]:
    """The count of updates and what else is kept once, copied: the params of a flat param share it."""
    optimizer = here.params.share.optimizer
    state, moments = optimizer.inner.state.get(flat.main, {}), moments_of(optimizer.inner, flat.main)
    found = {key: _copied(value) for key, value in state.items() if key not in moments and value is not None}
    number = flat.plan.key.group
    step = step_of(optimizer, optimizer.inner.param_groups[number], flat, {})
    if STEP not in found and (step is not None or (is_adam(optimizer, number) and not has_begun)):
        found[STEP] = torch.tensor(float(step or 0))
    return found


def _copied(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _elsewhere(here: _Here, name: str) -> dict[str, Tensor]:
    """The count of updates of a param of which this rank owns nothing; only the owners know it."""
    if not is_adam(here.params.share.optimizer, here.params.number_of(name)):
        return {}
    return {STEP: ShardedValue((), (), (), dtype=torch.float32, device=torch.device("cpu"))}


@dataclass(frozen=True)
class _HeldValue:
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

    One value of one rank is sent at a time. The result is what `torch_state_dict` returns on one rank: `torch.save`
    writes it, and any optimizer of the same params loads it.

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


def _checked(params: TorchParams, state: Mapping[str, Any]) -> dict[tuple[int, str], _HeldValue]:
    cut = [each.name for each in params.share.placements.values() if each.dim is not None]
    if cut:
        got, remedy = f"{cut[0]!r}, which is cut over other ranks, too", "Call optimizer.save(folder)"
        raise CheckpointError(refusal("full_state_dict", got, "be of params that every rank has whole", remedy))
    return {
        (number, kind): _held(value)
        for number, values in state["state"].items()
        for kind, value in values.items()
        if not (
            isinstance(value, ShardedValue) and not value.boxes and value.dim() == 0
        )  # a count that only the owners know
    }


def _held(value: Any) -> _HeldValue:
    if not torch.is_tensor(value):
        return _HeldValue((), torch.float32, None, value)
    shape = tuple(value.shape)
    if isinstance(value, ShardedValue):
        return _HeldValue(shape, value.dtype, value.boxes)
    return _HeldValue(shape, value.dtype, None, value.cpu()) if value.dim() == 0 else _HeldValue(shape, value.dtype, ())


def _gather(own: Tensor | None, told: Sequence[_HeldValue | None], params: TorchParams) -> Any:
    """Collective: gathers one value on the first rank.

    Args:
        own: this rank's value.
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


def _received(held: _HeldValue, rank: int, params: TorchParams) -> Tensor:
    numel, group = sum(box.numel for box in held.boxes or ()), params.data
    device = torch.device("cpu") if "gloo" in group.backend else params.share.optimizer.device
    flat = torch.empty(numel, dtype=held.dtype, device=device)
    dist.recv(flat, src=group.global_rank(rank), group=group.handle)
    return flat


def _place(flat: Tensor, boxes: Sequence[Box], whole: Tensor) -> None:
    parts = torch.split(flat, [box.numel for box in boxes])
    for box, part in zip(boxes, parts, strict=True):
        whole[box.as_slices()] = part.view(box.sizes)
