"""Follows the imports of a training script by reading, and finds those that would fail.

An import fails the start if it runs when a module is loaded and stands under no `if` and in no `try` that handles a
failed import. Others are found apart. What cannot be decided by reading is taken to be importable.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from megatron_distopt.hosts.source.found import SourceLine
from megatron_distopt.hosts.source.tree import SourceTree, UnreadableSourceError, bindings_of, resolved

_PACKAGE = "megatron"
#: Names of exceptions that a failed import is, or is derived from.
_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
#: Text in a package by which it can provide modules that lie in no file of its own.
_DYNAMIC = ("__path__", "sys.modules", "__getattr__")
#: Text in a module by which it can bind names that no statement at its top binds.
_BINDS_MORE = (*_DYNAMIC, "import *", "globals(", "vars(", "setattr(", "exec(", "global ")


@dataclass(frozen=True)
class FailedImport:
    """An import that would fail.

    Args:
        module: what is missing; the outermost package of it that is.
        importer: the module that imports it; `__main__` for the script.
        place: the first line that does.
        is_hosts: whether it is a part of the fork itself, or of a package outside.
        name: what is missing in the module, where that is there; empty where it is not.
    """

    module: str
    importer: str
    place: SourceLine
    is_hosts: bool
    name: str = ""


@dataclass(frozen=True)
class Followed:
    """What was found by following the imports of a script.

    Args:
        files: of the host, the script among them, that are loaded at the start.
        failed: imports without which the start fails, in the order in which they are found, each once for an importer.
        later: imports of packages that are not there, which run under a condition or in a function.
        unreadable: why a file cannot be loaded, by its path from the fork's folder.
    """

    files: tuple[Path, ...]
    failed: tuple[FailedImport, ...]
    later: tuple[FailedImport, ...]
    unreadable: Mapping[str, str]


@dataclass(frozen=True)
class _Import:
    """A module that is imported when another one is loaded; `names` are taken from it, and may be modules too."""

    module: str
    names: tuple[str, ...]
    line: int


def follow_imports(
    tree: SourceTree, script: Path | None, modules: Sequence[str] = (), adapter: Mapping[str, Path] | None = None
) -> Followed:
    """Follows imports from a script, and from modules that are imported before it.

    Args:
        tree: the host.
        script: the training script; None for none.
        modules: of the host.
        adapter: modules of other code that import the host, by name.
    """
    trail = _Trail(tree, script.parent if script is not None else None)
    for module in modules:
        trail.follow(module)
    for module, file in (adapter or {}).items():
        trail.read(module, file)
    if script is not None:
        trail.read("__main__", script)
    return Followed(tuple(trail.files), tuple(trail.failed.values()), tuple(trail.later.values()), trail.unreadable)


class _Trail:
    """The modules of the host that were followed so far, and what failed."""

    def __init__(self, tree: SourceTree, folder: Path | None) -> None:
        self._tree = tree
        #: Folders whose modules are the host's own. A site-packages folder holds those of others.
        self._own = (*([folder] if folder is not None else []), *(tree.roots if tree.is_checkout else ()))
        self._host = SourceTree(tuple(dict.fromkeys([*self._own, *tree.roots])), tree.is_checkout)
        self.files: dict[Path, None] = {}
        self.failed: dict[tuple[str, str, str], FailedImport] = {}
        self.later: dict[str, FailedImport] = {}
        self.unreadable: dict[str, str] = {}

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
        if file in self.files:
            return
        self.files[file] = None
        try:
            parsed = self._tree.parse(file)
        except UnreadableSourceError as error:
            self.unreadable[self._host.shown(file)] = str(error)
            return
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        required = list(_imports(parsed.body, package))
        for each in required:
            self._check(each, module, file)
        for each in _later_imports(parsed, package, {each.line for each in required}):
            self._check_later(each, module, file)

    def _check(self, each: _Import, importer: str, file: Path) -> None:
        is_hosts = self._is_hosts(each.module.partition(".")[0])
        missing = self._missing_in_host(each.module) if is_hosts else first_missing(each.module)
        module, names = (missing, [""]) if missing is not None else (each.module, self._absent_names(each, is_hosts))
        place = SourceLine(self._host.shown(file), each.line)
        for name in names:
            self.failed.setdefault((module, importer, name), FailedImport(module, importer, place, is_hosts, name))
        if missing is None and is_hosts:
            for inner in (each.module, *(f"{each.module}.{name}" for name in each.names)):
                self.follow(inner)

    def _check_later(self, each: _Import, importer: str, file: Path) -> None:
        if self._is_hosts(each.module.partition(".")[0]):
            return
        missing = first_missing(each.module)
        if missing is not None:
            place = SourceLine(self._host.shown(file), each.line)
            self.later.setdefault(missing, FailedImport(missing, importer, place, is_hosts=False))

    def _absent_names(self, each: _Import, is_hosts: bool) -> list[str]:
        """The names that are taken from a module and are neither bound in it nor modules in it."""
        if not is_hosts:
            return [name for name in each.names if _is_absent_outside(each.module, name)]
        file = self._host.file_of(each.module)
        if file is None:  # a namespace package, which binds nothing
            return [name for name in each.names if self._missing_in_host(f"{each.module}.{name}")]
        places = [str(root / Path(*each.module.split("."))) for root in self._host.roots]
        return [name for name in each.names if not _is_bound(file, name) and _find(name, places) is None]

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
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if _spec_of(name) is None:
            return None if end > 1 and _may_provide(".".join(parts[: end - 1])) else name
    return None


def _may_provide(package: str) -> bool:
    """Whether a package that can be found may have modules that lie in no file of its own, or is none."""
    spec = _spec_of(package)
    if spec is None or spec.submodule_search_locations is None:
        return True
    return spec.has_location and _is_dynamic(Path(spec.origin or ""))


def _spec_of(module: str) -> ModuleSpec | None:
    """Finds a module of another package, and imports nothing."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # a module of other code in sys.modules, without a spec
        return None
    for name in rest:
        places = spec.submodule_search_locations if spec is not None else None
        spec = _find(name, places) if places is not None else None
    return spec


