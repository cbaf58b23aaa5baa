"""The optimizer state in the format of torch's own `state_dict`: param groups, and state by the
params' numbers.

[Note: torch's format] On one data-parallel rank every value is a plain tensor of the param's shape,
a view of the live state, as in torch: torch.optim.AdamW loads it, and its own loads here. On
several ranks a value is a `ShardedValue`, of which torch.distributed.checkpoint (DCP) saves and
fills each rank's boxes. "main_param" is the fp32 main param of a 16-bit param and "main_average"
the average of the param, which torch does not have and ignores.

A param that was never updated has a state, too, so that a new optimizer has something that DCP can
fill: the zeros and the count of 0 with which Adam and SGD begin, and nan for averages and for what
other classes keep, as a trial step says it. A load takes neither for a state.
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
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from megatron_distopt.checkpoint.load_plan import MOMENTS_OF_ADAM, class_of, needed_moments
from megatron_distopt.checkpoint.param_groups import LOSS_SCALE, not_options, step_of
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces
from megatron_distopt.comm import Group, exchange_together
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
        value.boxes, value.parts = (
            tuple(boxes),
            _LowPrecisionParts(parts) if is_low else list(parts),
        )
        value.writes, value.is_whole, value.is_copy = writes, is_whole, is_copy
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
        """Refuses also what reads memory past the operators."""
        value, given = args[0] if args else None, kwargs or {}
        if func in _OF_MEMORY and isinstance(value, cls):
            if not value.is_whole:
                _refuse_part(f"in {func.__name__}", "be saved and loaded by all ranks")
            args = (as_plain(value.parts[0]), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)

    @classmethod
    # torch's stub forgets that it is a class method
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = func.name().partition(".")[0], kwargs or {}
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
        _refuse_part(f"in {name}", "be saved and loaded by all ranks")

    def _mapped(self, change: Callable[[Tensor], Tensor], **given: Any) -> ShardedValue:
        """The same boxes with other memory."""
        dtype, device = (
            given.get("dtype") or self.dtype,
            torch.device(given.get("device") or self.device),
        )
        parts = [change(part) for part in self.parts]
        how = {"writes": self.writes, "is_whole": self.is_whole}
        return ShardedValue(self.shape, self.boxes, parts, dtype=dtype, device=device, **how)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedValue:
        return self._mapped(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_whole:
            return as_plain(self.parts[0]).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        rule = "be saved by all ranks together: this rank holds a part of it"
        _refuse_part("pickled, for example by torch.save", rule)

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """For DCP: what this rank writes, values in low precision as those that they mean."""
        if not self.writes:
            return []
        self.parts = [as_plain(part) for part in self.parts]
        planner, metadata = (
            import_module(f"torch.distributed.checkpoint.{name}")
            for name in ("planner", "metadata")
        )
        items = []
        for chunk in self.__create_chunk_list__():
            properties = metadata.TensorProperties(dtype=self.dtype)
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


def _refuse_part(got: str, rule: str) -> NoReturn:
    raise CheckpointError(
        f"Invalid sharded value of the optimizer's state: {got}. Must {rule}. Call "
        "optimizer.save(folder) or torch.distributed.checkpoint.save on all ranks, or "
        "optimizer.full_state_dict() on all ranks for whole tensors on rank 0; to scale moments, "
        "optimizer.reset_state(params, scale={'exp_avg': 0.1})."
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
    # by name the shape of each param without elements, of which no buffer knows
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
    def begins(self) -> list[Mapping[str, Any]]:
        """By group, the state of a param of three elements that was never updated, see [Note:
        torch's format]."""
        return [
            _begin(self.share.optimizer, number, group, stand_in)
            for number, (group, stand_in) in enumerate(
                zip(self.groups, self.stand_ins, strict=True)
            )
        ]

    @cached_property
    def stand_ins(self) -> list[Optimizer | None]:
        """By group, an optimizer that has updated a param of three elements once; None where it
        begins with zeros."""
        return [
            _stand_in(self.share.optimizer, number, group)
            for number, group in enumerate(self.groups)
        ]


def moments_to_begin(optimizer: ShardedOptimizer, number: int) -> set[str]:
    """What the inner optimizer will keep for each element of the params of a group."""
    begin = first_state(optimizer, number, optimizer.inner.param_groups[number])
    return {key for key, value in begin.items() if _is_moment(value)}


def first_state(
    optimizer: ShardedOptimizer, number: int, group: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of `TorchParams.begins` for a group that has these options."""
    return _begin(optimizer, number, group, _stand_in(optimizer, number, group))


def _is_moment(value: Any) -> bool:
    """Whether a value of `TorchParams.begins` is one that is kept for each element."""
    return torch.is_tensor(value) and value.shape == (3,)


def _begins_with_zeros(optimizer: ShardedOptimizer, number: int, group: Mapping[str, Any]) -> bool:
    updater = part_for(optimizer.inner, optimizer.inner.param_groups[number])
    if not (
        optimizer.plan.choice.is_adam
        or type(updater).__module__.startswith(("torch.optim.", "megatron_distopt."))
    ):
        return False  # a user's, which may inherit from one of torch's
    has_momentum = "momentum_buffer" in needed_moments(optimizer, number)
    return is_adam(optimizer, number) or (has_momentum and not group.get("dampening"))


def _stand_in(
    optimizer: ShardedOptimizer, number: int, group: Mapping[str, Any]
) -> Optimizer | None:
    has_owners = optimizer.plan.choice.updates_whole_params
    if has_owners or _begins_with_zeros(optimizer, number, group):
        return None
    param = torch.zeros(3, device=optimizer.device)
    # With what the class itself has written since then, such as a count, it would go on and not
    # begin.
    options = {
        key: copy.deepcopy(group[key])
        for key in optimizer.plan.groups[number].options
        if key in group
    }
    with undisturbed(optimizer.device):
        stand_in = optimizer.plan.choice.build([{**options, "params": [param]}])
        param.grad = torch.zeros_like(param)
        stand_in.step()
    return stand_in


def _begin(
    optimizer: ShardedOptimizer, number: int, group: Mapping[str, Any], stand_in: Optimizer | None
) -> dict[str, Any]:
    zeros = torch.zeros(3)
    if stand_in is None and is_adam(optimizer, number):
        maxima = {"max_exp_avg_sq": zeros} if group.get("amsgrad") else {}
        return {STEP: torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros, **maxima}
    if stand_in is None:
        # Muon keeps it for a factor of 0 as well
        has_momentum = group.get("momentum") or is_muons_group(group)
        return {"momentum_buffer": zeros} if has_momentum else {}
    param = stand_in.param_groups[0]["params"][0]
    state = {
        key: value for key, value in stand_in.state.get(param, {}).items() if value is not None
    }
    unwritten = {key: value * math.nan for key, value in moments_of(stand_in, param).items()}
    return state | unwritten | ({STEP: state[STEP] * 0} if STEP in state else {})


def torch_state_dict(params: TorchParams) -> dict[str, Any]:
    """The state of all params, as `torch.optim.Optimizer.state_dict` returns it.

    Returns:
        {"state": {number: {"step", "exp_avg", ...}}, "param_groups": [{..., "params": [number,
        ...]}]}, see [Note: torch's format].
    """
    first, groups = 0, []
    for group, names, stand_in in zip(params.groups, params.names, params.stand_ins, strict=True):
        hidden = {"params", STEP}.intersection(not_options(params.share.optimizer))
        # What the class will write is None before, so that DCP finds the key; a load leaves it out.
        unwritten = {} if stand_in is None else dict.fromkeys(stand_in.param_groups[0])
        options = {key: value for key, value in {**unwritten, **group}.items() if key not in hidden}
        groups.append({**options, "params": list(range(first, first + len(names)))})
        first += len(names)
        if LOSS_SCALE in group:
            groups[-1][LOSS_SCALE] = {
                **group[LOSS_SCALE],
                "num_skipped": params.share.optimizer.num_skipped,
            }
    has_owners = params.share.optimizer.plan.choice.updates_whole_params  # and no state yet
    shown = () if has_owners else params.numbered
    begin, name = params.begins[0], class_of(params.share.optimizer.plan.choice.name)
    kinds = {key for key, value in begin.items() if _is_moment(value)}
    if name != "Adam" and kinds and kinds <= MOMENTS_OF_ADAM:
        groups[0][CLASS] = name
    states = {number: _state_of(params, name) for number, name in enumerate(shown)}
    return {
        "state": {number: state for number, state in states.items() if state is not None},
        "param_groups": groups,
    }


def refuse_write(*_: Any, **__: Any) -> NoReturn:
    """Refuses a write to state that would be lost, because what is shown is a copy."""
    raise AccessError(
        "The optimizer's state was assigned or removed, and what optimizer.state shows is a copy. "
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
            is_live = key in live or type(value) is not Tensor
            dict.__setitem__(shown, key, value if is_live else _as_copy(value))
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
        has_any = name in params.has_main or bool(params.begins[params.number_of[name]])
        has_any = has_any or params.share.optimizer.averages is not None
        return has_any or any(inner.state.get(piece.flat.main) for piece in pieces[:1])

    def __bool__(self) -> bool:
        """True also without entries: torch makes a step where it finds no state, and in a step
        ranks meet."""
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
    begin, pieces = params.begins[params.number_of[name]], params.pieces.get(name, [])
    # torch refuses a param without an entry where others have one.
    nothing: dict[str, Any] | None = None if params.is_whole and not params.has_main else {}
    if (shape := params.empty.get(name)) is not None:
        shown = {
            key: torch.zeros(shape) if _is_moment(value) else copy.deepcopy(value)
            for key, value in begin.items()
        }
        return shown or nothing
    if name not in params.trained:
        return None
    optimizer, flat = params.share.optimizer, pieces[0].flat if pieces else None
    moments = _moments_here(params, name)
    values = {key: value for key, value in begin.items() if torch.is_tensor(value)}
    kinds = dict.fromkeys([*filter(lambda key: _is_moment(begin[key]), begin), *moments])
    if flat is None:  # only the owners know what is kept once
        none, of_cpu = ((), ()), torch.device("cpu")
        known = {key: value for key, value in values.items() if key not in kinds}
        scalars = {
            key: ShardedValue(each.shape, *none, dtype=each.dtype, device=of_cpu)
            for key, each in known.items()
        }
    else:
        scalars = {
            key: copy.deepcopy(value)
            for key, value in begin.items()
            if key not in kinds and not moments
        }
        scalars |= _scalars(optimizer, flat, moments)
    state = {kind: _value(params, name, moments.get(kind), begin.get(kind)) for kind in kinds}
    if name in params.has_main:
        state[MAIN_PARAM] = _value(params, name, None if flat is None else flat.main)
    if optimizer.averages is not None:
        average = flat.average if flat is not None and optimizer.averages.has_begun else None
        state[AVERAGE] = _value(params, name, average, torch.full((1,), math.nan))
    return {**scalars, **state} or nothing


def _value(
    params: TorchParams, name: str, flat: Tensor | None, begin: Tensor | None = None
) -> Tensor:
    """One value of a param, as views of a tensor as long as the flat param, or with the value of
    `begin`."""
    share, pieces = params.share, params.pieces.get(name, [])
    shown = torch.zeros(1, device=share.optimizer.device) if begin is None else begin
    dtype, device = (
        (shown.dtype, share.optimizer.device) if flat is None else (flat.dtype, flat.device)
    )
    boxes = [piece.piece.in_global for piece in pieces]
    if flat is None:
        parts = [shown[:1].to(device).expand(box.numel).reshape(box.sizes).clone() for box in boxes]
    else:
        parts = [piece.view(flat.detach()) for piece in pieces]
    if params.is_whole and not isinstance(parts[0], LowPrecisionTensor):
        return parts[0]
    shape, how = (
        share.placements[name].global_shape,
        {"writes": share.writes(name), "is_whole": params.is_whole},
    )
    return ShardedValue(shape, boxes, parts, dtype=dtype, device=device, **how)


def is_unwritten(state: Mapping[str, Any]) -> bool:
    """Whether all that is kept for each element of a param is nan, see [Note: torch's format]."""
    kept = [value for key, value in state.items() if key not in (MAIN_PARAM, AVERAGE)]
    values = [value for value in kept if torch.is_tensor(value) and value.dim()]
    parts = [
        part
        for value in values
        for part in (value.parts if isinstance(value, ShardedValue) else [value])
    ]
    floats = [part for part in parts if part.is_floating_point() and part.numel()]
    return bool(floats) and all(bool(as_plain(part).isnan().all()) for part in floats)


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


_ValueKey: TypeAlias = tuple[int, str]  # number of a param, and what is kept of it
#: What a rank holds of a sharded value: its whole shape, dtype, and the boxes in order.
_Sharded: TypeAlias = tuple[tuple[int, ...], torch.dtype, tuple[Box, ...]]


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
    states = {number: kinds for number, kinds in state["state"].items() if not is_unwritten(kinds)}
    values = {
        (number, kind): value for number, kinds in states.items() for kind, value in kinds.items()
    }

    def describe() -> tuple[dict[_ValueKey, _Sharded], dict[_ValueKey, Any]]:
        for placement in params.share.placements.values():
            if placement.dim is not None:
                raise CheckpointError(
                    f"Invalid full_state_dict: {placement.name!r}, which is cut over other ranks, "
                    "too. Must be of params that every rank has whole. Call optimizer.save(folder)."
                )
        sharded = {key: value for key, value in values.items() if isinstance(value, ShardedValue)}
        once = {key: value for key, value in values.items() if key not in sharded}
        known = {key: value for key, value in sharded.items() if value.boxes}
        described = {
            key: (tuple(value.shape), value.dtype, value.boxes) for key, value in known.items()
        }
        return described, {
            key: as_plain(value.detach()).cpu().clone() if torch.is_tensor(value) else value
            for key, value in once.items()
        }

    by_rank = exchange_together(describe, params.data, "full_state_dict")
    full = {key: value for _, once in reversed(by_rank) for key, value in once.items()}
    for key in dict.fromkeys(key for sharded, _ in by_rank for key in sharded):
        full[key] = _gather(values.get(key), [sharded.get(key) for sharded, _ in by_rank], params)
    by_number: dict[int, dict[str, Any]] = {}
    for (number, kind), value in sorted(full.items(), key=lambda item: item[0][0]):
        by_number.setdefault(number, {})[kind] = value
    return (
        {"state": by_number, "param_groups": state["param_groups"]} if params.data.rank == 0 else {}
    )


def _gather(
    own: ShardedValue | None, by_rank: Sequence[_Sharded | None], params: TorchParams
) -> Tensor | None:
    """Collective: gathers one value, of which `by_rank` says what each rank holds, on the first
    rank."""
    group = params.data
    device = torch.device("cpu") if "gloo" in group.backend else params.share.optimizer.device
    mine = (
        torch.cat([part.reshape(-1) for part in own.parts]).to(device)
        if own is not None and own.parts
        else None
    )
    if group.rank != 0:
        if mine is not None:
            dist.send(mine, dst=group.global_rank(0), group=group.handle)
        return None
    known = [local for local in by_rank if local is not None]
    # one that owns none has no dtype
    shape, dtype, _ = next((local for local in known if local[2]), known[0])
    whole = torch.zeros(shape, dtype=dtype)
    for rank, local in enumerate(by_rank):
        boxes = local[2] if local is not None else ()
        if not boxes:
            continue
        numels = [box.numel for box in boxes]
        if rank == 0 and mine is not None:
            flat = mine
        else:
            flat = torch.empty(sum(numels), dtype=dtype, device=device)
            dist.recv(flat, src=group.global_rank(rank), group=group.handle)
        for box, part in zip(boxes, torch.split(flat.cpu(), numels), strict=True):
            whole[box.as_slices()] = part.view(box.sizes)
    return whole
