"""Who else in a host's tree holds a function by value, or assigns it: replacing it at home is not enough."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.hosts.source.found import Place, Unreadable
from megatron_distopt.hosts.source.syntax import resolved
from megatron_distopt.hosts.source.tree import SourceTree, UnreadableSourceError

__all__ = ["Alias", "Aliases", "find_aliases"]


@dataclass(frozen=True)
class Alias:
    """One line that takes a function from the host, or puts another into it.

    Args:
        name: of the function.
        place: of the line.
        is_assigned: whether it assigns somebody else's attribute of that name, and does not import it.
    """

    name: str
    place: Place
    is_assigned: bool


@dataclass(frozen=True)
class Aliases:
    """All of a tree.

    Args:
        found: in the order of files and lines.
        unreadable: files that mention a name and could not be read.
    """

    found: tuple[Alias, ...]
    unreadable: tuple[Unreadable, ...]

    def places(self, name: str, *, is_assigned: bool) -> tuple[Place, ...]:
        """Of one function."""
        return tuple(alias.place for alias in self.found if (alias.name, alias.is_assigned) == (name, is_assigned))


def find_aliases(tree: SourceTree, names: Sequence[str]) -> Aliases:
    """Reads every file that mentions one of the names."""
    found: list[Alias] = []
    unreadable: list[Unreadable] = []
    words = [name.encode() for name in names]
    for file in tree.python_files() if words else ():
        content = _content(file)
        if any(word in content for word in words):
            try:
                found += _aliases_in(tree, file, names)
            except UnreadableSourceError as error:
                unreadable.append(Unreadable(tree.shown(file), str(error)))
    return Aliases(tuple(found), tuple(unreadable))


def _content(file: Path) -> bytes:
    """Nothing of a file that cannot be read: a dangling link, or a file of somebody else's."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _aliases_in(tree: SourceTree, file: Path, names: Sequence[str]) -> Iterator[Alias]:
    module = tree.module_of(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree.parse(file)):
        if isinstance(node, ast.ImportFrom) and resolved(node, package).partition(".")[0] == "megatron":
            taken, is_assigned = [alias.name for alias in node.names], False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            taken, is_assigned = [node.attr], True
        else:
            continue
        place = Place(tree.shown(file), node.lineno)
        yield from (Alias(name, place, is_assigned) for name in taken if name in names)
