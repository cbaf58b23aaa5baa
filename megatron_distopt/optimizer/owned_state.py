"""What an optimizer of any class keeps for a param, taken apart into tensors and JSON: no file needs a pickle."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["join_state", "split_state"]

#: Keys of the JSON. Every value is an object with one of them.
_TENSOR, _ENTRIES, _LIST, _TUPLE, _PLAIN = "tensor", "entries", "list", "tuple", "plain"


def split_state(state: object) -> tuple[Any, dict[str, Tensor]]:
    """Takes a state apart.

    Args:
        state: tensors, numbers, texts and None, in dicts, lists and tuples.

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


def join_state(description: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The inverse of `split_state`.

    Args:
        description: the JSON.
        tensors: taken over, not copied, where they are on the right device.
        device: of the param; what was on the CPU stays there.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: they do not belong together.
    """
    ((kind, value),) = description.items()
    if kind == _TENSOR:
        return _take(value, tensors, device)
    if kind == _ENTRIES:
        return {key: join_state(each, tensors, device) for key, each in value}
    if kind in (_LIST, _TUPLE):
        parts = [join_state(each, tensors, device) for each in value]
        return tuple(parts) if kind == _TUPLE else parts
    if kind == _PLAIN:
        return value
    raise ValueError(f"{kind!r} is no part of a state")


def _take(about: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    place = torch.device("cpu") if about["on_host"] else device
    if "name" not in about:
        return torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device=place)
    return tensors[about["name"]].view(about["shape"]).to(place)
