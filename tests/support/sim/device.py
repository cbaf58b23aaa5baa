"""Makes the simulated accelerator a device of torch."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.sim import collectives
from tests.support.sim.machine import DEVICE, Event, Stream, machine
from tests.support.sim.memory import memory
from tests.support.sim.operators import pinned_like_empty, register, rules

_registered: list[Any] = []


class Personality(enum.Enum):
    """Which device it is like."""

    #: Has all dtypes, as CUDA.
    FULL = "full"
    #: Has neither float64 nor fp16, as HPU, NPU and MPS.
    SMALL = "small"


class _Module(types.ModuleType):
    """torch.sim"""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        super().__init__(f"torch.{DEVICE}")

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def current_stream(self, device: Any = None) -> Stream:
        return machine.current

    def default_stream(self, device: Any = None) -> Stream:
        return machine.default

    def set_stream(self, stream: Stream) -> None:
        machine.current = stream

    def stream(self, stream: Stream) -> Stream:
        return stream

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def synchronize(self, device: Any = None) -> None:
        machine.counts.synchronisations.append("synchronize")
        machine.finish()

    def empty_cache(self) -> None:
        memory.collect()

    def get_rng_state(self, *_: Any) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, *_: Any) -> None:
        pass


def install(personality: Personality = Personality.FULL) -> None:
    """Adds the device `sim` to torch in this process, for good."""
    rules.missing = (
        frozenset()
        if personality is Personality.FULL
        else frozenset((torch.float64, torch.float16))
    )
    if not _registered:
        module = _Module()
        _setup_privateuseone_for_python_backend(DEVICE, module)
        _registered.extend(register())
        machine.start()
        _replace_accelerator(module)
        _lead_backward()
        _keep_params()
        collectives.register()


def _replace_accelerator(module: _Module) -> None:
    """torch.accelerator asks C++, which knows one stream."""
    torch.accelerator.current_stream = module.current_stream  # type: ignore[assignment]
    torch.accelerator.set_stream = module.set_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = module.synchronize  # type: ignore[assignment]
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc,assignment]
    usual = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return pinned_like_empty(*args, **kwargs) if pin_memory else usual(*args, **kwargs)

    torch.empty = empty


def _keep_params() -> None:
    """A param that is moved to the device stays the same object with its attributes, as one that is
    moved to a GPU."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    usual = torch.nn.Module._apply

    def apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        kept = {param: dict(vars(param)) for param in self.parameters()}
        moved = usual(self, *args, **kwargs)
        for param, attributes in kept.items():
            vars(param).update(attributes)
        return moved

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _lead_backward() -> None:
    """torch's thread of backward uses the stream on which the forward pass ran, taken to be that of
    the caller."""
    from torch.autograd import graph

    usual = graph._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        machine.of_backward = machine.current
        return usual(*args, **kwargs)

    for name in ("torch.autograd.graph", "torch.autograd"):
        sys.modules[name]._engine_run_backward = run  # type: ignore[attr-defined]
