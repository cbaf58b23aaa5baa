"""A tensor of fp32 values that are stored in another form: an operator reads the values, what it writes is rounded.

[Note: low-precision tensors] Checkpoints, hosts and digests read and write main params and moments as 1-D fp32
tensors, cut them and view pieces of them. `LowPrecisionTensor` lets them: a view of it remembers what it is a view of,
an operator gets fp32 values, and what an operator writes goes back into the form. Only low_precision_adam.py uses the
form itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout import Span
from megatron_distopt.optimizer.low_precision.stored_values import PlainValues, StoredValues

_aten = torch.ops.aten
#: An operator on a view, with its arguments behind the tensor.
_Viewing = tuple[Callable[..., Tensor], tuple[Any, ...], Mapping[str, Any]]


class LowPrecisionTensor(Tensor):
    """fp32 values in another form; see [Note: low-precision tensors]. What is computed from it is a plain tensor.

    Args:
        stored: the values.
        span: which of them.
        views: what leads from those to this view, an operator after the other.
        shape: of the view.
    """

    stored: StoredValues
    _span: Span
    _views: tuple[_Viewing, ...]

    @staticmethod
    def __new__(
        cls,
        stored: StoredValues,
        span: Span | None = None,
        views: Sequence[_Viewing] = (),
        shape: Sequence[int] | None = None,
    ) -> LowPrecisionTensor:
        span = Span(0, stored.numel) if span is None else span
        made: LowPrecisionTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size([span.numel] if shape is None else shape), dtype=torch.float32, device=stored.device
        )
        made.stored, made._span, made._views = stored, span, tuple(views)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LowPrecisionTensor({self.values()!r}, {type(self.stored).__name__})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tensor.__reduce_ex__(self.values(), protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.values()

    def data_ptr(self) -> int:
        """Refused: the values are at no address."""
        raise _without_memory("data_ptr()")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refused, as `data_ptr`."""
        raise _without_memory("untyped_storage()")

    def values(self) -> Tensor:
        """A plain copy, fp32 of the same shape."""
        return self._through(self.stored.read(self._span.start, self._span.stop)).clone()

    def _through(self, stretch: Tensor) -> Tensor:
        for view, args, kwargs in self._views:
            stretch = view(stretch, *args, **kwargs)
        return stretch

    def _write(self, values: Tensor) -> None:
        start, stop = self._span.start, self._span.stop
        stretch = self.stored.read(start, stop).clone() if self._views else values
        if self._views:
            self._through(stretch).copy_(values)
        self.stored.write(start, stop, stretch)

    def _viewed(self, view: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LowPrecisionTensor:
        shape = view(torch.empty(self.shape, device="meta"), *args, **kwargs)
        if not isinstance(shape, Tensor):
            rule, remedy = "be viewed one part at a time", "Cut it with an index, or call clone() before"
            raise LayoutError(refusal("low-precision tensor", str(view), rule, remedy))
        if not self._views and view is _aten.slice.Tensor and _is_stretch(*args):
            start, stop, _ = slice(*args[1:]).indices(self._span.numel)
            return LowPrecisionTensor(self.stored, Span(start, max(start, stop)).moved_by(self._span.start))
        return LowPrecisionTensor(self.stored, self._span, [*self._views, (view, args, kwargs)], shape.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], LowPrecisionTensor):
            return args[0]._viewed(func, args[1:], kwargs)
        arguments = (argument for argument in tree_iter((args, kwargs)) if isinstance(argument, LowPrecisionTensor))
        values = {id(argument): argument.values() for argument in arguments}
        plain_args, plain_kwargs = tree_map_only(LowPrecisionTensor, lambda tensor: values[id(tensor)], (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        shown = {}  # by what the operator has written, the tensor whose values it is
        for tensor in tree_iter(_written(func, args, kwargs)):
            if isinstance(tensor, LowPrecisionTensor):
                tensor._write(values[id(tensor)])
                shown[id(values[id(tensor)])] = tensor
        return tree_map(lambda output: shown.get(id(output), output), result)


def _is_stretch(dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> bool:
    return dim in (0, -1) and step == 1


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return [given[name] for name in written if name in given]


def _without_memory(call: str) -> LayoutError:
    rule, remedy = "be read through operators, because its values are stored in another form", "Call clone() before"
    return LayoutError(refusal("low-precision tensor", call, rule, remedy))


def as_plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of the values of a low-precision one."""
    return tensor.values() if isinstance(tensor, LowPrecisionTensor) else tensor


def stored_of(tensor: Tensor) -> StoredValues:
    """How the values of a tensor are stored."""
    return tensor.stored if isinstance(tensor, LowPrecisionTensor) else PlainValues(tensor)


def part_of(tensor: Tensor, span: Span) -> Tensor:
    """Some elements of what is stored for a flat param, to be stored by themselves; see `StoredValues.part`."""
    if isinstance(tensor, LowPrecisionTensor):
        return LowPrecisionTensor(tensor.stored.part(span.start, span.stop))
    return tensor[span.as_slice()]


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors in memory that hold the values of a tensor."""
    return stored_of(tensor).parts
