"""Params whose all-gather is overlapped with whatever comes after the step: who reads one waits for it.

[Note: pending params] Params are read by modules, but also by a method that calls no module (`model.loss(x)`), by an
exponential moving average, by `state_dict()`. So while a param's bucket is on its way the Parameter has another
class, one with a `__torch_function__`: every operator of torch's that Python code calls with it waits first. Kernels
that other packages bind without torch's operators do not come there; they are called by modules, which wait for their
own params in front of `forward`. On a device a wait makes the current stream wait, and not the CPU, so the class
stays until the gather has ended: every stream that reads the param waits for itself.

[Note: compiled models] torch.compile reads params in code that it generates. Its guards see that the class of a param
is another one, and compile anew; at the beginning of that all gathers are waited for, and from then on in `step()`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from megatron_distopt.buffers import ShardedBuffer, getters
from megatron_distopt.comm import CommTime, Group, ParamOverlap, gather_params

__all__ = ["OverlappedGather"]


#: What says nothing about the values.
_DESCRIBING = {
    vars(torch._C.TensorBase)["grad"].__set__,
    *getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad", "_version"),
    *(getattr(torch.Tensor, name) for name in ("size", "stride", "numel", "dim", "is_contiguous", "requires_grad_")),
    *(getattr(torch.Tensor, name) for name in ("data_ptr", "element_size", "is_floating_point", "__hash__")),
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
}

#: By param, whose gather it waits for.
_pending: dict[int, ref[OverlappedGather]] = {}
#: Of this process, for torch.compile.
_gathers: WeakSet[OverlappedGather] = WeakSet()


class _PendingMixin:
    """See [Note: pending params]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DESCRIBING:
            _wait_for(args)
            _wait_for((kwargs or {}).values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        """Its class would be copied, too, where nobody takes it back."""
        param = _settled(self)
        return memo.setdefault(id(param), type(param)(param.detach().clone(), param.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        param: Any = _settled(self)
        return param.__reduce_ex__(protocol)


def _wait_for(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Parameter) and id(value) in _pending:
            gather = _pending[id(value)]()
            if gather is not None:
                gather.wait_for(value)
        elif isinstance(value, (list, tuple)):
            _wait_for(value)
        elif isinstance(value, dict):
            _wait_for(value.values())


def _settled(param: Any) -> Parameter:
    """The param once its values are there, as what it is otherwise."""
    gather = _pending[id(param)]() if id(param) in _pending else None
    if gather is not None:
        gather.finish()
    settled: Parameter = param
    return settled


_pending_classes: dict[type[Parameter], type[Parameter]] = {}


def _pending_class(usual: type[Parameter]) -> type[Parameter]:
    if usual not in _pending_classes:
        _pending_classes[usual] = type("PendingParameter", (_PendingMixin, usual), {"__module__": __name__})
    return _pending_classes[usual]


class OverlappedGather:
    """Gathers params while the program goes on.

    Args:
        data: over which they are sharded.
        chunks: of the model; their modules wait for their own params.
    """

    def __init__(self, data: Group, chunks: Sequence[Module]) -> None:
        self._data, self._chunks = data, chunks
        self._buffers: list[ShardedBuffer] = []
        self._names: dict[Parameter, str] = {}
        self._handles: list[RemovableHandle] = []
        self._usual: dict[Parameter, type[Parameter]] = {}
        self._is_compiled = self._has_waited = False
        self._overlap = ParamOverlap([], data)
        _gathers.add(self)

    def add(self, named: Mapping[str, Parameter], buffers: Sequence[ShardedBuffer]) -> None:
        """Takes over further params. Between two steps, on all ranks alike.

        Args:
            named: that lie in `buffers`.
            buffers: of this rank.
        """
        self._buffers += buffers
        self._names |= {param: name for name, param in named.items()}
        self._overlap = ParamOverlap(self._buffers, self._data)
        for handle in self._handles:
            handle.remove()
        modules = {module: None for chunk in self._chunks for module in chunk.modules()}
        self._handles = [handle for module in modules for handle in self._hooked(module)]

    def _hooked(self, module: Module) -> Iterable[RemovableHandle]:
        own = [param for param in module.parameters(recurse=False) if param in self._names]
        if own and not isinstance(module, torch.jit.ScriptModule):  # a script module takes no hooks
            # In front of whatever else is hooked there, which may read params.
            yield module.register_forward_pre_hook(_BeforeForward(self, own), prepend=True)

    def release(self) -> None:
        """The params are torch's again."""
        self.finish()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def gather(self) -> None:
        """Collective: begins to gather what the owners have updated."""
        _watch_compiler()
        self._overlap.begin(after_forward=self._has_waited)
        self._has_waited = False
        for param in self._names:
            self._usual[param] = type(param)
            _pending[id(param)] = ref(self)
            param.__class__ = _pending_class(type(param))
        if self._is_compiled or self._data.size == 1:
            self.finish()

    def gather_now(self) -> None:
        """Collective: gathers it and waits."""
        self.finish()
        for buffer in self._buffers:
            gather_params(buffer, self._data)

    def wait_for(self, param: Parameter) -> None:
        """Until a param may be read on the current stream."""
        self._has_waited = True
        self._overlap.wait_for(self._overlap.numbers_of([self._names[param]]))
        self._restore([each for each in self._usual if not self._overlap.is_under_way(self._names[each])])

    def is_under_way(self, name: str) -> bool:
        """Whether a param's gather has not been waited for."""
        return self._overlap.is_under_way(name)

    def is_pending(self, param: Parameter) -> bool:
        """Whether the param may not be there yet."""
        return param in self._usual

    def _restore(self, params: Iterable[Parameter]) -> None:
        for param in params:
            param.__class__ = self._usual.pop(param)
            _pending.pop(id(param), None)

    def finish(self) -> CommTime:
        """Until all params are there; the time of the last gather."""
        self._overlap.finish()
        self._restore(list(self._usual))
        return self._overlap.time

    def compiler_starts(self) -> None:
        """See [Note: compiled models]."""
        if self._usual:
            self._is_compiled = True
            self.finish()


class _BeforeForward:
    """Waits for a module's own params; a copy of the module waits for the same, which is no harm.

    Args:
        gather: that they come with.
        params: of the module.
    """

    def __init__(self, gather: OverlappedGather | None, params: Sequence[Parameter]) -> None:
        self._gather, self._params = None if gather is None else ref(gather), params

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # see [Note: compiled models]
        gather = None if self._gather is None else self._gather()
        for param in self._params:
            if gather is not None and gather.is_pending(param):
                gather.wait_for(param)

    def __deepcopy__(self, memo: Any) -> _BeforeForward:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _BeforeForward, (None, ())


def _watch_compiler() -> None:
    """torch's compiler takes seconds to import, so it is watched once somebody else has imported it."""
    compiler = sys.modules.get("torch._dynamo.callback")
    handler = getattr(compiler, "callback_handler", None)
    if handler is not None and _compiler_starts not in handler.start_callbacks:
        handler.register_start_callback(_compiler_starts)


def _compiler_starts(*_: Any) -> None:
    for gather in list(_gathers):
        gather.compiler_starts()
