"""What `megatron-distopt doctor` says about what a fork asks of the machine, the environment and the launch flags."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from megatron_distopt.cli.show import Finding, ok, problem
from megatron_distopt.errors import refusal
from megatron_distopt.hosts.source.demands import (
    DeviceAssert,
    KernelLoad,
    VariableCheck,
    asserted_devices,
    backend_lines,
    checked_variables,
    loaded_kernels,
    makefiles,
)
from megatron_distopt.hosts.source.found import ParserOption, Survey
from megatron_distopt.hosts.source.tree import SourceTree

_SECTION = "start"
_BACKEND = "distributed_backend"


def describe_demands(
    found: Survey, tree: SourceTree, files: Sequence[Path], launch: Sequence[str]
) -> Iterator[Finding]:
    """Yields findings about devices, kernels, variables, backends and compilers.

    Args:
        found: what the fork's source says.
        tree: the fork.
        files: of the fork, that are loaded at the start.
        launch: words of the launch script.
    """
    given = read_flags(launch, found.options)
    yield from map(_device, asserted_devices(tree, files))
    yield from (each for load in loaded_kernels(tree, files) for each in _kernel(load))
    yield from (each for check in checked_variables(tree, files) for each in _variable(check, given, found.options))
    yield from _backend(found, tree, files, given)
    yield from (_compiled(tree, file) for file in makefiles(tree, files))


def _device(each: DeviceAssert) -> Finding:
    if _is_available(each.device):
        return ok(_SECTION, "device", f"{each.device}, which {each.place} asks for")
    rule, remedy = f"be available: {each.place} asserts it", "Start it on a machine that has it"
    return problem(_SECTION, "device", refusal(f"torch.{each.device}", "not available", rule, remedy))


def _is_available(device: str) -> bool:
    module = getattr(import_module("torch"), device, None) if find_spec("torch") is not None else None
    return module is not None and bool(module.is_available())


def _kernel(load: KernelLoad) -> Iterator[Finding]:
    """Asks DeepSpeed for the builder; one without an implementation raises where the host loads it."""
    with redirect_stdout(sys.stderr), suppress(Exception):  # DeepSpeed's import is a finding of its own
        builder = import_module("deepspeed.accelerator").get_accelerator().get_op_builder(load.builder)
        if builder is not None and "NotImplemented" in builder.__name__:
            rule = f"have an implementation: {load.place} loads it while the fork is imported"
            remedy = "Start it on a device that has it, or catch the ValueError there"
            got = "not implemented for this device"
            yield problem(_SECTION, "kernel", refusal(f"DeepSpeed's {load.builder}", got, rule, remedy))


def _variable(check: VariableCheck, given: SimpleNamespace, options: Sequence[ParserOption]) -> Iterator[Finding]:
    is_asked = not check.options or any(_is_on(name, given, options) for name in check.options)
    if is_asked and (not check.device or _is_available(check.device)):
        got = os.environ.get(check.variable)
        if got != check.value:
            rule, remedy = f"be {check.value}, or {check.place} raises", f"Run export {check.variable}={check.value}"
            text = refusal(check.variable, "not set" if got is None else got, rule, remedy)
            yield problem(_SECTION, "variable", text)


def _is_on(name: str, given: SimpleNamespace, options: Sequence[ParserOption]) -> bool:
    """Whether an argument is true: given, or true where its flag is not given, which then stores False."""
    default = any(option.name == name and (option.value is False or option.default is True) for option in options)
    return bool(getattr(given, name, default))


def _backend(found: Survey, tree: SourceTree, files: Sequence[Path], given: SimpleNamespace) -> Iterator[Finding]:
    option = next((each for each in found.options if each.name == _BACKEND), None)
    chosen = getattr(given, _BACKEND, option.default) if option is not None else None
    lines = list(backend_lines(tree, files, _BACKEND))
    if option is None or not isinstance(chosen, str) or not lines or find_spec("torch") is None:
        return
    has: Sequence[str] = import_module("megatron_distopt.comm").available_backends()
    if has and chosen not in has:
        rule = f"be one that torch has ({', '.join(has)}), because {lines[0]} makes process groups with it"
        remedy = f"Add {option.flag} {has[0]}"
        yield problem(_SECTION, "backend", refusal(option.flag, chosen, rule, remedy))


def _compiled(tree: SourceTree, makefile: Path) -> Finding:
    """Checks what the fork compiles its data index with, at the start of the first run."""
    lacking = [name for name in ("make", "python3", "python3-config", "c++") if shutil.which(name) is None]
    if "pybind11" in makefile.read_text(encoding="utf-8") and find_spec("pybind11") is None:
        lacking.append("pybind11")
    shown = tree.shown(makefile)
    if not lacking:
        return ok(_SECTION, "data index", f"{shown} can be compiled")
    remedy = "Run pip install pybind11" if lacking == ["pybind11"] else "Install a C++ compiler, make and pybind11"
    rule = f"be there, because the fork runs {shown} at its start"
    return problem(_SECTION, "data index", refusal("compiler", f"no {', '.join(lacking)}", rule, remedy))


def read_flags(words: Sequence[str], options: Sequence[ParserOption]) -> SimpleNamespace:
    """Parses launch flags without running the host's parser; flags that are not given leave no attribute.

    Args:
        words: flags and their values.
        options: of the host's parser; other flags get their own name, and True where no value follows.

    >>> read_flags(["--DDP-impl", "torch", "--deepspeed"], [])
    namespace(DDP_impl='torch', deepspeed=True)
    """
    known: Mapping[str, ParserOption] = {option.flag: option for option in options}
    parsed = SimpleNamespace()
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag.startswith("--"):
            option = known.get(flag)
            name = option.name if option else flag[2:].replace("-", "_")
            follows = [after for after in words[index + 1 : index + 2] if not after.startswith("--")]
            given = value or (follows[0] if follows else True)
            setattr(parsed, name, given if option is None or option.value is None else option.value)
    return parsed
