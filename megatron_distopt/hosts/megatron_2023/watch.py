"""Notices writes to the memory of gradients, by whatever code: the host's, the user's or torch's.

`Watch` notices operators that write to given tensors. `tell_of_grads` notices gradients that a host
adds up outside of `param.grad`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, MutableMapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from megatron_distopt.hosts.watches.watched_params import addresses_of

#: The namespace of operators that write to all tensors that they are given, whatever their schema
#: says.
_COLLECTIVES = "c10d"
#: The hook of each param that announces its gradient. Not an attribute of the param, because a
#: model may be pickled.
_hooks: MutableMapping[Parameter, RemovableHandle] = WeakIdKeyDictionary()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """While entered, calls `written` with the name of each watched tensor before an operator of
    torch writes to it.

    If `written` raises, the operator does not run. Kernels that other packages call without torch's
    dispatcher are not noticed.
    """

    def __init__(self, tensors: Mapping[str, Tensor], written: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._places = sorted((*addresses_of(tensor), name) for name, tensor in tensors.items())
        self._starts = [start for start, _, _ in self._places]
        self._written = written

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for tensor in _outputs_of(func, args, kwargs or {}):
            for name in self._names_in(tensor):
                self._written(name)
        return func(*args, **(kwargs or {}))

    def _names_in(self, tensor: Tensor) -> list[str]:
        if (
            tensor.numel() == 0
            or tensor.device.type == "meta"
            or tensor.layout is not torch.strided
        ):
            return []
        start, stop = addresses_of(tensor)
        first = max(bisect_right(self._starts, start) - 1, 0)
        names = []
        for begin, end, name in islice(self._places, first, None):
            if begin >= stop:
                break
            if end > start:
                names.append(name)
        return names


def _outputs_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    outputs: list[Any] = [args, kwargs]
    if func.namespace != _COLLECTIVES:
        outputs = [
            kwargs.get(argument.name, args[number : number + 1])
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    return [output for output in tree_leaves(outputs) if isinstance(output, Tensor)]


def tell_of_grads(named: Mapping[str, Parameter], arrived: Callable[[str], None]) -> list[object]:
    """Announces every gradient after the host has added it to its buffer. The hooks live as long as
    the returned objects."""
    nodes: list[object] = []
    for name, param in named.items():
        with torch.enable_grad():
            node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        # The host keeps the node, so the hook of an optimizer that was built before would stay.
        if (before := _hooks.get(param)) is not None:
            before.remove()
        _hooks[param] = node.register_hook(lambda *_, name=name: arrived(name))
        nodes.append(node)
    return nodes
