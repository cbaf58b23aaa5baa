"""Any class that updates each param as a whole, as the inner optimizer: every param has one owner.

Such a class needs all elements of a param at a time, and its state may have any form: Adafactor
keeps rows and columns, SOAP and Shampoo keep preconditioners. Only the class knows how to cut that.
So the owner of a param (layout/owners.py) keeps its whole state. In a step the owner receives the
main param and the gradient, both fp32, and sends the main param back.

[Note: an optimizer a param] Each param has an optimizer of its own, which makes one step for every
step of the run, as if the model had no other param. So a class that counts in its param group
counts correctly, and the check in declared.py finds a class that looks across params. Main param
and gradient are in memory only while the optimizer steps.

[Note: state as JSON] Files contain no pickles. A state is written as tensors, named by their place
in it such as "GG.0", and JSON that describes how it is built. In the JSON every value is an object
with one key, which is its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer, dtype_name
from megatron_distopt.comm import Group
from megatron_distopt.errors import AccessError, CheckpointError
from megatron_distopt.layout import MatrixOwner, MatrixSpec, OwnerPlan
from megatron_distopt.optimizer.inner import Build, Groups, InParts
from megatron_distopt.optimizer.inner_options import changed_options, option_values
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup
from megatron_distopt.optimizer.owners.update_on_owners import (
    Exchange,
    OwnedBuffer,
    ShardValues,
    choose_owners,
)

#: Kinds of values in the JSON.
_TENSOR, _ENTRIES, _LIST, _TUPLE, _PLAIN = "tensor", "entries", "list", "tuple", "plain"
#: The two parts of the JSON: the param's state, and keys that the class wrote into its param group.
_STATE, _GROUP = "state", "group"


class OwnedParam:
    """A param that this rank updates as a whole. `build` makes its optimizer from a param group."""

    def __init__(
        self, shape: Sequence[int], device: torch.device, build: Build, options: Mapping[str, Any]
    ) -> None:
        self._shape, self._device, self._build = tuple(shape), device, build
        self.begin(options)

    def begin(self, options: Mapping[str, Any]) -> None:
        """Builds the optimizer again, without state."""
        self._options = option_values(options)
        self._param = Parameter(torch.zeros(self._shape, dtype=torch.float32, device=self._device))
        self.optimizer = self._build([{**self._options, "params": [self._param]}])
        self._let_go()

    @torch.no_grad()
    def step(self, main: Tensor, grad: Tensor | None, options: Mapping[str, Any]) -> None:
        """One step of the optimizer. It updates `main`, fp32 1-D, in place, and may overwrite
        `grad`, which has the same form.

        `grad` is None if the param has no gradient in this step. `options` are the present options
        of the param group.
        """
        now = option_values(options)
        # Keys that the class itself has written into its group stay.
        self.optimizer.param_groups[0].update(changed_options(now, self._options))
        self._options = now
        self._param.data = main.view(self._shape)
        self._param.grad = None if grad is None else grad.view(self._shape)
        try:
            self.optimizer.step()
            if self._param.data_ptr() != main.data_ptr():  # the class has assigned another tensor
                main.copy_(self._param.detach().reshape(-1))
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Replaces the param's values with a tensor of the same shape that has no memory."""
        self._param.grad = None
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        self._param.data = zero.expand(self._shape)

    @property
    def has_state(self) -> bool:
        return bool(self.optimizer.state.get(self._param)) or bool(self._written())

    def _written(self) -> dict[str, Any]:
        """The keys that the class has written into its param group besides options."""
        known = {**self.optimizer.defaults, **self._options}
        return {
            key: value
            for key, value in option_values(self.optimizer.param_groups[0]).items()
            if key not in known
        }

    def split(self) -> tuple[Any, dict[str, Tensor]]:
        """The whole state as JSON and tensors, see [Note: state as JSON].

        Raises:
            CheckpointError: if a file cannot hold the state.
        """
        tensors: dict[str, Tensor] = {}
        kept = {_STATE: dict(self.optimizer.state.get(self._param, {})), _GROUP: self._written()}
        return _split(kept, "", tensors), tensors

    def join(
        self, description: Any, tensors: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> None:
        """Restores what `split` returned. Tensors on the right device are not copied.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: if description and tensors do not belong
                together. Nothing is changed then.
        """
        kept = _join(description, tensors, self._device)
        state, written = dict(kept[_STATE]), dict(kept[_GROUP])
        self.begin(options)
        self.optimizer.state.pop(self._param, None)
        if state:
            self.optimizer.state[self._param] = state
        self.optimizer.param_groups[0].update(written)


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if torch.is_tensor(value):
        about = {
            "shape": list(value.shape),
            "dtype": dtype_name(value.dtype),
            "on_host": value.device.type == "cpu",
        }
        if not value.numel():
            return {_TENSOR: about}
        # Files hold contiguous tensors, but with other strides a product rounds differently.
        if not value.is_contiguous():
            about["strides"] = list(torch.empty_like(value, device="meta").stride())
        name = path.replace("/", "|")
        while name in tensors:
            name += "'"
        # files have no 0-D tensors
        tensors[name] = value.detach() if value.dim() else value.detach().view(1)
        return {_TENSOR: {"name": name, **about}}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        below = f"{path}." if path else ""
        return {
            _ENTRIES: [[key, _split(part, f"{below}{key}", tensors)] for key, part in value.items()]
        }
    if isinstance(value, (list, tuple)):
        parts = [_split(part, f"{path}.{number}", tensors) for number, part in enumerate(value)]
        return {_TUPLE if isinstance(value, tuple) else _LIST: parts}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {_PLAIN: value}
    raise CheckpointError(
        f"The optimizer keeps a {type(value).__name__} in {path!r} of its state, which a "
        "checkpoint cannot hold. State must consist of tensors, numbers and texts, in lists and in "
        "dicts by name. Use another class."
    )


def _join(description: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    ((kind, value),) = description.items()
    if kind == _TENSOR:
        place = torch.device("cpu") if value["on_host"] else device
        if "name" not in value:
            return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device=place)
        values = tensors[value["name"]].view(value["shape"]).to(place)
        if "strides" not in value:
            return values
        return torch.empty_strided(
            value["shape"], value["strides"], dtype=values.dtype, device=place
        ).copy_(values)
    if kind == _ENTRIES:
        return {key: _join(part, tensors, device) for key, part in value}
    if kind in (_LIST, _TUPLE):
        parts = [_join(part, tensors, device) for part in value]
        return tuple(parts) if kind == _TUPLE else parts
    if kind == _PLAIN:
        return value
    raise ValueError(f"{kind!r} is not a kind of value in a state")


@dataclass(frozen=True)
class TrainedParams:
    """The params of a model that are updated."""

    shapes: Mapping[str, Sequence[int]]  # by name; includes params that may train later
    # takes a name and returns the data-parallel ranks over which the param is sharded
    group_of: Callable[[str], Group]

    @classmethod
    def of(cls, named: Mapping[str, Tensor], group_of: Callable[[str], Group]) -> TrainedParams:
        return cls({name: tuple(param.shape) for name, param in named.items()}, group_of)


class OwnersState(dict[Tensor, dict[str, Any]]):
    """Replaces an inner optimizer's state that the owners of params keep. Other code would find it
    empty and save that, so every use is refused."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AccessError(
            "optimizer.state cannot be used with a class that updates whole params, because the "
            "owners of the params keep it. Call optimizer.save(folder) and optimizer.load(folder), "
            "or optimizer.reset_state()."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
    get = setdefault = update = keys = values = items = clear = copy = _refuse


class WholeParams(InParts):
    """An inner optimizer of any class that updates whole params. `step` is collective over the
    groups of the buffers, even on a rank without params."""

    def __init__(self, groups: Groups, *, build: Build, params: TrainedParams) -> None:
        num_dims = max((len(shape) for shape in params.shapes.values()), default=1)
        small = torch.zeros((2,) * num_dims)
        super().__init__(groups, build([{"params": [small]}]).defaults)
        self.state = OwnersState()  # type: ignore[assignment]
        self.owned: dict[str, OwnedParam] = {}  # by name, the params that this rank updates
        self.owners: list[OwnerPlan] = []
        self._build, self._params = build, params
        self._buffers: list[OwnedBuffer] = []
        self._group_of: Mapping[str, int] = {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Raises, as does `state_dict()`."""
        self.state.clear()

    def options_of(self, name: str) -> dict[str, Any]:
        """The param group of a param, of which this rank may have no piece."""
        return self.param_groups[self._group_of[name]]

    def nbytes_elsewhere(self) -> int:
        """Bytes of all state on this rank."""
        nbytes = 0
        for owned in self.owned.values():
            _, tensors = owned.split()
            nbytes += sum(tensor.nbytes for tensor in tensors.values())
        return nbytes

    def hold(
        self,
        buffers: Sequence[ShardedBuffer],
        flat_params: Sequence[FlatParam],
        groups: Sequence[ParamGroup],
    ) -> None:
        """Chooses the owners of params in new buffers, and builds an optimizer for each param that
        this rank owns now."""
        self._group_of = {
            name: number for number, group in enumerate(groups) for name in group.names
        }
        # A param of any shape is one block. Its cost is unknown, and assumed to be its number of
        # elements.
        blocks = {
            slot.name: MatrixSpec(1, slot.in_buffer.numel)
            for buffer in buffers
            for slot in buffer.layout.slots
            if slot.name in self._group_of
        }
        self._buffers = choose_owners(
            self.owners, buffers, blocks, self._params.group_of, flat_params
        )
        for owned in self._buffers:
            for owner in owned.plan.owned_by(owned.group.rank):
                if owner.name not in self.owned:
                    shape, options = self._params.shapes[owner.name], self.options_of(owner.name)
                    self.owned[owner.name] = OwnedParam(shape, owned.device, self._build, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Collective: updates every main param that has a gradient."""
        for buffer in self._buffers:
            flat_params = buffer.flat_params
            mains = [flat.main.detach() for flat in flat_params]
            # A param without a gradient is sent to its owner, too, but is in `left_out`.
            grads = [
                torch.zeros_like(flat.main) if flat.main.grad is None else flat.main.grad
                for flat in flat_params
            ]
            values = ShardValues(flat_params, mains), ShardValues(flat_params, grads)
            Exchange(buffer, values, self._update).run()
        self.left_out = frozenset()

    def _update(self, owner: MatrixOwner, blocks: Sequence[Tensor]) -> None:
        main, grad = blocks
        own_grad = None if owner.name in self.left_out else grad
        if own_grad is not None and owner.round is None:
            own_grad = grad.clone()  # it is the grad buffer itself, and a class may overwrite it
        self.owned[owner.name].step(main, own_grad, self.options_of(owner.name))


def owned_params(inner: Optimizer) -> Iterator[tuple[str, OwnedParam, dict[str, Any]]]:
    """The whole params that this rank updates: name, param and its param group. Empty for other
    inner optimizers."""
    if isinstance(inner, WholeParams):
        for name, owned in inner.owned.items():
            yield name, owned, inner.options_of(name)
