"""What a host asks of the machine besides packages, read from its source: devices, variables, kernels and compilers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.hosts.source.found import SourceLine
from megatron_distopt.hosts.source.imports import FailedImport
from megatron_distopt.hosts.source.tree import SourceTree, UnreadableSourceError

#: Functions of a host that run `make` in the folder of their own file.
_COMPILE = ("compile_helper", "compile_helpers")


_VARIABLE = re.compile(r"os\.(?:environ\.get|getenv)\('(?P<variable>\w+)'(?:, [^)]*)?\) != '(?P<value>[^']*)'")
_DEVICE = re.compile(r"[\w.]*get_accelerator\(\)\.device_name\(\) == '(?P<device>\w+)'")
_BUILDER = re.compile(r"[\w.]*get_accelerator\(\)\.get_op_builder\('(\w+)'\)")
_LOAD = re.compile(r"(\w+)\(\)\.load\(\)")


@dataclass(frozen=True)
class DeviceAssert:
    """An assert of the host that a kind of device is there.

    Args:
        device: the module of torch that is asked.
        place: the line of the assert.
    """

    device: str
    place: SourceLine


@dataclass(frozen=True)
class VariableCheck:
    """A place where the host raises unless an environment variable has a value.

    Args:
        variable, value: what it compares.
        device: the device on which it does so; empty for all.
        options: it raises where one of these arguments is on; empty for always.
        place: the line of the comparison.
    """

    variable: str
    value: str
    device: str
    options: tuple[str, ...]
    place: SourceLine


@dataclass(frozen=True)
class KernelLoad:
    """A kernel of DeepSpeed's that the host loads while it is imported.

    Args:
        builder: the name of its builder.
        place: the line that loads it.
    """

    builder: str
    place: SourceLine


def asserted_devices(tree: SourceTree, files: Sequence[Path]) -> Iterator[DeviceAssert]:
    """Yields the asserts `torch.<device>.is_available()` in files of the host."""
    for file in files:
        for node in ast.walk(_parsed(tree, file)):
            device = _asserted(node)
            if device and isinstance(node, ast.Assert):
                yield DeviceAssert(device, SourceLine(tree.shown(file), node.lineno))


def _asserted(node: ast.AST) -> str:
    """Returns the device that an assert demands; empty for other statements.

    >>> _asserted(ast.parse("assert torch.xpu.is_available(), 'no xpu'").body[0])
    'xpu'
    """
    if not isinstance(node, ast.Assert):
        return ""
    words = ast.unparse(node.test).split(".")
    return words[1] if len(words) == 3 and (words[0], words[2]) == ("torch", "is_available()") else ""


def checked_variables(tree: SourceTree, files: Sequence[Path]) -> Iterator[VariableCheck]:
    """Yields comparisons of environment variables under which the host raises."""
    for file in files:
        for node in ast.walk(_parsed(tree, file)):
            if isinstance(node, ast.If) and _has_raise(node):
                yield from _compared(node, SourceLine(tree.shown(file), node.lineno))


def _has_raise(node: ast.If) -> bool:
    return any(isinstance(each, ast.Raise) for statement in node.body for each in ast.walk(statement))


def _compared(node: ast.If, place: SourceLine) -> Iterator[VariableCheck]:
    terms = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]
    unequal = [_VARIABLE.fullmatch(ast.unparse(term)) for term in terms]
    devices = [_DEVICE.fullmatch(ast.unparse(term)) for term in terms]
    if not all(variable or device for variable, device in zip(unequal, devices, strict=True)):
        return  # other conditions, which reading does not decide
    device = next((each["device"] for each in devices if each), "")
    inner = [each for each in node.body if isinstance(each, ast.If) and _has_raise(each)]
    options = tuple(ast.unparse(each.test).removeprefix("args.") for each in inner)
    yield from (VariableCheck(each["variable"], each["value"], device, options, place) for each in unequal if each)


def backend_lines(tree: SourceTree, files: Sequence[Path], option: str) -> Iterator[SourceLine]:
    """Yields the lines that make process groups with the backend that an argument names."""
    for file in files:
        for node in ast.walk(_parsed(tree, file)):
            for name, value in _named_values(node):
                if name == "backend" and ast.unparse(value) == f"args.{option}":
                    yield SourceLine(tree.shown(file), value.lineno)


def _named_values(node: ast.AST) -> Iterator[tuple[object, ast.expr]]:
    """Yields the name and value of a keyword argument, and of each entry of a dict."""
    if isinstance(node, ast.keyword):
        yield node.arg, node.value
    elif isinstance(node, ast.Dict):
        yield from ((getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True))


def loaded_kernels(tree: SourceTree, files: Sequence[Path]) -> Iterator[KernelLoad]:
    """Yields the kernels of DeepSpeed's that are loaded at the top of a module, where nothing handles their absence."""
    for file in files:
        module = _parsed(tree, file)
        builders = {name: match[1] for node in module.body for name, match in _builder_of(node)}
        for node in _unhandled(module.body):
            loaded = _LOAD.fullmatch(ast.unparse(node.value))
            if loaded and loaded[1] in builders:
                yield KernelLoad(builders[loaded[1]], SourceLine(tree.shown(file), node.lineno))


def _builder_of(node: ast.stmt) -> Iterator[tuple[str, re.Match[str]]]:
    match = _BUILDER.fullmatch(ast.unparse(node.value)) if isinstance(node, ast.Assign) else None
    if match and isinstance(node, ast.Assign):
        yield ast.unparse(node.targets[0]), match


def _unhandled(body: Sequence[ast.stmt]) -> Iterator[ast.Assign]:
    """Yields assignments at the top, also those in a `try` that does not handle a ValueError."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield node
        elif isinstance(node, ast.Try) and not any(_handles_value_error(each) for each in node.handlers):
            yield from _unhandled(node.body)


def _handles_value_error(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or bool(re.search(r"\b(ValueError|(Base)?Exception)\b", ast.unparse(handler.type)))


def makefiles(tree: SourceTree, files: Sequence[Path]) -> Iterator[Path]:
    """Yields the makefiles that the host runs when it starts: those beside a file that has a function for it."""
    for file in files:
        beside = file.with_name("Makefile")
        if beside.is_file() and any(_compiles(node) for node in ast.walk(_parsed(tree, file))):
            yield beside


def makes(tree: SourceTree, failed: FailedImport) -> Path | None:
    """Returns the folder of the host whose makefile builds a missing module; None where there is none."""
    package, _, name = failed.module.rpartition(".") if not failed.name else (failed.module, "", failed.name)
    for root in tree.roots:
        makefile = root.joinpath(*package.split("."), "Makefile")
        if makefile.is_file() and re.search(rf"\b{name}\b", makefile.read_text(encoding="utf-8")):
            return makefile.parent
    return None


def _compiles(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in _COMPILE


def _parsed(tree: SourceTree, file: Path) -> ast.Module:
    try:
        return tree.parse(file)
    except UnreadableSourceError:  # a finding of its own
        return ast.Module(body=[], type_ignores=[])
