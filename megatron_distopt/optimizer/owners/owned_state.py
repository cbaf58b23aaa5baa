"""What an optimizer of any class keeps for a param, taken apart into tensors and JSON: no file needs a pickle."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.errors import CheckpointError, refusal

#: Keys of the JSON. Every value is an object with one of them.
_TENSOR, _ENTRIES, _LIST, _TUPLE, _PLAIN = "tensor", "entries", "list", "tuple", "plain"
_OBJECT = "object"


@runtime_checkable
class _Stateful(Protocol):
    """An object that says itself what a file has to hold of it, as torch.distributed.checkpoint knows them too."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers, in dicts and lists."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse."""


def split_state(state: object) -> tuple[Any, dict[str, Tensor]]:
    """Takes a state apart.

    Args:
        state: tensors, numbers, texts and None, in dicts, lists and tuples; and objects with `state_dict` and
            `load_state_dict`, of which a file has what `state_dict` returns.

    Returns:
        JSON that says how it is built, and its tensors by their place in it, such as "GG.0". A tensor without
        dimensions has one there.

    Raises:
        CheckpointError: there is something else in it.

    >>> description, tensors = split_state({"step": 3, "GG": [torch.eye(2), []]})
    >>> list(tensors), join_state(description, tensors, torch.device("cpu"))["GG"][1]
    (['GG.0'], [])
    """
    tensors: dict[str, Tensor] = {}
    return _split(state, "", tensors), tensors


def _split(value: Any, path: str, tensors: MutableMapping[str, Tensor]) -> Any:
    if torch.is_tensor(value):
        return {_TENSOR: _put(value, path, tensors)}
    if isinstance(value, Mapping):
        return {_ENTRIES: [[key, _split(each, _below(path, key), tensors)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [_split(each, _below(path, number), tensors) for number, each in enumerate(value)]
        return {_TUPLE if isinstance(value, tuple) else _LIST: parts}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {_PLAIN: value}
    if isinstance(value, _Stateful):
        return {_OBJECT: _split(value.state_dict(), path, tensors)}
    got, rule = f"a {type(value).__name__}", "consist of tensors, numbers and texts, in dicts and lists"
    raise CheckpointError(refusal(f"state {path!r} of the inner optimizer", got, rule, "Use another class"))


def _put(value: Tensor, path: str, tensors: MutableMapping[str, Tensor]) -> dict[str, Any]:
    name, shape = path.replace("/", "|"), list(value.shape)
    while name in tensors:
        name += "'"
    about = {"shape": shape, "dtype": dtype_name(value.dtype), "on_host": value.device.type == "cpu"}
    if not value.numel():
        return about
    tensors[name] = value.detach() if shape else value.detach().view(1)
    return {"name": name, **about}


def _below(path: str, key: object) -> str:
    if not isinstance(key, (str, int)):
        rule, remedy = "be a text or a whole number", "Use another class"
        raise CheckpointError(refusal(f"a key in state {path!r} of the inner optimizer", repr(key), rule, remedy))
    return f"{path}.{key}" if path else str(key)


def join_state(description: Any, tensors: Mapping[str, Tensor], device: torch.device, into: Any = None) -> Any:
    """The inverse of `split_state`.

    Args:
        description: the JSON.
        tensors: taken over, not copied, where they are on the right device and `into` has none in their place.
        device: of the param; what was on the CPU stays there.
        into: a state that is filled as far as it has the same parts, because other objects may refer to them; only
            there can objects be.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: they do not belong together.
    """
    ((kind, value),) = description.items()
    if kind == _TENSOR:
        return _fill(into, _take(value, tensors, device))
    if kind == _ENTRIES:
        present = into if isinstance(into, MutableMapping) else {}
        entries = {key: join_state(each, tensors, device, present.get(key)) for key, each in value}
        present.clear()
        present.update(entries)
        return present
    if kind in (_LIST, _TUPLE):
        old = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        parts = [join_state(each, tensors, device, beside) for each, beside in zip(value, old, strict=True)]
        return tuple(parts) if kind == _TUPLE else _replaced(into, parts)
    if kind == _PLAIN:
        return value
    if kind == _OBJECT and isinstance(into, _Stateful):
        into.load_state_dict(join_state(value, tensors, device))
        return into
    raise ValueError(f"{kind!r} is no part of a state")


def _fill(into: Any, tensor: Tensor) -> Tensor:
    if not torch.is_tensor(into):
        return tensor
    if into.shape != tensor.shape or into.dtype != tensor.dtype:
        raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} is not {into.dtype} {tuple(into.shape)}")
    with torch.no_grad():
        return into.copy_(tensor)


def _replaced(into: Any, parts: list[Any]) -> list[Any]:
    """The list itself where there is one."""
    if not isinstance(into, list):
        return parts
    into[:] = parts
    return into


def _take(about: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    place = torch.device("cpu") if about["on_host"] else device
    if "name" not in about:
        return torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device=place)
    return tensors[about["name"]].view(about["shape"]).to(place)
