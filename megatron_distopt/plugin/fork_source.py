"""Reads a fork's source without importing it, for example on a login node without its packages."""

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
from megatron_distopt.patch_points import OTHER, PatchPoint
from megatron_distopt.plugin.detect import Generation
from megatron_distopt.plugin.entry_point_block import BEGIN, END, intact_block

_PACKAGE = "megatron"


class UnreadableSourceError(HostError):
    """A source file of the host cannot be read, or is not valid Python."""


@dataclass(frozen=True)
class SourceTree:
    """A host's modules as files."""

    # folders that hold a folder `megatron`; the first that has a module is used
    roots: tuple[Path, ...]

    def file_of(self, module: str) -> Path | None:
        inside = Path(*module.split("."))
        candidates = (inside / "__init__.py", inside.with_suffix(".py"))
        files = (root / candidate for root in self.roots for candidate in candidates)
        return next((file for file in files if file.is_file()), None)

    def has(self, module: str) -> bool:
        return self.file_of(module) is not None

    def shown(self, file: Path, line: int | None = None) -> str:
        """Returns a file's path from the fork's folder, and the line after a colon."""
        roots = (root for root in self.roots if file.is_relative_to(root))
        name = next((file.relative_to(root).as_posix() for root in roots), str(file))
        return name if line is None else f"{name}:{line}"

    def parse(self, file: Path | None) -> ast.Module:
        """Returns the syntax tree of a file; an empty one for None."""
        if file is None:
            return ast.Module(body=[], type_ignores=[])
        try:
            with warnings.catch_warnings():  # invalid escape sequences of a fork do not matter here
                warnings.simplefilter("ignore")
                return ast.parse(file.read_bytes(), str(file))
        except OSError as error:
            raise UnreadableSourceError(
                f"{self.shown(file)} cannot be read ({error.strerror}). Run chmod +r {file}."
            ) from None
        except (SyntaxError, ValueError) as error:
            place = self.shown(file, error.lineno if isinstance(error, SyntaxError) else None)
            said = error.msg if isinstance(error, SyntaxError) else error
            raise UnreadableSourceError(
                f"{place} is not valid Python ({said}). Correct that line."
            ) from None


def fork_at(folder: Path) -> SourceTree:
    """The fork in a folder. Refuses a folder without a folder `megatron`."""
    if (folder / _PACKAGE).is_dir():
        return SourceTree((folder.resolve(),))
    raise UnknownHostError(
        f"{folder} is not a fork, because it does not contain a folder {_PACKAGE}. Write the path "
        "of your Megatron's checkout."
    )


def importable_host(path: Sequence[str]) -> SourceTree:
    """The Megatron that `import megatron` finds if `sys.path` is `path`; without roots if there is
    none.

    megatron-core without Megatron-LM is a namespace package, which may have several places.
    """
    spec = PathFinder.find_spec(_PACKAGE, path)
    with suppress(ValueError):  # a module without a spec is in sys.modules
        spec = spec or find_spec(_PACKAGE)  # an editable installation
    places = spec.submodule_search_locations if spec is not None else None
    return SourceTree(tuple(dict.fromkeys(Path(place).resolve().parent for place in places or ())))


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
Binding = ast.stmt | ast.expr


def _at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when the module is loaded, in the order of the source. Leaves out
    the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _at_module_level(child)


def _bound_by(node: Binding) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id}
    return set()


def parameters_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Returns the names of all parameters, in the order of `inspect.signature`."""
    given = function.args
    ordered = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(argument.arg for argument in ordered if argument is not None)


@dataclass(frozen=True)
class PatchPointInSource:
    """A patch point as it is in the source."""

    patch_point: PatchPoint
    refusal: str | None = None  # the error, if it cannot be replaced
    place: str = ""  # file and line of the function, or of what replaced it
    parameters: tuple[str, ...] = ()
    is_patched: bool = False  # whether our entry-point block comes after the function
    # whether the function is at the top level, and not under an `if` or a `try`
    is_at_top: bool = False
    end: int = 0  # last line of the function


def patch_points_of(tree: SourceTree, generation: Generation) -> tuple[PatchPointInSource, ...]:
    """The patch points in a fork, the factory first; empty if the fork is not supported."""
    return tuple(find_patch_point(tree, each) for each in generation.patch_points)


def find_patch_point(tree: SourceTree, patch_point: PatchPoint) -> PatchPointInSource:
    file = tree.file_of(patch_point.module)
    module = tree.parse(file)
    content = b"" if file is None else file.read_bytes()
    ours = range(0)
    if intact_block(content) is not None:
        lines = content.splitlines()
        ours = range(lines.index(BEGIN.encode()) + 1, lines.index(END.encode()) + 2)
    bindings = [
        node
        for node in _at_module_level(module)
        if isinstance(node, Binding)
        and patch_point.attribute in _bound_by(node)
        and node.lineno not in ours
    ]
    if file is None or not bindings:
        return PatchPointInSource(patch_point, patch_point.missing)
    last = bindings[-1]
    place = tree.shown(file, last.lineno)
    if not isinstance(last, ast.FunctionDef):
        return PatchPointInSource(
            patch_point, f"{place} assigns something else to {patch_point}. {OTHER}.", place
        )
    parameters = parameters_of(last)
    return PatchPointInSource(
        patch_point,
        patch_point.differs(parameters, f" in {place}"),
        place,
        parameters,
        is_patched=bool(ours),
        is_at_top=last in module.body,
        end=last.end_lineno or last.lineno,
    )
