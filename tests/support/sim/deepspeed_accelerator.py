"""The simulated accelerator as DeepSpeed's accelerator abstraction names a device."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.support.sim import collectives
from tests.support.sim.machine import DEVICE, Event, Stream, machine

__all__ = ["use"]


class SimAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """As those of HPU and NPU: asynchronous, one device a process, no fp16."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = DEVICE, collectives.NAME

    Stream, Event = Stream, Event

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return DEVICE if device_index is None else f"{DEVICE}:{device_index}"

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{DEVICE}:0"

    def device_count(self) -> int:
        return 1

    def current_stream(self, device_index: Any = None) -> Stream:
        return machine.current

    def synchronize(self, device_index: Any = None) -> None:
        torch.accelerator.synchronize()

    def is_fp16_supported(self) -> bool:
        return False


def use() -> None:
    """Makes it DeepSpeed's accelerator in this process."""
    set_accelerator(SimAccelerator())
