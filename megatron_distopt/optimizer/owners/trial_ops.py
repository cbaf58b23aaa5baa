"""What operators an optimizer calls in a step, where values alone do not show what it looks at.

[Note: operators of a trial] AdamP projects an update only where a row of the gradient is nearly orthogonal to that of
the param, and Prodigy moves its estimate only where lr is large enough: small tensors of random numbers do not come
there. But in every step the one adds up rows, and the other products of different params. So torch's dispatcher is
asked: an element-wise optimizer calls operators alone that are element-wise, and one that updates each param by itself
none in which two params meet. Kernels that do not pass through the dispatcher are not seen; they are left to the
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators that move or make elements, or give them another shape: by name, without "_" at the end.
_MOVES = frozenset(
    """
    zeros_like ones_like full_like empty_like new_zeros new_ones new_empty new_full clone copy _to_copy detach alias
    lift_fresh view _unsafe_view reshape _reshape_alias as_strided expand slice select narrow split split_with_sizes
    chunk unbind cat stack t transpose permute unsqueeze squeeze flatten unflatten index index_put masked_select fill
    zero set resize
    """.split()  # noqa: SIM905 -- one name a line would be longer than what reads them
)
#: Those that put tensors together, and those that take one apart again.
_SELECT = "select"
_JOINS, _PARTS = ("stack", "cat"), ("unbind", "split", "split_with_sizes", "chunk", _SELECT)
#: Of lists of tensors, all are element-wise but these.
_FOREACH, _NOT_ELEMENTWISE = ("_foreach_", "_fused_"), ("_foreach_norm", "_foreach_max", "_foreach_powsum")


@dataclass(frozen=True)
class _Joined:
    """From which params the parts of a stacked or concatenated tensor come, while each part keeps to itself."""

    parts: tuple[frozenset[int], ...]


_Mark = frozenset[int] | _Joined


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its block, notes what operators the tensors of some params meet.

    Args:
        params: numbered by their place.

    Attributes:
        not_elementwise: the first operator that looks across the elements of a tensor; None where there is none.
        mixing: the first operator in which different params meet.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.not_elementwise: str | None = None
        self.mixing: str | None = None
        #: From which params values come, by tensor and by storage. Both are kept, so that none takes another's place.
        self._of_tensor: dict[int, _Mark] = {}
        self._of_storage: dict[int, frozenset[int]] = {}
        self._kept: list[Any] = []
        for number, param in enumerate(params):
            self._set(param, frozenset((number,)))

    def mark_grads(self, params: Sequence[Tensor]) -> None:
        """Says that the params have new gradients."""
        for number, param in enumerate(params):
            if param.grad is not None:
                self._set(param.grad, frozenset((number,)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        given = [*args, *(kwargs or {}).values()]
        is_elementwise = _is_elementwise(func, name, given)
        if self.not_elementwise is None and not is_elementwise:
            self.not_elementwise = name
        if func.namespace == "aten":
            self._spread(name, given, result, is_elementwise=is_elementwise)
        return result

    def _spread(self, name: str, given: Sequence[Any], result: Any, *, is_elementwise: bool) -> None:
        """What comes out of an operator comes from the params that went in."""
        lists = [each for each in given if _is_list(each)]
        tensors = list(_tensors(given))
        if name.startswith(_FOREACH) and lists:
            alone = [each for each in given if torch.is_tensor(each)]
            results = result if _is_list(result) else [None] * len(lists[0])
            for index in range(len(lists[0])):
                members = [each[index] for each in lists if index < len(each)]
                self._put(name, self._met(name, [*members, *alone]), [*members, results[index]])
        elif name in _JOINS and all(isinstance(self._get(each), frozenset) for each in tensors):
            self._put(name, _Joined(tuple(self._union([each]) for each in tensors)), [result])
        elif name in _PARTS and self._parts(name, given):
            for each, part in zip(_tensors([result]), self._parts(name, given), strict=False):
                self._put(name, part, [each])
        else:
            changed = tensors[:1] if name.endswith("_") else []
            mark = self._joined(tensors) if is_elementwise else None
            self._put(name, mark or self._met(name, tensors), [*changed, *_tensors([result])])

    def _parts(self, name: str, given: Sequence[Any]) -> Sequence[frozenset[int]]:
        """From which params the results of taking a tensor apart come; empty where it was not put together so."""
        mark = self._get(given[0]) if torch.is_tensor(given[0]) else None
        if not isinstance(mark, _Joined) or (name == _SELECT and given[1] != 0):
            return ()
        return mark.parts[given[2] :][:1] if name == _SELECT else mark.parts

    def _joined(self, tensors: Sequence[Tensor]) -> _Joined | None:
        """The mark of an element-wise result of tensors that were put together in the same way."""
        marks = {mark for each in tensors if (mark := self._get(each))}
        only = next(iter(marks), None)
        return only if len(marks) == 1 and isinstance(only, _Joined) else None

    def _met(self, name: str, tensors: Sequence[Tensor]) -> frozenset[int]:
        numbers = self._union(tensors)
        if len(numbers) > 1 and self.mixing is None:
            self.mixing = name
        return numbers

    def _union(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        marks = map(self._get, tensors)
        return frozenset(
            number
            for mark in marks
            for part in (mark.parts if isinstance(mark, _Joined) else (mark,))
            for number in part
        )

    def _get(self, tensor: Tensor) -> _Mark:
        known = self._of_tensor.get(id(tensor))
        return self._of_storage.get(tensor.untyped_storage()._cdata, frozenset()) if known is None else known

    def _put(self, name: str, mark: _Mark, tensors: Sequence[Tensor | None]) -> None:
        for each in tensors:
            if each is not None and mark:
                self._set(each, mark)

    def _set(self, tensor: Tensor, mark: _Mark) -> None:
        storage = tensor.untyped_storage()
        self._kept += [storage, tensor]
        self._of_tensor[id(tensor)] = mark
        if isinstance(mark, frozenset):
            self._of_storage[storage._cdata] = self._of_storage.get(storage._cdata, frozenset()) | mark


def _is_elementwise(func: Any, name: str, given: Sequence[Any]) -> bool:
    is_large = any(each.numel() > 1 for each in _tensors(given))
    plain = name.rstrip("_")
    if not is_large or plain in _MOVES or torch.Tag.pointwise in func.tags or func.namespace != "aten":
        return True
    return plain.startswith(_FOREACH) and plain not in _NOT_ELEMENTWISE


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(torch.is_tensor, value))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for each in values:
        if torch.is_tensor(each):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
