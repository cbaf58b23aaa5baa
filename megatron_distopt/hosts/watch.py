"""What happens to the memory of params and gradients, whichever code does it: a host's, the user's or torch's.

`Watch` sees the operators that touch some tensors, `tell_of_grads` the gradients that a host adds up outside of
`param.grad`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

#: The namespace of operators that write to all tensors that they are given, whatever their schema says.
_COLLECTIVES = "c10d"
#: The hook of each param that tells of its gradient; not an attribute of the param, because a model may be pickled.
_hooks: MutableMapping[Parameter, RemovableHandle] = WeakIdKeyDictionary()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """While entered, gives the name of each watched tensor to a function before an operator of torch touches it.

    Kernels that other packages call without torch's dispatcher are not seen.

    Args:
        tensors: watched, by name; views of one another's memory only where they overlap.
        seen: called with a name, perhaps several times; what it raises ends the operation.
        writes_only: whether reading does not count.
    """

    def __init__(self, tensors: Mapping[str, Tensor], seen: Callable[[str], None], *, writes_only: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._places = sorted((*addresses_of(tensor), name) for name, tensor in tensors.items())
        self._starts = [start for start, _, _ in self._places]
        self._seen, self._writes_only = seen, writes_only

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at the inputs of an operator, and runs it."""
        for tensor in _tensors_of(func, args, kwargs or {}, self._writes_only):
            for name in self._names_in(tensor):
                self._seen(name)
        return func(*args, **(kwargs or {}))

    def _names_in(self, tensor: Tensor) -> list[str]:
        if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return []
        start, stop = addresses_of(tensor)
        number = max(bisect_right(self._starts, start) - 1, 0)
        names = []
        while number < len(self._places) and self._places[number][0] < stop:
            if self._places[number][1] > start:
                names.append(self._places[number][2])
            number += 1
        return names


def _tensors_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], writes_only: bool) -> Iterator[Tensor]:
    if not writes_only or func.namespace == _COLLECTIVES:
        yield from _flat((args, tuple(kwargs.values())))
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _flat(kwargs.get(argument.name) if argument.name in kwargs else args[number : number + 1])


def _flat(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)


def addresses_of(tensor: Tensor) -> tuple[int, int]:
    """The address of the first byte, and the one after the last byte."""
    extent = 1 + sum((numel - 1) * stride for numel, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + extent * tensor.element_size()


def sharing_memory(extents: Iterable[tuple[int, int, str]]) -> tuple[str, str] | None:
    """The names of the first two that overlap, in the order of their addresses; None where all are apart.

    Args:
        extents: the address of the first byte, the one after the last byte, the name.
    """
    for (_, stop, first), (start, _, second) in pairwise(sorted(extents)):
        if start < stop:
            return first, second
    return None


def in_one_memory(named: Mapping[str, Parameter]) -> tuple[str, str] | None:
    """The names of two Parameters over the same memory; None where each has its own."""
    filled = {name: param for name, param in named.items() if param.numel() and not param.is_meta}
    return sharing_memory((*addresses_of(param), name) for name, param in filled.items())


def tell_of_grads(named: Mapping[str, Parameter], arrived: Callable[[str], None]) -> list[object]:
    """Announces every gradient after the host has added it to its buffer, in a hook on the same node of autograd.

    Returns:
        The nodes: the hooks live as long as these.
    """
    nodes: list[object] = []
    for name, param in named.items():
        with torch.enable_grad():
            node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        # The host keeps the node, so the hook of an optimizer that was built before would stay.
        if (before := _hooks.get(param)) is not None:
            before.remove()
        _hooks[param] = node.register_hook(partial(_tell, arrived, name))
        nodes.append(node)
    return nodes


def _tell(arrived: Callable[[str], None], name: str, *_: object) -> None:
    arrived(name)
