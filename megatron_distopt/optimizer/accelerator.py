"""Which device training runs on. Only this file of the package may name the API of a device vendor.

If DeepSpeed is installed, its accelerator abstraction names the device, otherwise torch does.
DeepSpeed is not imported before an optimizer is built, because that takes seconds and initializes
the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, LayoutError

CUDA = "cuda"

#: Devices whose collectives have no float64, whether or not their kernels have it.
_WITHOUT_FLOAT64 = ("mps", "hpu", "npu")


@dataclass(frozen=True)
class Accelerator:
    """The device that training runs on."""

    device_type: str  # as in `torch.device(...).type`
    named_by: str  # "deepspeed" or "torch"


def find_accelerator(choice: str = "auto") -> Accelerator:
    """The accelerator of this process.

    Raises:
        ConfigError: if `choice` is "deepspeed" and DeepSpeed is not installed.
    """
    has_deepspeed = find_spec("deepspeed") is not None
    if choice == "deepspeed" and not has_deepspeed:
        raise ConfigError(
            "accelerator is 'deepspeed', but DeepSpeed is not installed. Run pip install "
            "deepspeed, or write accelerator='torch'."
        )
    if has_deepspeed and choice != "torch":
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        return Accelerator(accelerator.device_name(), "deepspeed")
    return Accelerator(_torch_device_type(), "torch")


def _torch_device_type() -> str:
    """The type of the device that torch can use. A torch that was compiled for a device names it
    even on a machine without it, so this asks whether it is available."""
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        return CPU if current is None else current.type
    return CUDA if torch.cuda.is_available() else CPU


def check_devices(devices: set[torch.device], accelerator: Accelerator) -> torch.device:
    """The one device of all params.

    Raises:
        LayoutError: if there are several devices, or one that is neither the accelerator nor the
            CPU.
    """
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise LayoutError(
            f"The params are on {found}, but they must all be on one device. Move the model to one "
            "device first."
        )
    device = next(iter(devices))
    if device.type not in (accelerator.device_type, CPU):
        known = " or ".join(dict.fromkeys((accelerator.device_type, CPU)))
        remedy = "Move the model with model.to(...) first"
        if accelerator.named_by == "deepspeed" and device.type == _torch_device_type():
            remedy = (
                f"torch names {device.type}, so write accelerator='torch' or "
                "MEGATRON_DISTOPT_ACCELERATOR=torch"
            )
        raise LayoutError(
            f"The params are on {device}, but they must be on {known}, because "
            f"{accelerator.named_by} names {accelerator.device_type} as accelerator. {remedy}."
        )
    return device


def has_torch_fused(device_type: str) -> bool:
    """Whether torch's optimizers have fused kernels for the device."""
    utils = import_module("torch.utils._foreach_utils")
    return device_type in utils._get_fused_kernels_supported_devices()


def usable_device(device_type: str) -> torch.device:
    """The current device of that type, or the CPU if this machine has none."""
    return torch.device(device_type if device_type == _torch_device_type() else CPU)


def stats_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which gradient statistics are summed: float64 if the device has it, so that the
    order of the sums does not matter."""
    has_float64 = device.type not in _WITHOUT_FLOAT64 and has_dtype(device.type, torch.float64)
    return torch.float64 if has_float64 else torch.float32


@cache
def has_dtype(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the device has tensors of a dtype. If this machine does not have the device, it is
    assumed to."""
    if device_type != _torch_device_type():
        return True  # it cannot be tried here
    try:
        torch.zeros((), dtype=dtype, device=device_type)
    except (TypeError, RuntimeError):
        return False
    return True
