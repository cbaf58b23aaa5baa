"""A tensor of fp32 values that are stored in another form. Operators read fp32 values, and the
values that they write are rounded.

[Note: low-precision tensors] Checkpoints and hosts read and write main params and moments as 1-D
fp32 tensors, cut them and view pieces of them. `LowPrecisionTensor` supports this: a view of it
remembers its base, an operator gets fp32 values, and values that an operator writes are converted
back. Only low_precision_adam.py uses the stored form itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import Span
from megatron_distopt.layout.buckets import BLOCK_NUMEL
from megatron_distopt.layout.estimate import MOMENT_NBYTES, WITH_SCALES
from megatron_distopt.optimizer.low_precision.stored_values import (
    PlainValues,
    RemainderValues,
    StoredValues,
    phase_of,
    stored_zeros,
    zeros_in_phase,
)

_CLONE = "Its values are stored in another form. Call clone() for a plain copy of them."
#: torch's name for the second moment.
SECOND_MOMENT = "exp_avg_sq"
#: An operator that makes a view, with its arguments after the tensor.
_Viewing = tuple[Callable[..., Tensor], tuple[Any, ...], Mapping[str, Any]]


class LowPrecisionTensor(Tensor):
    """fp32 values in another form; see [Note: low-precision tensors]. Results of operators are
    plain tensors."""

    stored: StoredValues
    _span: Span  # the elements of `stored` that it shows
    _views: tuple[_Viewing, ...]  # the operators that lead from those elements to this view
    # whether the values are the model param itself, which is not moved with the state
    is_model_param = False

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
            cls,
            torch.Size([span.numel] if shape is None else shape),
            dtype=torch.float32,
            device=stored.device,
        )
        made.stored, made._span, made._views = stored, span, tuple(views)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LowPrecisionTensor({self.values()!r}, {type(self.stored).__name__})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tensor.__reduce_ex__(self.values(), protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.values()

    @property
    def data(self) -> Tensor:
        """The same values. Assigning a tensor copies its values and moves the stored values to its
        device."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if new.shape != self.shape or new.dtype != self.dtype:
            raise LayoutError(
                f"A {new.dtype} tensor of shape {list(new.shape)} was assigned to .data of a "
                f"low-precision tensor, but it must be {self.dtype} of shape {list(self.shape)}. "
                "Assign only copies of it on another device."
            )
        if not isinstance(new, LowPrecisionTensor):
            values, assigned = self.values(), new.to(self.stored.device)
            if not torch.equal(values, assigned):
                self._write(assigned)
        self.move_to(new.device)

    def move_to(self, device: torch.device) -> None:
        """Moves the stored values, unless they are the model param. Every tensor that shows them
        follows."""
        if not self.is_model_param:
            self.stored.move(lambda part: part.to(device))

    def data_ptr(self) -> int:
        raise LayoutError(f"A low-precision tensor has no data_ptr(). {_CLONE}")

    def untyped_storage(self) -> torch.UntypedStorage:
        raise LayoutError(f"A low-precision tensor has no untyped_storage(). {_CLONE}")

    def values(self) -> Tensor:
        """A plain fp32 copy of the same shape."""
        return self._through(self.stored.read(self._span.as_slice())).clone()

    def _through(self, stretch: Tensor) -> Tensor:
        for view, args, kwargs in self._views:
            stretch = view(stretch, *args, **kwargs)
        return stretch

    def _write(self, values: Tensor) -> None:
        stretch = self._span.as_slice()
        if self._views:
            whole = self.stored.read(stretch).clone()
            self._through(whole).copy_(values)
            values = whole
        self.stored.write(stretch, values)

    def _viewed(
        self, view: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LowPrecisionTensor:
        shape = view(torch.empty(self.shape, device="meta"), *args, **kwargs)
        if not isinstance(shape, Tensor):
            raise LayoutError(
                f"{view} makes several views at once, which a low-precision tensor cannot have. "
                f"{_CLONE}"
            )
        if not self._views and view is torch.ops.aten.slice.Tensor and _is_stretch(*args):
            start, stop, _ = slice(*args[1:]).indices(self._span.numel)
            return LowPrecisionTensor(
                self.stored, Span(start, max(start, stop)).moved_by(self._span.start)
            )
        return LowPrecisionTensor(
            self.stored, self._span, [*self._views, (view, args, kwargs)], shape.shape
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], LowPrecisionTensor):
            return args[0]._viewed(func, args[1:], kwargs)
        arguments = (
            argument
            for argument in tree_iter((args, kwargs))
            if isinstance(argument, LowPrecisionTensor)
        )
        values = {id(argument): argument.values() for argument in arguments}
        plain_args, plain_kwargs = tree_map_only(
            LowPrecisionTensor, lambda tensor: values[id(tensor)], (args, kwargs)
        )
        result = func(*plain_args, **plain_kwargs)
        shown = {}  # by the id of values that the operator has written, the tensor that shows them
        for tensor in tree_iter(_written(func, args, kwargs)):
            if isinstance(tensor, LowPrecisionTensor):
                tensor._write(values[id(tensor)])
                shown[id(values[id(tensor)])] = tensor
        return tree_map(lambda output: shown.get(id(output), output), result)


