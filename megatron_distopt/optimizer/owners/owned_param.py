"""A param that one rank updates as a whole, by an optimizer of its own, and what a file holds of it.

[Note: an optimizer a param] The optimizer of a param sees one step for every step of the run, as if the model had no
other param. So also a class that counts in its param group counts right, and one that looks across params is found out
by the trial in trial.py. Main param and gradient are there while it steps: the param has memory of its own no longer
than that.

[Note: state as JSON] A file needs no pickle. A state is written as tensors, named by their place in it such as "GG.0",
and JSON that says how it is built: every value is an object with one key, which is its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import dtype_name
from megatron_distopt.errors import CheckpointError
from megatron_distopt.optimizer.inner import Build

#: Kinds of the JSON.
_TENSOR, _ENTRIES, _LIST, _TUPLE, _PLAIN = "tensor", "entries", "list", "tuple", "plain"
#: Parts of what is kept: of the param, and what the class has written into its param group.
_STATE, _GROUP = "state", "group"
_MISSING = object()


def option_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its params."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class OwnedParam:
    """A param that this rank updates as a whole, by an optimizer that `build` makes from a group with its options."""

    def __init__(self, shape: Sequence[int], device: torch.device, build: Build, options: Mapping[str, Any]) -> None:
        self._shape, self._device, self._build = tuple(shape), device, build
        self.begin(options)

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begins anew, without state."""
        self._options = option_values(options)
        self._param = Parameter(torch.zeros(self._shape, dtype=torch.float32, device=self._device))
        self.optimizer = self._build([{**self._options, "params": [self._param]}])
        self._let_go()

    @property
    def numel(self) -> int:
        """Elements of the param."""
        return self._param.numel()

    @torch.no_grad()
    def step(self, main: Tensor, grad: Tensor | None, options: Mapping[str, Any]) -> None:
        """One step of the optimizer.

        Args:
            main: fp32 1-D, all of the param; changed in place.
            grad: fp32 1-D; may be changed. None where the param has none in this step.
            options: of the param group, as they are now.
        """
        now = option_values(options)
        # What the class itself has written into its group stays.
        changed = {key: value for key, value in now.items() if not _is_same(value, self._options.get(key, _MISSING))}
        self.optimizer.param_groups[0].update(changed)
        self._options = now
        self._param.data = main.view(self._shape)
        self._param.grad = None if grad is None else grad.view(self._shape)
        try:
            self.optimizer.step()
            if self._param.data_ptr() != main.data_ptr():  # the class has put another tensor there
                main.copy_(self._param.detach().reshape(-1))
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """A shape without memory takes the place of the values."""
        self._param.grad = None
        self._param.data = torch.zeros((), dtype=torch.float32, device=self._device).expand(self._shape)

    @property
    def has_state(self) -> bool:
        """Whether anything is kept."""
        return bool(self.optimizer.state.get(self._param)) or bool(self._written())

    def _written(self) -> dict[str, Any]:
        """What the class has written into its param group, beside options."""
        known = {**self.optimizer.defaults, **self._options}
        return {key: value for key, value in option_values(self.optimizer.param_groups[0]).items() if key not in known}

    def split(self) -> tuple[Any, dict[str, Tensor]]:
        """All that is kept, as JSON and tensors, see [Note: state as JSON].

        Raises:
            CheckpointError: something of it fits into no file.
        """
        tensors: dict[str, Tensor] = {}
        kept = {_STATE: dict(self.optimizer.state.get(self._param, {})), _GROUP: self._written()}
        return _split(kept, "", tensors), tensors

    def join(self, description: Any, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Takes back what `split` returned; tensors are not copied where they are on the right device.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: they do not belong together; nothing has changed.
        """
        kept = _join(description, tensors, self._device)
        state, written = dict(kept[_STATE]), dict(kept[_GROUP])
        self.begin(options)
        self.optimizer.state.pop(self._param, None)
        if state:
            self.optimizer.state[self._param] = state
        self.optimizer.param_groups[0].update(written)

    @property
    def state_nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.nbytes for tensor in self.split()[1].values())


def _is_same(one: Any, other: Any) -> bool:
    if one is other or torch.is_tensor(one) or torch.is_tensor(other):
        return one is other
    return type(one) is type(other) and bool(one == other)


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if torch.is_tensor(value):
        about = {"shape": list(value.shape), "dtype": dtype_name(value.dtype), "on_host": value.device.type == "cpu"}
        if not value.numel():
            return {_TENSOR: about}
        name = path.replace("/", "|")
        while name in tensors:
            name += "'"
        tensors[name] = value.detach() if value.dim() else value.detach().view(1)  # files have none of 0 dimensions
        return {_TENSOR: {"name": name, **about}}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        below = f"{path}." if path else ""
        return {_ENTRIES: [[key, _split(part, f"{below}{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [_split(part, f"{path}.{number}", tensors) for number, part in enumerate(value)]
        return {_TUPLE if isinstance(value, tuple) else _LIST: parts}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {_PLAIN: value}
    raise CheckpointError(
        f"The optimizer keeps a {type(value).__name__} in {path!r} of its state, which fits into no checkpoint. State "
        "must consist of tensors, numbers and texts, in lists and in dicts by name. Use another class."
    )


def _join(description: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    ((kind, value),) = description.items()
    if kind == _TENSOR:
        place = torch.device("cpu") if value["on_host"] else device
        if "name" not in value:
            return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device=place)
        return tensors[value["name"]].view(value["shape"]).to(place)
    if kind == _ENTRIES:
        return {key: _join(part, tensors, device) for key, part in value}
    if kind in (_LIST, _TUPLE):
        parts = [_join(part, tensors, device) for part in value]
        return tuple(parts) if kind == _TUPLE else parts
    if kind == _PLAIN:
        return value
    raise ValueError(f"{kind!r} is no part of a state")
