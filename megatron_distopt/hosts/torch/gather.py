"""The all-gather of params after a step. With overlap, a read of a param waits until it is
gathered.

[Note: pending params] Modules read params, but so do methods that call no module (`model.loss(x)`),
exponential moving averages, and `state_dict()`. So while a param is being gathered, the Parameter
has another class, which has a `__torch_function__`: every torch operator that Python code calls
with it waits first. Kernels of other packages that are not torch operators are not seen there.
Modules call them, and a module waits for its own params before `forward`. On a device the current
stream waits and not the CPU, so the class stays until the gather has ended: every stream that reads
the param has to wait.

[Note: compiled models] torch.compile reads params in code that it generates. Its guards see that
the class of a param has changed, and it compiles again. When that begins, all gathers are waited
for, and from then on `step()` itself waits for them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from megatron_distopt.buffers import DESCRIBING
from megatron_distopt.comm import Communicator
from megatron_distopt.hosts.torch.cpp_calls import before_cpp_calls

#: Operators that read nothing of the values.
_DESCRIBING = {
    *DESCRIBING,
    vars(torch._C.TensorBase)["grad"].__set__,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
}

#: By the id of a param that is pending, the gather that it waits for.
_pending: dict[int, ref[ParamGather]] = {}
#: All gathers of this process that are overlapped, for torch.compile.
_gathers: WeakSet[ParamGather] = WeakSet()


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
        """Copies the param with its usual class: nothing would restore the class of a copy."""
        param = _gathered(self)
        return memo.setdefault(id(param), type(param)(param.detach().clone(), param.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _gathered(self).__reduce_ex__(protocol)


def _gather_of(param: Any) -> ParamGather | None:
    gather = _pending.get(id(param))
    return None if gather is None else gather()


def _wait_for(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Parameter):
            if gather := _gather_of(value):
                gather.wait_for(value)
        elif isinstance(value, torch._C.ScriptMethod):
            _wait_for([value.owner])
        elif isinstance(value, torch._C.ScriptModule):
            parts: Any = (torch._C.ParameterDict(value), torch._C.ModuleDict(value))
            _wait_for(part for each in parts for _, part in each.items())
        elif isinstance(value, (list, tuple)):
            _wait_for(value)
        elif isinstance(value, dict):
            _wait_for(value.values())


def _gathered(param: Any) -> Any:
    """Waits until the param has its values and its usual class, and returns it."""
    if gather := _gather_of(param):
        gather.finish()
    return param


@functools.cache
def _pending_class(usual: type[Parameter]) -> type[Parameter]:
    return type("PendingParameter", (_PendingMixin, usual), {"__module__": __name__})


class ParamGather:
    """Gathers the params of a model after a step. With overlap, a read of a param waits for it."""

    def __init__(self, communicator: Communicator, chunks: Sequence[Module]) -> None:
        self._communicator, self._chunks = communicator, chunks
        self._names: dict[Parameter, str] = {}
        self._handles: list[RemovableHandle] = []
        self._params_of_bucket: dict[int, list[Parameter]] = {}
        #: By bucket that is pending, its params and their classes.
        self._usual: dict[int, list[tuple[Parameter, type[Parameter]]]] = {}
        #: Whether torch.compile reads params, see [Note: compiled models].
        self._is_compiled = False
        if communicator.overlaps_params:
            _gathers.add(self)
            before_cpp_calls(_before_cpp_call)

    def add(self, named: Mapping[str, Parameter]) -> None:
        """Takes over further params that the communicator gathers. Called between two steps, on all
        ranks alike."""
        if not self._communicator.overlaps_params:
            return
        self._names |= {param: name for name, param in named.items()}
        for name, param in named.items():
            self._params_of_bucket.setdefault(self._communicator.gather_of(name), []).append(param)
        self._remove_hooks()
        for module in {module: None for chunk in self._chunks for module in chunk.modules()}:
            own = [param for param in module.parameters(recurse=False) if param in self._names]
            # A script module takes no hooks; its calls wait, see [Note: reads in C++].
            if own and not self._is_compiled and not isinstance(module, torch.jit.ScriptModule):
                # Before all other hooks, because they may read params.
                self._handles.append(
                    module.register_forward_pre_hook(_BeforeForward(own), prepend=True)
                )

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def release(self) -> None:
        """Ends the gathering: the params are torch's again."""
        self.finish()
        self._remove_hooks()

    def gather(self) -> None:
        """Collective: gathers the params that their owners have updated. With overlap it only
        begins to."""
        if self._usual:
            self.finish()
        self._communicator.gather()
        if not self._communicator.overlaps_params:
            return
        # torch's compiler is watched only after the program imported it: the import takes seconds.
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and _compiler_starts not in handler.start_callbacks:
            handler.register_start_callback(_compiler_starts)
        if self._is_compiled or self._communicator.group.size == 1:
            self._communicator.finish_params()
            return
        for number, params in self._params_of_bucket.items():
            self._usual[number] = [(param, type(param)) for param in params]
            for param in params:
                _pending[id(param)] = ref(self)
                param.__class__ = _pending_class(type(param))

    def gather_now(self) -> None:
        """Collective: gathers without overlap."""
        self.finish()
        self._communicator.gather(is_overlapped=False)

    def wait_for(self, param: Parameter) -> None:
        """Waits until a param may be read on the current stream."""
        name = self._names[param]
        if self._communicator.param_needed(name):
            self._restore(self._communicator.gather_of(name))

    def _restore(self, number: int) -> None:
        for param, usual in self._usual.pop(number, ()):
            param.__class__ = usual
            _pending.pop(id(param), None)

    def gather_in_step(self) -> None:
        """Ends the overlap: waits for the present gather now, and for later ones in `step()`."""
        self._is_compiled = True
        self.finish()
        self._remove_hooks()

    def finish(self) -> None:
        """Waits until all params are there."""
        self._communicator.finish_params()
        for number in list(self._usual):
            self._restore(number)


class _BeforeForward:
    """Waits for a module's own params before its forward pass. A copy of the module waits for the
    params of the original."""

    def __init__(self, params: Sequence[Parameter] = ()) -> None:
        self._params = params

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # see [Note: compiled models]
            _wait_for(self._params)

    def __deepcopy__(self, memo: Any) -> _BeforeForward:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _BeforeForward, ()


def _before_cpp_call(call: str, args: Sequence[Any]) -> None:
    """Waits for params that C++ code is about to read, see [Note: reads in C++].

    A module that becomes a script module loses its hooks, so from then on its params are gathered
    in `step()`.
    """
    if _pending:
        _wait_for(args)
    params = {param for each in args if isinstance(each, Module) for param in each.parameters()}
    for gather in list(_gathers) if params else ():
        if not params.isdisjoint(gather._names):
            gather.gather_in_step()


def _compiler_starts(*_: Any) -> None:
    """Waits for all gathers, now and from then on in `step()`; see [Note: compiled models]."""
    for gather in list(_gathers):
        if gather._usual:
            gather.gather_in_step()