def _is_stretch(dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> bool:
    return dim in (0, -1) and step == 1


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments to which an operator writes."""
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    written = [
        argument.name
        for argument in arguments
        if argument.alias_info and argument.alias_info.is_write
    ]
    return [given[name] for name in written if name in given]


def as_plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a plain copy of a low-precision tensor."""
    return tensor.values() if isinstance(tensor, LowPrecisionTensor) else tensor


def stored_of(tensor: Tensor) -> StoredValues:
    """How the values of a tensor are stored."""
    return tensor.stored if isinstance(tensor, LowPrecisionTensor) else PlainValues(tensor)


def part_of(tensor: Tensor, span: Span) -> Tensor:
    """A part of a flat param's tensor that is from now on stored separately."""
    if isinstance(tensor, LowPrecisionTensor):
        return LowPrecisionTensor(tensor.stored.part(span.as_slice()))
    return tensor[span.as_slice()]


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors in memory that hold the values of a tensor."""
    return stored_of(tensor).parts


@dataclass(frozen=True)
class Precision:
    """The forms of the state, with the names of the options."""

    main_params_dtype: str = "float32"  # of the main params of 16-bit params
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"

    @classmethod
    def of(cls, config: DistOptConfig) -> Precision:
        return cls(*(getattr(config, field.name) for field in fields(cls)))

    @property
    def is_full(self) -> bool:
        """Whether all of it is plain fp32."""
        return self == FULL

    @property
    def nbytes_of_moments(self) -> float:
        """Bytes of both moments for an element."""
        forms = self.exp_avg_dtype, self.exp_avg_sq_dtype
        scales = forms.count(WITH_SCALES) / BLOCK_NUMEL
        return sum(MOMENT_NBYTES[form] for form in forms) + scales

    def main(self, model: Tensor) -> Tensor:
        """A main param in a form other than float32 with the values of its bf16 model param.
        `model` is the view of the param buffer itself, 1-D."""
        plain = PlainValues(model)
        if self.main_params_dtype == "bfloat16":
            shown = LowPrecisionTensor(plain)
            shown.is_model_param = True
            return shown
        low = zeros_in_phase(model.numel(), phase_of(plain), torch.int16, model.device)
        second = stored_zeros(plain, self.exp_avg_sq_dtype, is_second=True, has_ties=True)
        return LowPrecisionTensor(RemainderValues(model, low, second))

    def form_of(self, moment: str) -> str:
        """The form of a moment, by torch's name of it."""
        return str(getattr(self, f"{moment}_dtype"))

    def moment(self, main: Tensor, kind: str) -> Tensor:
        """A moment of zeros for a main param, in memory of its own. It is a plain tensor if its
        form is fp32 or bf16."""
        is_second = kind == SECOND_MOMENT
        stored = stored_zeros(stored_of(main), self.form_of(kind), is_second=is_second)
        return stored.tensor if isinstance(stored, PlainValues) else LowPrecisionTensor(stored)


#: The default: plain fp32.
FULL = Precision()
