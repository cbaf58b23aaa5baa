"""What `megatron-distopt doctor` says about this Python and this machine.

Imports torch, and DeepSpeed where it is installed.
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_distopt.cli.show import Finding, noted, ok, problem
from megatron_distopt.comm import available_backends, default_backend
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.source.found import Need, Survey
from megatron_distopt.optimizer.accelerator import CUDA, Accelerator, find_accelerator
from megatron_distopt.optimizer.choice import choose_inner

_SECTION = "machine"
#: The module that a fork imports from a package, and how to install it.
_TAKEN_FROM = {"amp_C": "amp_C", "apex": "apex.optimizers", "transformer_engine": "transformer_engine.pytorch"}
_HOW_TO_GET = {
    "amp_C": "Build NVIDIA apex from its sources with its CUDA extensions",
    "apex": "Build NVIDIA apex from its sources; pip install apex gets an unrelated project",
    "transformer_engine": "Run pip install transformer-engine[pytorch]",
}
#: The distribution that contains a launcher.
_LAUNCHERS = {"torchrun": "torch", "deepspeed": "deepspeed"}


def describe_machine(config: DistOptConfig, found: Survey | None) -> Iterator[Finding]:
    """Yields findings about device, kernels, process groups and launchers.

    Args:
        config: what the environment asks for.
        found: the host; None where there is none.
    """
    yield ok(_SECTION, "python", f"{platform.python_version()} ({sys.executable})")
    yield ok(_SECTION, "torch", str(torch.__version__))
    try:
        accelerator = find_accelerator(config.accelerator)
    except Exception as error:  # noqa: BLE001 - DeepSpeed's import fails in many ways, and each is to be shown
        yield problem(_SECTION, "accelerator", _accelerator_reason(error))
        accelerator = Accelerator(CPU, "torch")
    else:
        yield ok(_SECTION, "accelerator", f"{accelerator.device_type}, named by {accelerator.named_by}")
    yield _inner(config, accelerator.device_type)
    yield from _apex(config, accelerator.device_type)
    yield from _kernels(found, accelerator.device_type)
    yield _process_groups(accelerator.device_type)
    yield from map(_launcher, _LAUNCHERS)


def _accelerator_reason(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    rule, remedy = "be importable where it is installed", "Repair deepspeed, or set MEGATRON_DISTOPT_ACCELERATOR=torch"
    return refusal("accelerator", f"deepspeed fails ({error})", rule, remedy)


def _inner(config: DistOptConfig, device_type: str) -> Finding:
    try:
        choice = choose_inner(config, device_type)
    except ConfigError as error:
        return problem(_SECTION, "inner optimizer", str(error))
    why = f" ({'; '.join(choice.why)})" if choice.why else " (the best for this device)"
    return ok(_SECTION, "inner optimizer", choice.name + why)


def _apex(config: DistOptConfig, device_type: str) -> Iterator[Finding]:
    """Says whether an installed apex is NVIDIA's; PyPI has an unrelated project of that name."""
    if not _is_importable("apex"):
        return
    if _is_importable(_TAKEN_FROM["apex"]):
        yield ok(_SECTION, "apex", "NVIDIA's")
        return
    try:
        choose_inner(dataclasses.replace(config, optimizer="adam", adam="apex"), device_type)
    except ConfigError as error:
        yield noted(_SECTION, "apex", str(error))


def _kernels(found: Survey | None, device_type: str) -> Iterator[Finding]:
    needs = found.needs if found is not None else ()
    for package in dict.fromkeys(need.package for need in needs):
        of_it = [need for need in needs if need.package == package]
        yield _kernel(package, of_it, device_type)


def _kernel(package: str, needs: list[Need], device_type: str) -> Finding:
    places = ", ".join(str(need.place) for need in needs)
    if _is_importable(_TAKEN_FROM[package]):
        return ok(_SECTION, f"needs {package}", f"importable; imported in {places}")
    if device_type != CUDA and all(need.is_conditional for need in needs):
        text = f"not importable, and not needed on {device_type}: imported under a condition in {places}"
        return noted(_SECTION, f"needs {package}", text)
    rule = f"be importable, because the host imports {_TAKEN_FROM[package]} in {places}"
    reason = refusal(f"package {package}", "not importable", rule, _HOW_TO_GET[package])
    return problem(_SECTION, f"needs {package}", reason)


def _is_importable(module: str) -> bool:
    """Whether a module can be found; importing the packages that contain it may raise any exception."""
    try:
        return find_spec(module) is not None
    except Exception:  # noqa: BLE001
        return module in sys.modules


def _process_groups(device_type: str) -> Finding:
    backends, needed = available_backends(), default_backend(device_type)
    if needed is None and backends:
        return ok(_SECTION, "process groups", ", ".join(backends))
    if needed in backends:
        return ok(_SECTION, "process groups", f"{', '.join(backends)}; {needed} for {device_type}")
    got = ", ".join(backends) or "none"
    rule, remedy = f"include {needed or 'one'} for {device_type}", "Install a torch that was built with it"
    return problem(_SECTION, "process groups", refusal("process group backends", got, rule, remedy))


def _launcher(name: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        instead = "; python -m torch.distributed.run is the same" if name == "torchrun" else ""
        return noted(_SECTION, name, f"not on PATH{instead}")
    if Path(path).parent != Path(sys.executable).parent:
        return noted(_SECTION, name, f"{path}, which is not in the folder of this Python ({sys.executable})")
    return ok(_SECTION, name, f"{_version_of(_LAUNCHERS[name])} ({path})")


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown version"
