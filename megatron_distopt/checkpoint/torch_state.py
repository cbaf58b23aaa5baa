"""The optimizer state in the format of torch's own `state_dict`: param groups, and state by the
params' numbers.

[Note: torch's format] On one data-parallel rank every value is a plain tensor of the param's shape,
a view of the live state, as in torch: torch.optim.AdamW loads it, and its own loads here. On
several ranks a value is a `ShardedValue`, of which torch.distributed.checkpoint (DCP) saves and
fills each rank's boxes. "main_param" is the fp32 main param of a 16-bit param and "main_average"
the average of the param, which torch does not have and ignores.

A param that was never updated has a state, too, so that a new optimizer has something that DCP can
fill: the zeros and the count of 0 with which Adam and SGD begin, and nan for averages and for the
state of other classes, which a trial step finds out. A load ignores both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from megatron_distopt.checkpoint.gather_whole import Held, gather_whole
from megatron_distopt.checkpoint.load_plan import MOMENTS_OF_ADAM, class_of, needed_moments
from megatron_distopt.checkpoint.param_groups import LOSS_SCALE, Options, not_options, step_of
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces
from megatron_distopt.comm import Group, all_gather_results
from megatron_distopt.errors import AccessError, CheckpointError
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.inner import part_for
from megatron_distopt.optimizer.inner_state import moments_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    LowPrecisionTensor,
    as_plain,
)
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.owners.declared import undisturbed
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: The state of all params, or of one.
StateDict: TypeAlias = Mapping[str, Any]
#: Keys of a param's state: the fp32 main param of a 16-bit param, and the count of updates.
MAIN_PARAM, STEP = "main_param", "step"
#: In the first param group: the class whose state it is, if its moments have the names of Adam's.
CLASS = "optimizer_class"
#: Operators that are applied to each box by itself: they move, copy or allocate.
_ON_EACH_BOX = (
    "aten::detach",
    "aten::alias",
    "aten::clone",
    "aten::_to_copy",
    "aten::empty_like",
    "aten::zeros_like",
)

#: Methods that read a tensor's memory, which a sharded value does not have.
_OF_MEMORY = {
    getattr(Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "share_memory_", "storage")
}


class _LowPrecisionParts(list[Tensor]):
    """Memory in low precision. For async_save, DCP copies the storages of tensors, which these do
    not have."""

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Tensor]:
        return [as_plain(part).to("cpu", copy=True) for part in self]


class ShardedValue(Tensor):
    """One value of an optimizer's state: it has the shape of the whole param, and this rank has
    boxes of it.

    DCP takes any tensor that says which boxes it has and gives the memory of each: see
    torch/distributed/_checkpointable.py. Any other use is refused: on one rank it is a part, and
    what was computed from it would be wrong without an error.
    """

    # that this rank holds; disjoint, and none where it owns nothing of the param
    boxes: tuple[Box, ...]
    parts: list[Tensor]  # memory of each box, in its shape: views of the live state
    # whether this rank writes its boxes; False where another rank that holds the same does
    writes: bool
    # whether no other rank has a part of it: operators are applied to the only box then
    is_whole: bool
    is_copy: bool  # whether a write to it would be lost

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Sequence[Box],
        parts: Sequence[Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        writes: bool = True,
        is_whole: bool = False,
        is_copy: bool = False,
    ) -> ShardedValue:
        value: ShardedValue = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        is_low = any(isinstance(part, LowPrecisionTensor) for part in parts)
        value.boxes = tuple(boxes)
        value.parts = _LowPrecisionParts(parts) if is_low else list(parts)
        value.writes = writes
        value.is_whole = is_whole
        value.is_copy = is_copy
        return value

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `__new__` has set everything."""

    # torch's is untyped
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = sum(box.numel for box in self.boxes)
        return (
            f"ShardedValue(shape={list(self.shape)}, dtype={self.dtype}, {held} of {self.numel()} "
            "elements here)"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Also refuses methods that read memory without an operator."""
        value, given = args[0] if args else None, kwargs or {}
        if func in _OF_MEMORY and isinstance(value, cls):
            if not value.is_whole:
                _refuse_part(f"Tensor.{func.__name__}")
            args = (as_plain(value.parts[0]), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)

    @classmethod
    # torch's stub forgets that it is a class method
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition(".")[0]
        given = kwargs or {}
        value = args[0] if args and isinstance(args[0], cls) else None
        if value is not None and name in _ON_EACH_BOX:
            return value._mapped(lambda part: func(part, *args[1:], **given), **given)
        if value is not None and name == "aten::new_empty" and tuple(args[1]) == tuple(value.shape):
            return value._mapped(lambda part: func(part, part.shape, **given), **given)
        if (
            value is not None
            and name == "aten::copy_"
            and isinstance(args[1], cls)
            and value.boxes == args[1].boxes
        ):
            for into, part in zip(value.parts, args[1].parts, strict=True):
                into.copy_(part)
            return value
        if value is not None and value.is_copy and func._schema.is_mutable:
            refuse_write()
        if value is not None and value.is_whole:
            whole_args, whole_kwargs = tree_map_only(
                cls, lambda whole: whole.parts[0], (args, given)
            )
            return func(*whole_args, **whole_kwargs)
        _refuse_part(name)

    def _mapped(self, change: Callable[[Tensor], Tensor], **given: Any) -> ShardedValue:
        """The same boxes with other memory."""
        return ShardedValue(
            self.shape,
            self.boxes,
            [change(part) for part in self.parts],
            dtype=given.get("dtype") or self.dtype,
            device=torch.device(given.get("device") or self.device),
            writes=self.writes,
            is_whole=self.is_whole,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedValue:
        return self._mapped(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_whole:
            return as_plain(self.parts[0]).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        _refuse_part("Pickling, for example by torch.save,")

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """For DCP: what this rank writes; values in low precision are written as the numbers that
        they stand for."""
        if not self.writes:
            return []
        self.parts = [as_plain(part) for part in self.parts]
        planner, metadata = (
            import_module(f"torch.distributed.checkpoint.{name}")
            for name in ("planner", "metadata")
        )
        items = []
        properties = metadata.TensorProperties(dtype=self.dtype)
        for chunk in self.__create_chunk_list__():
            data = planner.TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            index = metadata.MetadataIndex(fqn, chunk.offsets)
            items.append(
                planner.WriteItem(index=index, type=planner.WriteItemType.SHARD, tensor_data=data)
            )
        return items

    def __create_chunk_list__(self) -> list[Any]:
        """For DCP: the boxes that this rank has memory for."""
        chunk = import_module("torch.distributed.checkpoint.metadata").ChunkStorageMetadata
        return [chunk(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """For DCP: the memory of one box, which it writes or copies into."""
        return self.parts[[box.offsets for box in self.boxes].index(tuple(index.offset))]


def _refuse_part(use: str) -> NoReturn:
    raise CheckpointError(
        f"{use} needs a whole tensor, but the optimizer's state is sharded and this rank holds a "
        "part of it. Call optimizer.save(folder) or torch.distributed.checkpoint.save on all "
        "ranks, or optimizer.full_state_dict() on all ranks for whole tensors on rank 0. To scale "
        "moments, call optimizer.reset_state(params, scale={'exp_avg': 0.1})."
    )


@dataclass(frozen=True, eq=False)
class TorchParams:
    """The params of an optimizer as torch numbers them, and what this rank has of them: each is
    looked up once."""

    share: Share  # the sharded step, and where its params lie in the whole model
    # of the params in it, by param group, in the order of each group's "params"
    names: Sequence[Sequence[str]]
    groups: Sequence[MutableMapping[str, Any]]  # the live param groups; their "params" are not read
    data: Group  # the data-parallel group
    everyone: Group  # all ranks that load together
    # shapes of the params without elements, by name; no buffer has them
    empty: Mapping[str, Sequence[int]]

    @cached_property
    def numbered(self) -> list[str]:
        return [name for names in self.names for name in names]

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The number of each param's group."""
        return {name: number for number, names in enumerate(self.names) for name in names}

    @cached_property
    def is_whole(self) -> bool:
        """Whether this rank holds all elements, see [Note: torch's format]."""
        return self.data.size == 1 and all(
            placement.dim is None for placement in self.share.placements.values()
        )

    @cached_property
    def pieces(self) -> dict[str, list[OwnedPiece]]:
        """Everything that this rank owns, by name, in the order of its buffers and as flat params
        are cut now."""
        found: dict[str, list[OwnedPiece]] = {}
        for piece in owned_pieces(WholeModel([self.share])):
            found.setdefault(piece.shard.name, []).append(piece)
        return found

    @cached_property
    def has_main(self) -> frozenset[str]:
        """Names of the 16-bit params, on all ranks."""
        return frozenset(
            slot.name
            for buffer in self.share.optimizer.buffers
            for slot in buffer.layout.slots
            if buffer.param.dtype != torch.float32 and buffer.holds(slot.name)
        )

    @cached_property
    def trained(self) -> frozenset[str]:
        return frozenset(name for group in self.share.optimizer.plan.groups for name in group.names)

    @cached_property
    def first(self) -> list[FirstState]:
        """By group."""
        optimizer = self.share.optimizer
        return [first_state(optimizer, *numbered) for numbered in enumerate(self.groups)]


@dataclass(frozen=True)
class FirstState:
    """What a param of three elements has before its first update, see [Note: torch's format]."""

    values: StateDict
    options: Sequence[str] = ()  # of its group, with those that the class writes by itself

    @property
    def moments(self) -> list[str]:
        """Keys of what is kept for each element."""
        return [key for key, value in self.values.items() if getattr(value, "shape", ()) == (3,)]


def moments_to_begin(optimizer: ShardedOptimizer, number: int) -> set[str]:
    """What the inner optimizer will keep for each element of the params of a group."""
    return set(first_state(optimizer, number, optimizer.inner.param_groups[number]).moments)


def first_state(optimizer: ShardedOptimizer, number: int, group: Options) -> FirstState:
    """The first state in a group that has these options. If a class does not begin with zeros, a
    trial step finds out."""
    has_owners = optimizer.plan.choice.updates_whole_params
    if has_owners or _begins_with_zeros(optimizer, number, group):
        return FirstState(_zeros(optimizer, number, group))
    param = torch.zeros(3, device=optimizer.device)
    # Only options that were given: what the class has written since, such as a count, would not be
    # that of a first step.
    given = optimizer.plan.groups[number].options
    options = {key: copy.deepcopy(group[key]) for key in given if key in group}
    with undisturbed(optimizer.device):
        trial = optimizer.plan.choice.build([{**options, "params": [param]}])
        param.grad = torch.zeros_like(param)
        trial.step()
    param = trial.param_groups[0]["params"][0]
    kept = trial.state.get(param, {}).items()
    state = {key: value for key, value in kept if value is not None}
    for key, value in moments_of(trial, param).items():
        state[key] = value * math.nan
    if STEP in state:
        state[STEP] = state[STEP] * 0
    return FirstState(state, tuple(trial.param_groups[0]))


def _zeros(optimizer: ShardedOptimizer, number: int, group: Options) -> dict[str, Any]:
    zeros = torch.zeros(3)
    if is_adam(optimizer, number):
        maxima = {"max_exp_avg_sq": zeros} if group.get("amsgrad") else {}
        return {STEP: torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros, **maxima}
    # Muon keeps it for a factor of 0 as well
    has_momentum = group.get("momentum") or is_muons_group(group)
    return {"momentum_buffer": zeros} if has_momentum else {}


def _begins_with_zeros(optimizer: ShardedOptimizer, number: int, group: Options) -> bool:
    updater = part_for(optimizer.inner, optimizer.inner.param_groups[number])
    if not (
        optimizer.plan.choice.is_adam
        or type(updater).__module__.startswith(("torch.optim.", "megatron_distopt."))
    ):
        return False  # a user's, which may inherit from one of torch's
    has_momentum = "momentum_buffer" in needed_moments(optimizer, number)
    return is_adam(optimizer, number) or (has_momentum and not group.get("dampening"))


def torch_state_dict(params: TorchParams) -> dict[str, Any]:
    """The state of all params, as `torch.optim.Optimizer.state_dict` returns it.

    Returns:
        {"state": {number: {"step", "exp_avg", ...}}, "param_groups": [{..., "params": [number,
        ...]}]}, see [Note: torch's format].
    """
    optimizer, groups, start = params.share.optimizer, [], 0
    hidden = {"params", STEP}.intersection(not_options(optimizer))
    for group, names, first in zip(params.groups, params.names, params.first, strict=True):
        # What the class will write is None before, so that DCP finds the key; a load leaves it out.
        shown = {key: value for key, value in group.items() if key not in hidden}
        unwritten = dict.fromkeys(key for key in first.options if key not in hidden)
        options = {**unwritten, **shown}
        groups.append({**options, "params": list(range(start, start + len(names)))})
        start += len(names)
        if LOSS_SCALE in group:
            groups[-1][LOSS_SCALE] = {**group[LOSS_SCALE], "num_skipped": optimizer.num_skipped}
    kinds, name = set(params.first[0].moments), class_of(optimizer.plan.choice.name)
    if name != "Adam" and kinds and kinds <= MOMENTS_OF_ADAM:
        groups[0][CLASS] = name
    states = {}
    # whole params have owners, and no state yet
    for number, name in enumerate(params.numbered):
        state = None if optimizer.plan.choice.updates_whole_params else _state_of(params, name)
        if state is not None:
            states[number] = state
    return {"state": states, "param_groups": groups}


def refuse_write(*_: Any, **__: Any) -> NoReturn:
    """Refuses a write to state that would be lost, because what is shown is a copy."""
    raise AccessError(
        "The optimizer's state was assigned or removed, but optimizer.state shows only a copy. "
        "Call optimizer.reset_state(params) to let it begin anew, optimizer.reset_state(params, "
        "scale={'exp_avg': 0.1}) to scale moments, or optimizer.load_state_dict(...)."
    )


class StateOfParam(dict[str, Any]):
    """What `optimizer.state` shows of one param."""

    __delitem__ = __ior__ = clear = refuse_write
    pop = popitem = update = setdefault = refuse_write

    def __setitem__(self, key: str, value: Any) -> None:
        """Takes what is there already, as frameworks do that move state to the device where it
        is."""
        if value is not self.get(key):
            refuse_write()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class StateByParam(MutableMapping[Parameter, dict[str, Any]]):
    """`optimizer.state` of a torch optimizer, made when it is read. Plain tensors in it are live;
    what is removed begins anew, by a call of `reset`."""

    def __init__(
        self,
        params: TorchParams,
        name_of: Mapping[Parameter, str],
        reset: Callable[[Sequence[Parameter] | None], None],
    ) -> None:
        self._params, self._name_of, self._reset = params, name_of, reset

    def __getitem__(self, param: Parameter) -> dict[str, Any]:
        name = self._name_of[param]
        live = {MAIN_PARAM, AVERAGE, *_moments_here(self._params, name)}
        shown = StateOfParam()
        # as in torch, where every param has an entry then
        for key, value in (_state_of(self._params, name) or {}).items():
            if key == STEP and isinstance(value, ShardedValue):
                value.is_copy = True  # as on the rank that has the count
            if key in live or type(value) is not Tensor or not value.numel():
                dict.__setitem__(shown, key, value)
            else:
                dict.__setitem__(shown, key, _as_copy(value))
        return shown

    def __setitem__(self, param: Parameter, state: Any) -> None:
        if state:
            refuse_write()
        self._begin([param])

    def __delitem__(self, param: Parameter) -> None:
        self._begin([param])

    def clear(self) -> None:
        self._begin(None)

    def _begin(self, params: Sequence[Parameter] | None) -> None:
        self._reset(params)
        self._params = replace(self._params)  # with flat params as they are cut now

    def __iter__(self) -> Iterator[Parameter]:
        return (param for param in self._name_of if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        """Whether torch would have an entry of it; unlike reading one this makes no tensor."""
        params, name = self._params, self._name_of.get(param)  # type: ignore[call-overload]
        if name not in params.trained:
            return False
        pieces, inner = params.pieces.get(name, []), params.share.optimizer.inner
        if name in params.has_main or params.first[params.number_of[name]].values:
            return True
        if params.share.optimizer.averages is not None:
            return True
        return bool(pieces) and bool(inner.state.get(pieces[0].flat.main))

    def __bool__(self) -> bool:
        """True even without entries, because torch makes a step where it finds no state, and a step
        is collective."""
        return True


def _moments_here(params: TorchParams, name: str) -> Mapping[str, Tensor]:
    """The live moments of the first piece that this rank owns of a param; empty without any."""
    pieces = params.pieces.get(name)
    return moments_of(params.share.optimizer.inner, pieces[0].flat.main) if pieces else {}


def _as_copy(value: Tensor) -> ShardedValue:
    how = {"is_whole": True, "is_copy": True}
    whole = [Box.whole(value.shape)]
    return ShardedValue(value.shape, whole, [value], dtype=value.dtype, device=value.device, **how)


def _state_of(params: TorchParams, name: str) -> dict[str, Any] | None:
    """The state of one param; None where torch would have no entry."""
    first, pieces = params.first[params.number_of[name]], params.pieces.get(name, [])
    # torch refuses a param without an entry where others have one.
    nothing: dict[str, Any] | None = None if params.is_whole and not params.has_main else {}
    if name in params.empty:
        shown = copy.deepcopy(dict(first.values))
        shown |= {key: torch.zeros(params.empty[name]) for key in first.moments}
        return shown or nothing
    if name not in params.trained:
        return None
    optimizer, flat = params.share.optimizer, pieces[0].flat if pieces else None
    moments = _moments_here(params, name)
    kinds = dict.fromkeys([*first.moments, *moments])
    state: dict[str, Any] = {}
    for key, value in first.values.items():
        if flat is None and key not in kinds and torch.is_tensor(value):
            # only the owners know what is kept once
            cpu = torch.device("cpu")
            state[key] = ShardedValue(value.shape, (), (), dtype=value.dtype, device=cpu)
        elif flat is not None and key not in kinds and not moments:
            state[key] = copy.deepcopy(value)
    if flat is not None:
        state |= _scalars(optimizer, flat, moments)
    for kind in kinds:
        state[kind] = _value(params, name, moments.get(kind), first.values.get(kind))
    if name in params.has_main:
        state[MAIN_PARAM] = _value(params, name, None if flat is None else flat.main)
    if optimizer.averages is not None:
        average = flat.average if flat is not None and optimizer.averages.has_begun else None
        state[AVERAGE] = _value(params, name, average, torch.full((1,), math.nan))
    return state or nothing


def _value(
    params: TorchParams, name: str, flat: Tensor | None, begin: Tensor | None = None
) -> Tensor:
    """One value of a param, as views of a tensor as long as the flat param, or with the value of
    `begin`."""
    share, pieces = params.share, params.pieces.get(name, [])
    boxes = [piece.piece.in_global for piece in pieces]
    device = share.optimizer.device
    if flat is None:
        shown = (torch.zeros(1) if begin is None else begin[:1]).to(device)
        dtype = shown.dtype
        parts = [shown.expand(box.numel).reshape(box.sizes).clone() for box in boxes]
    else:
        dtype, device = flat.dtype, flat.device
        parts = [piece.view(flat.detach()) for piece in pieces]
    if params.is_whole and not isinstance(parts[0], LowPrecisionTensor):
        return parts[0]
    return ShardedValue(
        share.placements[name].global_shape,
        boxes,
        parts,
        dtype=dtype,
        device=device,
        writes=share.writes(name),
        is_whole=params.is_whole,
    )


def is_unwritten(state: StateDict) -> bool:
    """Whether all that is kept for each element of a param is nan, see [Note: torch's format]."""
    kept = [value for key, value in state.items() if key not in (MAIN_PARAM, AVERAGE)]
    parts = list[Tensor]()
    for value in kept:
        is_of_elements = torch.is_tensor(value) and value.dim()
        if is_of_elements and isinstance(value, ShardedValue):
            parts += value.parts
        elif is_of_elements:
            parts.append(value)
    floats = [part for part in parts if part.is_floating_point() and part.numel()]
    are_nan = [bool(as_plain(part).isnan().all()) for part in floats]
    return bool(floats) and all(are_nan)


def is_adam(optimizer: ShardedOptimizer, number: int) -> bool:
    """Whether the inner optimizer begins with two moments of zero and a count of 0 in a param
    group."""
    return "exp_avg_sq" in needed_moments(optimizer, number)


def _scalars(
    optimizer: ShardedOptimizer, flat: FlatParam, moments: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The count of updates and what else is kept once, copied: the params of a flat param share
    it."""
    found = {
        key: value.clone() if torch.is_tensor(value) else value
        for key, value in optimizer.inner.state.get(flat.main, {}).items()
        if key not in moments and value is not None
    }
    number = flat.plan.key.group
    step = step_of(optimizer, optimizer.inner.param_groups[number], flat, {})
    if STEP not in found and is_adam(optimizer, number) and step is not None:
        found[STEP] = torch.tensor(float(step))
    return found


@torch.no_grad()
def full_state_dict(params: TorchParams) -> dict[str, Any]:
    """Collective: the state of all params in whole tensors on the CPU of the data-parallel group's
    first rank.

    One value of one rank is sent at a time. The result is what `torch_state_dict` returns on one
    rank: `torch.save` writes it, and any optimizer of the same params loads it.

    Returns:
        The state on rank 0 of the data-parallel group; {} on the others.

    Raises:
        CheckpointError: params are cut over other ranks, too.
    """
    state = torch_state_dict(params)
    # by the number of a param, and what is kept of it
    values: dict[tuple[int, str], Any] = {}
    for number, kinds in state["state"].items():
        if not is_unwritten(kinds):
            values |= {(number, kind): value for kind, value in kinds.items()}

    def describe() -> tuple[dict[tuple[int, str], Held], dict[tuple[int, str], Any]]:
        for placement in params.share.placements.values():
            if placement.dim is not None:
                raise CheckpointError(
                    f"full_state_dict() cannot gather {placement.name!r}, which is also split "
                    "over ranks outside the data-parallel group. Call optimizer.save(folder)."
                )
        held, once = {}, {}
        for key, value in values.items():
            if not isinstance(value, ShardedValue):
                is_tensor = torch.is_tensor(value)
                once[key] = as_plain(value.detach()).cpu().clone() if is_tensor else value
            elif value.boxes:  # one that owns none has no dtype
                held[key] = Held(tuple(value.shape), value.dtype, value.boxes)
        return held, once

    by_rank = all_gather_results(describe, params.data, "full_state_dict")
    full: dict[tuple[int, str], Any] = {}
    for _, once in reversed(by_rank):
        full |= once
    for key in dict.fromkeys(key for held, _ in by_rank for key in held):
        parts = values[key].parts if key in values else ()
        of_ranks = [held.get(key) for held, _ in by_rank]
        full[key] = gather_whole(parts, of_ranks, params.data, params.share.optimizer.device)
    if params.data.rank != 0:
        return {}
    by_number: dict[int, dict[str, Any]] = {}
    for key, value in sorted(full.items(), key=lambda item: item[0][0]):
        number, kind = key
        by_number.setdefault(number, {})[kind] = value
    return {"state": by_number, "param_groups": state["param_groups"]}
