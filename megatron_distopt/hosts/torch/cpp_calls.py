"""Calls from Python into C++ code of torch that reads tensors without asking their class.

[Note: reads in C++] A class with a `__torch_function__` learns what Python code does with its
tensors. TorchScript, functorch and DLPack read tensors in C++ instead, also through the params that
a script module holds. Some tensors must not be read yet: gradients of one rank
(buffers/grad_buffer.py), and params that are being gathered (gather.py). Once there are any, the
calls that lead to C++ are watched. Two kinds of reads go unseen: those of a function that a program
imported by name earlier, and those of an extension that reads memory by its address.
tests/hosts/test_readers.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.dlpack

_CALLS: tuple[tuple[Any, str], ...] = (
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
    (torch._C.ScriptModule, "__deepcopy__"),
    (torch._C.ScriptModule, "save"),
    (torch._C.ScriptModule, "save_to_buffer"),
    (torch._C, "_freeze_module"),
    (torch.jit._recursive, "create_script_module"),  # of torch.jit.script
    (torch._functorch.vmap, "_add_batch_dim"),
    (torch._functorch.eager_transforms, "_wrap_for_grad"),
    (torch._functorch.eager_transforms, "_wrap_functional_tensor"),
    (torch._C, "_to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
)
_checks: dict[Callable[[str, Sequence[Any]], None], None] = {}


def before_cpp_calls(check: Callable[[str, Sequence[Any]], None]) -> None:
    """Calls `check` before each such call from now on, with its name and arguments.

    The first argument of a method is its object.
    """
    if not _checks:
        for owner, name in _CALLS:
            setattr(owner, name, _checked(getattr(owner, name), f"{owner.__name__}.{name}"))
    _checks[check] = None


def _checked(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for check in _checks:
            check(name, (*args, *kwargs.values()))
        return call(*args, **kwargs)

    return checked
