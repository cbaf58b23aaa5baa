"""The source files of a host, read and never run: so it works where the host cannot be imported, as on a login node."""

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

__all__ = ["SourceTree", "UnreadableSourceError", "fork_at", "importable_host"]

_PACKAGE = "megatron"
#: Folders of a checkout that hold somebody else's Python.
_NOT_OURS = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "dist-packages"})


class UnreadableSourceError(HostError):
    """A source file of the host cannot be read, or is no Python."""


@dataclass(frozen=True)
class SourceTree:
    """Where a host's modules lie.

    Args:
        roots: folders that hold a folder `megatron`; a module comes from the first that has it.
        is_checkout: whether the first is the fork's own folder, with its scripts, and not everybody's site-packages.
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
        """Whether there is a module of that dotted name."""
        return self.file_of(module) is not None

    def module_of(self, file: Path) -> str:
        """The inverse of `file_of`."""
        parts = Path(self.shown(file)).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def shown(self, file: Path) -> str:
        """A file's path as people know it: from the fork's folder."""
        roots = (root for root in self.roots if file.is_relative_to(root))
        return next((file.relative_to(root).as_posix() for root in roots), str(file))

    def python_files(self) -> Iterator[Path]:
        """Of the fork: its package, and what lies around that in a checkout."""
        for root in self.roots:
            yield from _python_files(root if self.is_checkout else root / _PACKAGE)

    def parse(self, file: Path) -> ast.Module:
        """A file's syntax tree.

        Raises:
            UnreadableSourceError: with file and line.
        """
        try:
            with warnings.catch_warnings():  # a fork's invalid escape sequences are its own affair
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
    """The fork in a folder.

    Raises:
        UnknownHostError: the folder holds no folder `megatron`; it says which one to write, where it can be seen.
    """
    if (folder / _PACKAGE).is_dir():
        return SourceTree((folder.resolve(),), is_checkout=not _is_everybodys(folder.resolve()))
    got = f"{folder} does not exist" if not folder.exists() else f"{folder} is a file"
    if folder.is_dir():
        got = f"{folder} holds no folder {_PACKAGE}"
    near = _fork_near(folder.resolve())
    remedy = f"Write {near}" if near else "Write the path of your Megatron's checkout"
    raise UnknownHostError(refusal("fork", got, f"be a folder that holds the folder {_PACKAGE}", remedy))


def _fork_near(folder: Path) -> Path | None:
    """What somebody meant who named a folder too deep or too high, or a file in it."""
    above = next((parent for parent in folder.parents if folder.exists() and (parent / _PACKAGE).is_dir()), None)
    below = sorted(folder.glob(f"*/{_PACKAGE}/__init__.py")) + sorted(folder.glob(f"*/{_PACKAGE}/core/__init__.py"))
    inside = {file.parents[file.parts[::-1].index(_PACKAGE)] for file in below}
    return above or (inside.pop() if len(inside) == 1 else None)


def importable_host(working_directory: Path, path: Sequence[str]) -> SourceTree:
    """The Megatron that `import megatron` would find; without any roots where there is none.

    megatron-core alone is a namespace package, which has several places or none of its own.

    Args:
        working_directory: where training is started; Python looks there first.
        path: usually `sys.path`.
    """
    spec = PathFinder.find_spec(_PACKAGE, [str(working_directory), *path]) or _spec_of_an_editable_install()
    places = spec.submodule_search_locations if spec is not None else None
    roots = tuple(dict.fromkeys(Path(place).resolve().parent for place in places or ()))
    return SourceTree(roots, is_checkout=bool(roots) and not any(map(_is_everybodys, roots)))


def _spec_of_an_editable_install() -> ModuleSpec | None:
    try:
        return find_spec(_PACKAGE)
    except ValueError:  # somebody put a module without a spec into sys.modules
        return None


def _is_everybodys(folder: Path) -> bool:
    return folder.name in ("site-packages", "dist-packages")
