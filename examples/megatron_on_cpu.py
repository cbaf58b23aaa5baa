"""Lets megatron-core 0.9 to 0.19 train where there is no accelerator: over gloo, in the host's
memory.

megatron-core names CUDA in five ways. `install()` maps four of them to the CPU and
`map_type_strings()` the fifth, and each mapping below says what breaks without it. Where CUDA is
available neither does anything, so a script calls `install()` in any case and runs unchanged on a
GPU.

    import megatron_on_cpu

    megatron_on_cpu.install()             # for the life of the process, or with
    megatron_on_cpu.install():       # for a while; `undo = install()` and `undo()` say the same
        ...

This serves the examples and the tests. The package `megatron_distopt` neither imports nor needs it.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_Result = TypeVar("_Result")

FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
)
"""The functions of torch to which megatron-core gives a cuda device."""


class Undo(ExitStack):
    """Holds what was there before. Call it, or leave its `with` block, to put that back; a second
    call does nothing."""

    def __call__(self) -> None:
        self.close()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`. An inherited attribute is uncovered again by deleting ours, not by
        copying it down."""
        if name in vars(owner):
            self.callback(setattr, owner, name, getattr(owner, name))
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)


def install() -> Undo:
    """Map the four ways in which megatron-core's models, buffers and schedules name CUDA. Returns
    the undo."""
    undo = Undo()
    if not torch.cuda.is_available():
        _map_current_device(undo)
        _map_device_arguments(undo)
        _map_random_state(undo)
        _map_synchronize_and_moves(undo)
    return undo


def map_type_strings() -> Undo:
    """Report CPU tensors as 'torch.cuda.FloatTensor' and so on. Returns the undo.

    Only megatron-core's *own* optimizers and its gradient clipping compare `tensor.type()` with
    such strings, and raise TypeError without this. It is apart from `install()` because it misleads
    everybody else who asks for a type: use it to run those optimizers as a reference.
    """
    undo = Undo()
    if not torch.cuda.is_available():
        undo.replace(Tensor, "type", _type_or_cuda_name)
    return undo


def _map_current_device(undo: Undo) -> None:
    """`device=torch.cuda.current_device()`: without it no DDP buffer, no pipeline receive buffer
    can be allocated."""
    undo.replace(torch.cuda, "current_device", lambda: _CPU)


def _map_device_arguments(undo: Undo) -> None:
    """`device='cuda'`: without it loss scale, found_inf, norms and token counters cannot be
    allocated.

    The factories are wrapped: a TorchFunctionMode would do it too, but it sees every operation of
    the model.
    """
    for name in FACTORIES:
        undo.replace(torch, name, _on_cpu_where_cuda_is_asked_for(getattr(torch, name)))


def _map_random_state(undo: Undo) -> None:
    """The CUDA generator becomes the CPU's. Without it the tracker's states are never set, and
    results differ silently.

    `_set_cuda_rng_state` would leave the state with torch, to be set when CUDA starts, which never
    happens. The tracker also warns when the CPU generator moved under it; here it has to, so that
    one warning is dropped.
    """
    from megatron.core.tensor_parallel import random

    undo.replace(torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    for owner in (torch.cuda, torch.cuda.random):
        undo.replace(owner, "get_rng_state", lambda device="cuda": torch.get_rng_state())
    undo.replace(random, "_set_cuda_rng_state", _set_rng_state)
    logger = logging.getLogger(random.__name__)
    logger.addFilter(_is_not_about_the_cpu_generator)
    undo.callback(logger.removeFilter, _is_not_about_the_cpu_generator)


def _map_synchronize_and_moves(undo: Undo) -> None:
    """`torch.cuda.synchronize()` in pipeline sends and timers, `.cuda()` on embeddings that two
    stages share.

    Streams: megatron-core makes some for experts and for several instances of the distributed
    optimizer, and 0.19 hands the current one on around its reductions of gradients.
    """
    undo.replace(torch.cuda, "synchronize", lambda device=None: None)
    undo.replace(torch.cuda, "current_stream", lambda device=None: _Stream())
    undo.replace(torch.cuda, "default_stream", lambda device=None: _Stream())
    undo.replace(torch.cuda, "stream", lambda stream: nullcontext())
    undo.replace(torch.cuda, "Stream", _Stream)
    undo.replace(torch.cuda, "Event", _Stream)
    undo.replace(Tensor, "cuda", lambda self, *args, **kwargs: self)


class _Stream:
    """A stream or an event where everything is done at once: whoever waits for it goes on."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., "_Stream"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _on_cpu_where_cuda_is_asked_for(factory: Callable[..., _Result]) -> Callable[..., _Result]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> _Result:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _set_rng_state(new_state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _is_not_about_the_cpu_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


_plain_type = Tensor.type


def _type_or_cuda_name(tensor: Tensor, *args: Any, **kwargs: Any) -> str | Tensor:
    """`tensor.type()` with CUDA's name in it; `tensor.type(dtype)`, the conversion, as ever."""
    result = _plain_type(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result
