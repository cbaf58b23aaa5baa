"""What `megatron-distopt doctor` says about this Python and this machine.

Imports torch, and DeepSpeed where it is installed.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_distopt.cli.show import Finding, ok, problem
from megatron_distopt.comm import available_backends, default_backend
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.accelerator import Accelerator, find_accelerator
from megatron_distopt.optimizer.choice import choose_inner

_SECTION = "machine"


def describe_machine(config: DistOptConfig) -> Iterator[Finding]:
    yield ok(_SECTION, "python", f"{platform.python_version()} ({sys.executable})")
    versions = str(torch.__version__)
    with suppress(PackageNotFoundError):
        versions += f"; deepspeed {version('deepspeed')}"
    yield ok(_SECTION, "torch", versions)
    try:
        accelerator = find_accelerator(config.accelerator)
    # DeepSpeed's import fails in many ways, and each is to be shown
    except Exception as error:  # noqa: BLE001
        found = f"deepspeed is installed, but its import fails ({error})"
        remedy = "Repair deepspeed, or set MEGATRON_DISTOPT_ACCELERATOR=torch"
        text = str(error) if isinstance(error, ConfigError) else f"{found}. {remedy}."
        yield problem(_SECTION, "accelerator", text)
        accelerator = Accelerator(CPU, "torch")
    else:
        text = f"{accelerator.device_type}, named by {accelerator.named_by}"
        yield ok(_SECTION, "accelerator", text)
    try:
        choice = choose_inner(config, accelerator.device_type)
        why = "; ".join(choice.why) or "the best for this device"
        yield ok(_SECTION, "inner optimizer", f"{choice.name} ({why})")
    except ConfigError as error:
        yield problem(_SECTION, "inner optimizer", str(error))
    yield _process_groups(accelerator.device_type)


def _process_groups(device_type: str) -> Finding:
    backends, needed = available_backends(), default_backend(device_type)
    if needed is None and backends:
        return ok(_SECTION, "process groups", ", ".join(backends))
    if needed in backends:
        return ok(_SECTION, "process groups", f"{', '.join(backends)}; {needed} for {device_type}")
    text = (
        f"torch has the backends {', '.join(backends) or 'none'}, and {device_type} needs "
        f"{needed or 'one'}"
    )
    return problem(_SECTION, "process groups", f"{text}. Install a torch that was built with it.")
