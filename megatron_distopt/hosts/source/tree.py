"""The source files of a host, which are read and never run, and questions about their syntax trees.

So the doctor works where the host cannot be imported: on a login node, without its GPU and its packages.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from megatron_distopt.errors import HostError, UnknownHostError, refusal

_PACKAGE = "megatron"
#: Folders of a checkout that hold Python of others.
_NOT_OURS = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "dist-packages"})


class UnreadableSourceError(HostError):
    """A source file of the host cannot be read, or is no Python."""


@dataclass(frozen=True)
class SourceTree:
    """The folders that hold a host's modules.

    Args:
        roots: folders that hold a folder `megatron`; a module comes from the first that has it.
        is_checkout: whether the first is the fork's own folder, with its scripts, and not a site-packages folder.
    """

    roots: tuple[Path, ...]
    is_checkout: bool = True

    def file_of(self, module: str) -> Path | None:
        """The file of a module, None where there is none."""
        inside = Path(*module.split("."))
        candidates = (inside.with_suffix(".py"), inside / "__init__.py")
        files = (root / candidate for root in self.roots for candidate in reversed(candidates))
        return next((file for file in files if file.is_file()), None)

    def has(self, module: str) -> bool:
        """Whether the host has a module of that dotted name."""
        return self.file_of(module) is not None

    def module_of(self, file: Path) -> str:
        """The inverse of `file_of`."""
        parts = Path(self.shown(file)).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def shown(self, file: Path) -> str:
        """A file's path from the fork's folder."""
        roots = (root for root in self.roots if file.is_relative_to(root))
        return next((file.relative_to(root).as_posix() for root in roots), str(file))

    def python_files(self) -> Iterator[Path]:
        """The Python files of the fork: its package, and in a checkout everything around it."""
        for root in self.roots:
            yield from _python_files(root if self.is_checkout else root / _PACKAGE)

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
            got, rule = f"{self.shown(file)} ({error.strerror})", "be a file that you may read"
            raise UnreadableSourceError(refusal("source", got, rule, f"Run chmod +r {file}")) from None
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            got = f"{self.shown(file)}{line} ({error.msg if isinstance(error, SyntaxError) else error})"
            raise UnreadableSourceError(refusal("source", got, "be Python", "Correct that line")) from None


def _python_files(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_foreign(Path(path, name)))
        yield from (Path(path, name) for name in sorted(files) if name.endswith(".py"))


def _is_foreign(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _NOT_OURS or (folder / "pyvenv.cfg").exists()


def fork_at(folder: Path) -> SourceTree:
    """Returns the fork in a folder.

    Raises:
        UnknownHostError: the folder holds no folder `megatron`; it says which one to write, where it can be seen.
    """
    if (folder / _PACKAGE).is_dir():
        return SourceTree((folder.resolve(),), is_checkout=not _is_site_packages(folder.resolve()))
    got = f"{folder} does not exist" if not folder.exists() else f"{folder} is a file"
    if folder.is_dir():
        got = f"{folder} holds no folder {_PACKAGE}"
    near = _fork_near(folder.resolve())
    remedy = f"Write {near}" if near else "Write the path of your Megatron's checkout"
    raise UnknownHostError(refusal("fork", got, f"be a folder that holds the folder {_PACKAGE}", remedy))


def _fork_near(folder: Path) -> Path | None:
    """Finds the fork where a folder above or below it, or a file in it, was given."""
    above = next((parent for parent in folder.parents if folder.exists() and (parent / _PACKAGE).is_dir()), None)
    below = sorted(folder.glob(f"*/{_PACKAGE}/__init__.py")) + sorted(folder.glob(f"*/{_PACKAGE}/core/__init__.py"))
    inside = {file.parents[file.parts[::-1].index(_PACKAGE)] for file in below}
    return above or (inside.pop() if len(inside) == 1 else None)


def importable_host(working_directory: Path, path: Sequence[str]) -> SourceTree:
    """Returns the Megatron that `import megatron` would find; it has no roots where there is none.

    megatron-core alone is a namespace package, which has several places or none of its own.

    Args:
        working_directory: where training is started; Python looks there first.
        path: usually `sys.path`.
    """
    spec = PathFinder.find_spec(_PACKAGE, [str(working_directory), *path]) or _spec_of_an_editable_install()
    places = spec.submodule_search_locations if spec is not None else None
    roots = tuple(dict.fromkeys(Path(place).resolve().parent for place in places or ()))
    return SourceTree(roots, is_checkout=bool(roots) and not any(map(_is_site_packages, roots)))


def _spec_of_an_editable_install() -> ModuleSpec | None:
    try:
        return find_spec(_PACKAGE)
    except ValueError:  # a module without a spec is in sys.modules
        return None


def _is_site_packages(folder: Path) -> bool:
    return folder.name in ("site-packages", "dist-packages")


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


Binding = ast.stmt | ast.expr


def _at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what runs when the module is loaded, in the order of the source: no body of a function or a class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _at_module_level(child)


def bindings_of(module: ast.Module, name: str) -> list[Binding]:
    """Returns the statements that bind a name when the module is loaded, in that order."""
    return [node for node in _at_module_level(module) if isinstance(node, Binding) and name in _bound_by(node)]


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
    positional, keywords = [*given.posonlyargs, *given.args], given.kwonlyargs
    ordered = [*positional, given.vararg, *keywords, given.kwarg]
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


def imports_when_loaded(module: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yields (top-level package, line, whether under an `if`) for each import without which loading the module fails.

    What stands in a `try` may be missing, and what stands in a function is imported when that is called.
    """
    yield from _imports_of(module.body, is_conditional=False)


def _imports_of(body: list[ast.stmt], *, is_conditional: bool) -> Iterator[tuple[str, int, bool]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno, is_conditional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0], node.lineno, is_conditional
        elif isinstance(node, ast.If):
            yield from _imports_of([*node.body, *node.orelse], is_conditional=True)
        elif isinstance(node, ast.With) or (isinstance(node, ast.Try) and not node.handlers):
            yield from _imports_of(node.body, is_conditional=is_conditional)


def flags_added(module: ast.Module) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    """Yields the calls of `add_argument`, with the flags that they spell out."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            flags = tuple(word for word in words if isinstance(word, str) and word.startswith("--"))
            if flags:
                yield node, flags


def values_given(call: ast.Call) -> dict[str, object]:
    """Returns the keyword arguments of a call whose values are spelled out."""
    given = [(keyword.arg, keyword.value) for keyword in call.keywords]
    return {name: value.value for name, value in given if name is not None and isinstance(value, ast.Constant)}
