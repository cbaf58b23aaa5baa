"""What a host asks of the machine besides packages, read from its source: devices and compilers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.hosts.source.found import SourceLine
from megatron_distopt.hosts.source.imports import FailedImport
from megatron_distopt.hosts.source.tree import SourceTree, UnreadableSourceError

__all__ = ["DeviceAssert", "asserted_devices", "makefiles", "makes"]

#: Functions of a host that run `make` in the folder of their own file.
_COMPILE = ("compile_helper", "compile_helpers")


@dataclass(frozen=True)
class DeviceAssert:
    """An assert of the host that a kind of device is there.

    Args:
        device: the module of torch that is asked.
        place: the line of the assert.
    """

    device: str
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
