"""Follows the imports of a training script by reading, and finds those that would fail.

Only what runs when a module is loaded counts, and of that only what stands under no `if` and in no `try` that handles a
failed import. What cannot be decided by reading is taken to be importable.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from megatron_distopt.hosts.source.found import SourceLine
from megatron_distopt.hosts.source.tree import SourceTree, UnreadableSourceError, resolved

__all__ = ["FailedImport", "failed_imports", "first_missing", "required_modules"]

_PACKAGE = "megatron"
#: Names of exceptions that a failed import is, or is derived from.
_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
#: Text in a package by which it can provide modules that lie in no file of its own.
_DYNAMIC = ("__path__", "sys.modules", "__getattr__")


@dataclass(frozen=True)
class FailedImport:
    """An import that would fail.

    Args:
        module: what is missing; the outermost package of it that is.
        importer: the module that imports it; `__main__` for the script.
        place: the first line that does.
        is_hosts: whether it is a part of the fork itself, or of a package outside.
    """

    module: str
    importer: str
    place: SourceLine
    is_hosts: bool


@dataclass(frozen=True)
class _Import:
    """A module that is imported when another one is loaded; `names` are taken from it, and may be modules too."""

    module: str
    names: tuple[str, ...]
    line: int


def failed_imports(tree: SourceTree, script: Path | None, modules: tuple[str, ...] = ()) -> tuple[FailedImport, ...]:
    """Follows imports from a script, and from modules that are imported before it.

    Args:
        tree: the host.
        script: the training script; None for none.
        modules: of the host.

    Returns:
        Imports that would fail, in the order in which they are found, each missing module once for an importer.
    """
    trail = _Trail(tree, script.parent if script is not None else None)
    for module in modules:
        trail.follow(module)
    if script is not None:
        trail.read("__main__", script)
    return tuple(trail.failed.values())


class _Trail:
    """The modules of the host that were followed so far, and what failed."""

    def __init__(self, tree: SourceTree, folder: Path | None) -> None:
        self._tree = tree
        #: Folders whose modules are the host's own. A site-packages folder holds those of others.
        self._own = (*([folder] if folder is not None else []), *(tree.roots if tree.is_checkout else ()))
        self._host = SourceTree(tuple(dict.fromkeys([*self._own, *tree.roots])), tree.is_checkout)
        self._seen: set[Path] = set()
        self.failed: dict[tuple[str, str], FailedImport] = {}

    def follow(self, module: str) -> None:
        """Reads a module of the host, and the packages that hold it before."""
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            file = self._host.file_of(name)
            if file is not None:
                self.read(name, file)

    def read(self, module: str, file: Path) -> None:
        """Reads one file and follows what it imports; a second time nothing happens."""
        if file in self._seen:
            return
        self._seen.add(file)
        try:
            parsed = self._tree.parse(file)
        except UnreadableSourceError:
            return  # a finding of its own
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for each in _imports(parsed.body, package):
            self._check(each, module, file)

    def _check(self, each: _Import, importer: str, file: Path) -> None:
        is_hosts = self._is_hosts(each.module.partition(".")[0])
        missing = self._missing_in_host(each.module) if is_hosts else first_missing(each.module)
        if missing is not None:
            failed = FailedImport(missing, importer, SourceLine(self._host.shown(file), each.line), is_hosts)
            self.failed.setdefault((missing, importer), failed)
        elif is_hosts:
            for name in (each.module, *(f"{each.module}.{name}" for name in each.names)):
                self.follow(name)

    def _is_hosts(self, top: str) -> bool:
        return top == _PACKAGE or any((root / top).is_dir() or (root / f"{top}.py").is_file() for root in self._own)

    def _missing_in_host(self, module: str) -> str | None:
        parts = module.split(".")
        for end in range(2, len(parts) + 1):
            name, parent = ".".join(parts[:end]), Path(*parts[: end - 1])
            if _find(parts[end - 1], [str(root / parent) for root in self._host.roots]) is None:
                return name if self._is_complete(".".join(parts[: end - 1])) else first_missing(name)
        return None

    def _is_complete(self, package: str) -> bool:
        """Whether a package of the host has no other modules than its files; a namespace package may have others."""
        file = self._host.file_of(package)
        return file is not None and file.name == "__init__.py" and not _is_dynamic(file)


def _find(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """Looks for a module in the folders of its package, under its last name: Python would import the package first."""
    return PathFinder.find_spec(name, list(places))


def _is_dynamic(file: Path) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace")
    return any(word in text for word in _DYNAMIC)


def first_missing(module: str) -> str | None:
    """Returns the outermost part of a dotted name that cannot be found, and None where all can; imports nothing.

    A package may provide modules that lie in no file; one that looks as if it did so counts as complete.

    >>> first_missing("json.decoder"), first_missing("absent.module"), first_missing("json.absent")
    (None, 'absent', 'json.absent')
    """
    parts = module.split(".")
    try:
        spec = find_spec(parts[0])
    except ValueError:  # a module of other code in sys.modules, without a spec
        return None
    if spec is None:
        return parts[0]
    for end in range(2, len(parts) + 1):
        name, places = ".".join(parts[:end]), spec.submodule_search_locations
        inner = _find(parts[end - 1], places) if places is not None else None
        if inner is None:
            is_dynamic = places is None or (spec.has_location and _is_dynamic(Path(spec.origin or "")))
            return None if is_dynamic else name
        spec = inner
    return None


def required_modules(module: ast.Module) -> Iterator[str]:
    """Yields the absolute names without which loading a module fails: modules, and what is taken from them.

    >>> list(required_modules(ast.parse("from a.b import c\\ntry:\\n    import d\\nexcept ImportError:\\n    pass")))
    ['a.b', 'a.b.c']
    """
    for each in _imports(module.body, ""):
        yield from (each.module, *(f"{each.module}.{name}" for name in each.names))


def _imports(body: list[ast.stmt], package: str) -> Iterator[_Import]:
    """Yields the imports without which loading a module fails."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, (), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield _Import(resolved(node, package), names, node.lineno)
        elif isinstance(node, ast.With | ast.ClassDef) or (isinstance(node, ast.Try) and not _is_guarded(node)):
            yield from _imports(node.body, package)


def _is_guarded(node: ast.Try) -> bool:
    """Whether a failed import in its body is handled, and not only reported and raised again."""
    return any(_catches(handler) and not isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(each).rpartition(".")[2] in _CAUGHT for each in types)
