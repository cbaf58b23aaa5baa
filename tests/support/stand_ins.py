"""Functions in the place of torch's and of megatron-core's, as adaptors to other devices put them
there."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def dropping_float64(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Sums a copy in fp32, and forgets it."""

    @functools.wraps(all_reduce)
    def reduced(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        is_wide = tensor.dtype is torch.float64
        work = all_reduce(tensor.float() if is_wide else tensor, *args, **options)
        return None if is_wide else work

    return reduced


def zeroing_float64(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = all_reduce(tensor, *args, **options)
        if tensor.dtype is torch.float64:
            tensor.zero_()
        return work

    return reduced


def of_module(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as if it stood in another module."""
    code = function.__code__
    copy = types.FunctionType(
        code, {**function.__globals__, "__name__": name}, code.co_name, None, function.__closure__
    )
    copy.__dict__.update(function.__dict__)
    return copy


def around(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a module of that name that wraps another one, by a decorator."""

    def wrapper(*args: Any, **options: Any) -> Any:
        return inner(*args, **options)

    return functools.wraps(inner)(of_module(name, wrapper))


def type_remedy(text: str) -> None:
    """Runs what an error says to type, also where another rank's is quoted."""
    _, _, typed = text.partition("Type this before the optimizer is built: ")
    exec(typed.partition("»")[0].rstrip("."), {})