def _is_absent_outside(module: str, name: str) -> bool:
    """Whether a module of another package, which can be found, has no such name.

    >>> _is_absent_outside("typing", "Any"), _is_absent_outside("typing", "absent")
    (False, True)
    """
    loaded = sys.modules.get(module)
    if loaded is not None and module in sys.stdlib_module_names:
        return not hasattr(loaded, name) and _spec_of(f"{module}.{name}") is None
    spec = _spec_of(module)
    if spec is None or not spec.has_location or not (spec.origin or "").endswith(".py"):
        return False
    places = spec.submodule_search_locations or ()
    return not _is_bound(Path(spec.origin or ""), name) and _find(name, places) is None


@cache
def _is_bound(file: Path, name: str) -> bool:
    """Whether a module binds a name when it is loaded; where reading does not tell, it does."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if name == "*" or any(word in text for word in _BINDS_MORE):
        return True
    try:
        return bool(bindings_of(_parsed(file), name))
    except (SyntaxError, ValueError):  # a finding of its own
        return True


@cache
def _parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read_bytes(), str(file))


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


def _later_imports(module: ast.Module, package: str, required: set[int]) -> Iterator[_Import]:
    """Yields the imports that run under a condition or in a function, and that nothing handles.

    Args:
        module: what is read.
        package: that holds it.
        required: lines of the imports without which loading it fails.
    """
    nodes = [node for node in _unguarded(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in nodes:
        if node.lineno not in required:
            yield from _imports([node], package)


def _unguarded(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what lies in a node, without what a `try` handles and what is only there for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try) and _is_guarded(child):
            continue
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _unguarded(child)
