"""What an optimizer of any class holds in its attributes, beside `state`: objects of the class, and what they refer to.

A class may keep lists of params, masks and helpers there. Nobody but the class knows what they mean; but whether two
optimizers have the same there, and whether something refers to a param, can be seen by following every reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: What torch's class has, and changes itself.
_OF_TORCH = ("state", "param_groups", "defaults")
#: Of these there is one in the process; what they refer to does not belong to an optimizer.
_SHARED = (type, ModuleType, BuiltinFunctionType, CodeType, torch.dtype, torch.device)
#: Of a variable that a function refers to and that has no value yet.
_EMPTY = CellType()


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """What the class of an optimizer has put into it, by name; neither what torch keeps there, nor hooks."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _OF_TORCH and not key.startswith("_optimizer_")
    }


def refers_to(value: object, targets: Iterable[object]) -> bool:
    """Whether a value is one of some objects, or leads to one."""
    wanted = {id(each) for each in targets}
    return any(id(each) in wanted for each in _walk(value, {}))


def foreign_kinds(value: object, optimizer: Optimizer) -> set[type]:
    """The classes of all that a value leads to, without those of Python, tensors, and what an optimizer leads to."""
    kinds = {type(each) for each in _walk(value, {id(optimizer): optimizer})}
    return {kind for kind in kinds if kind.__module__ != "builtins" and not issubclass(kind, Tensor)}


def _walk(value: object, seen: dict[int, object]) -> Iterator[object]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen[id(each)] = each  # kept, so that its id stays its own
            yield each
            waiting += [part for _, part in _parts(each) or ()]


def _parts(value: Any) -> list[tuple[object, Any]] | None:
    """What a value consists of, by name or number; None for one that has no parts."""
    if value is None or torch.is_tensor(value) or isinstance(value, (bool, int, float, complex, str, bytes, *_SHARED)):
        return None
    if isinstance(value, Mapping):
        return list(enumerate(each for pair in value.items() for each in pair))
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        return [("code", value.__code__), ("defaults", value.__defaults__), ("cells", cells), ("dict", vars(value))]
    if isinstance(value, MethodType):
        return [("func", value.__func__), ("self", value.__self__)]
    slots = [key for kind in type(value).__mro__ for key in _slots(kind)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return [*((key, getattr(value, key, None)) for key in slots), *getattr(value, "__dict__", {}).items()]


def _slots(kind: type) -> tuple[str, ...]:
    """Attributes that a class keeps outside of a dict."""
    return tuple(key for key, each in vars(kind).items() if isinstance(each, MemberDescriptorType))


def other_attribute(one: Optimizer, other: Optimizer) -> str | None:
    """The name of an attribute in which two optimizers of a class differ; None where they have the same."""
    ours, theirs = attributes_of(one), attributes_of(other)
    seen: dict[tuple[int, int], object] = {(id(one), id(other)): (one, other)}
    names = dict.fromkeys((*ours, *theirs))
    return next((key for key in names if not _is_same(ours.get(key), theirs.get(key), seen)), None)


def _is_same(one: Any, other: Any, seen: dict[tuple[int, int], object]) -> bool:
    """Whether two values are equal with all that they lead to; what cannot be compared is not."""
    if one is other or (id(one), id(other)) in seen:
        return True
    if type(one) is not type(other):
        return False
    seen[id(one), id(other)] = (one, other)
    if torch.is_tensor(one):
        return _is_same_tensor(one, other)
    ours, theirs = _parts(one), _parts(other)
    if ours is None or theirs is None or isinstance(one, (set, frozenset)):
        return _is_equal(one, other)
    return len(ours) == len(theirs) and all(
        mine[0] == its[0] and _is_same(mine[1], its[1], seen) for mine, its in zip(ours, theirs, strict=True)
    )


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # as of arrays, which have many answers
        return False


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    # Memory that was lent for a step holds nothing now.
    is_lent = not one.untyped_storage().nbytes() and not other.untyped_storage().nbytes()
    return is_alike and (is_lent or torch.equal(one, other))
