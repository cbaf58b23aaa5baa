"""The functions of the package ezpz that argonne-lcf's Megatron-DeepSpeed calls while it starts and trains.

They stand in for it where it is not installed. What is not here refuses to be used, see `Substitute` in hosts/fixes.py.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from megatron_distopt.optimizer.accelerator import find_accelerator

F = TypeVar("F", bound=Callable[..., object])


def get_rank() -> int:
    """Returns the rank in the job, as the launcher says it."""
    return int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Returns the number of ranks in the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Returns the rank on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_torch_device_type() -> str:
    """Returns the type of the device that training runs on."""
    return find_accelerator().device_type


def get_torch_device() -> str:
    """Returns the same as `get_torch_device_type`."""
    return get_torch_device_type()


def get_hostname() -> str:
    """Returns the name of this machine."""
    return socket.gethostname()


def get_logger(name: str, *args: object, **options: object) -> logging.Logger:
    """Returns the logger of that name, and lets it be seen: the original sets up handlers, too."""
    logging.basicConfig()
    return logging.getLogger(name)


def synchronize() -> None:
    """Waits for the device."""
    import_module("deepspeed.accelerator").get_accelerator().synchronize()


def timeitlogit(*args: object, **options: object) -> Callable[[F], F]:
    """Returns a decorator that leaves a function as it is; the original logs how long it takes."""
    return lambda function: function
