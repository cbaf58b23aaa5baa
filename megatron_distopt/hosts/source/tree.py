"""The source files of a host, which are read and never run, and questions about their syntax trees."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from megatron_distopt.errors import HostError, UnknownHostError

_PACKAGE = "megatron"


class UnreadableSourceError(HostError):
    """A source file of the host cannot be read, or is no Python."""


@dataclass(frozen=True)
class SourceTree:
    """A host's modules as files."""

    roots: tuple[Path, ...]  # folders that hold a folder `megatron`; a module comes from the first that has it

    def file_of(self, module: str) -> Path | None:
        """Returns the file of a module, or None where there is none."""
        inside = Path(*module.split("."))
        candidates = (inside / "__init__.py", inside.with_suffix(".py"))
        files = (root / candidate for root in self.roots for candidate in candidates)
        return next((file for file in files if file.is_file()), None)

    def has(self, module: str) -> bool:
        """Whether the host has a module of that dotted name."""
        return self.file_of(module) is not None

    def shown(self, file: Path, line: int | None = None) -> str:
        """Returns a file's path from the fork's folder, and the line after a colon."""
        roots = (root for root in self.roots if file.is_relative_to(root))
        name = next((file.relative_to(root).as_posix() for root in roots), str(file))
        return name if line is None else f"{name}:{line}"

    def parse(self, file: Path) -> ast.Module:
        """Returns a file's syntax tree.

        Raises:
            UnreadableSourceError: the file cannot be read or is no Python; the message names the line.
        """
        try:
            with warnings.catch_warnings():  # a fork's invalid escape sequences are not our subject
                warnings.simplefilter("ignore")
                return ast.parse(file.read_bytes(), str(file))
        except OSError as error:
            text = f"{self.shown(file)} cannot be read ({error.strerror}). Run chmod +r {file}."
            raise UnreadableSourceError(text) from None
        except (SyntaxError, ValueError) as error:
            place = self.shown(file, error.lineno if isinstance(error, SyntaxError) else None)
            said = error.msg if isinstance(error, SyntaxError) else error
            raise UnreadableSourceError(f"{place} is no Python ({said}). Correct that line.") from None


def fork_at(folder: Path) -> SourceTree:
    """Returns the fork in a folder.

    Raises:
        UnknownHostError: the folder holds no folder `megatron`; it says which one to write, where it can be seen.
    """
    if (folder / _PACKAGE).is_dir():
        return SourceTree((folder.resolve(),))
    found = f"{folder} does not exist" if not folder.exists() else f"{folder} is a file"
    if folder.is_dir():
        found = f"{folder} holds no folder {_PACKAGE}"
    rule = f"The fork must be a folder that holds the folder {_PACKAGE}"
    near = _fork_near(folder.resolve()) or "the path of your Megatron's checkout"
    raise UnknownHostError(f"{found}. {rule}. Write {near}.")


def _fork_near(folder: Path) -> Path | None:
    """Finds the fork where a folder above or below it, or a file in it, was given."""
    above = next((parent for parent in folder.parents if folder.exists() and (parent / _PACKAGE).is_dir()), None)
    below = [*folder.glob(f"*/{_PACKAGE}/__init__.py"), *folder.glob(f"*/{_PACKAGE}/core/__init__.py")]
    inside = {file.parents[file.parts[::-1].index(_PACKAGE)] for file in below}
    return above or (inside.pop() if len(inside) == 1 else None)


def importable_host(working_directory: Path, path: Sequence[str]) -> SourceTree:
    """Returns the Megatron that `import megatron` would find; it has no roots where there is none.

    megatron-core alone is a namespace package, which has several places or none of its own.

    Args:
        working_directory: where training is started; Python looks there first.
        path: usually `sys.path`.
    """
    spec = PathFinder.find_spec(_PACKAGE, [str(working_directory), *path])
    with suppress(ValueError):  # a module without a spec is in sys.modules
        spec = spec or find_spec(_PACKAGE)  # an editable installation
    places = spec.submodule_search_locations if spec is not None else None
    return SourceTree(tuple(dict.fromkeys(Path(place).resolve().parent for place in places or ())))


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
Binding = ast.stmt | ast.expr


def bindings_of(module: ast.Module, name: str) -> list[Binding]:
    """Returns the statements that bind a name when the module is loaded, in that order."""
    return [node for node in _at_module_level(module) if isinstance(node, Binding) and name in _bound_by(node)]


def _at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what runs when the module is loaded, in the order of the source: no body of a function or a class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _at_module_level(child)


def _bound_by(node: Binding) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {node.id} if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else set()


def parameters_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Returns the names of all parameters, in the order of `inspect.signature`.

    >>> parameters_of(ast.parse("def f(a, /, b, *rest, c, **others): ...").body[0])
    ('a', 'b', 'rest', 'c', 'others')
    """
    given = function.args
    ordered = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(argument.arg for argument in ordered if argument is not None)


def required_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Returns the names of the parameters without a default.

    >>> required_of(ast.parse("def f(a, b=1, *rest, c, d=2): ...").body[0])
    ('a', 'c')
    """
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    keywords = [argument for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if not default]
    return tuple(argument.arg for argument in [*positional[: len(positional) - len(given.defaults)], *keywords])


def classes_of(module: ast.Module) -> dict[str, ast.ClassDef]:
    """Returns the classes at the top of a module, by name."""
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}


def methods_of(definition: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Returns the methods that a class defines itself, by name."""
    return {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}


def resolved(node: ast.ImportFrom, package: str) -> str:
    """Returns the absolute name of the module from which a statement imports.

    Args:
        node: the statement.
        package: the package of the module that it stands in; of an `__init__.py`, that package itself.

    >>> resolved(ast.parse("from ..core import mpu").body[0], "megatron.optimizer")
    'megatron.core'
    """
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *filter(None, [node.module])])
