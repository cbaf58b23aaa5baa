"""Inserts the block of plugin/entry_point_block.py into a fork's file, right after its factory, and
removes it again.

The place is found in the syntax tree, so it does not matter how much a fork has changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_distopt.errors import HostError, HostMismatchError, InvariantError
from megatron_distopt.plugin.detect import recognise_supported
from megatron_distopt.plugin.entry_point_block import (
    BEGIN,
    BLOCK,
    END,
    as_bytes,
    has_marker,
    intact_block,
)
from megatron_distopt.plugin.fork_source import SourceTree, find_patch_point


@dataclass(frozen=True)
class Edit:
    """A planned change of one file: whole lines that are inserted or removed at one place."""

    file: Path
    name: str  # its path in the fork
    before: bytes  # all of its content
    after: bytes
    line: int  # the line after which the block stands


def find_block(tree: SourceTree) -> slice | None:
    """Returns where in the fork's file the block is; None if there is none. Refuses a block that
    was edited by hand."""
    file = _factory_file(tree)
    content = file.read_bytes()
    block = intact_block(content)
    if block is None and has_marker(content):
        raise HostError(
            f"The lines from {BEGIN!r} to {END!r} in {tree.shown(file)} are not the {len(BLOCK)} "
            "lines that this version inserts. Delete the lines by hand, or check the file out "
            "again."
        )
    return block


def plan_apply(tree: SourceTree) -> Edit:
    """Plans the edit that inserts the block into a fork. Refuses a fork whose function is not as
    expected."""
    file = _factory_file(tree)
    found = find_patch_point(tree, recognise_supported(tree.has).factory)
    if found.refusal is not None:
        raise HostMismatchError(found.refusal)
    if not found.is_at_top:
        raise HostMismatchError(
            f"{found.patch_point} in {found.place} is not at the top level of its module, so the "
            "block cannot follow it. Use the runner or megatron_distopt.install() instead."
        )
    before = file.read_bytes()
    lines = before.splitlines(keepends=True)
    head, tail = b"".join(lines[: found.end]), b"".join(lines[found.end :])
    ends = [line[len(line.rstrip(b"\r\n")) :] for line in lines[: found.end]]
    newline = next((end for end in reversed(ends) if end), b"\n")
    block = as_bytes(newline)
    # A file without a final newline still has none with the block.
    after = (
        head + block + tail if head.endswith(newline) else head + newline + block[: -len(newline)]
    )
    place = intact_block(after)
    if place is None or after[: place.start] + after[place.stop :] != before:
        raise InvariantError(
            f"{tree.shown(file)} could not be restored to the byte by --undo. Report this as a bug."
        )
    return Edit(file, tree.shown(file), before, after, found.end)


def plan_undo(tree: SourceTree, block: slice) -> Edit:
    """Plans the edit that removes the block: the inverse of `plan_apply`."""
    file = _factory_file(tree)
    before = file.read_bytes()
    line = len(before[: block.start].splitlines())
    return Edit(file, tree.shown(file), before, before[: block.start] + before[block.stop :], line)


def _factory_file(tree: SourceTree) -> Path:
    generation = recognise_supported(tree.has)
    file = tree.file_of(generation.factory.module)
    if file is None:
        raise HostMismatchError(
            f"{generation.factory.module} is missing. Use a Megatron that docs/hosts.md lists."
        )
    return file.resolve()  # so that a symbolic link is kept


def write(edit: Edit) -> None:
    """Replaces the file in one rename, with the same mode. Refuses a file that has changed since
    the edit was planned."""
    try:
        if edit.file.read_bytes() != edit.before:
            raise HostError(f"{edit.name} changed while it was patched. Run the command again.")
        folder, prefix = edit.file.parent, f".{edit.file.name}."
        with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as scratch:
            unfinished = Path(scratch, edit.file.name)
            with unfinished.open("wb") as file:
                file.write(edit.after)
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(edit.file, unfinished)
            os.replace(unfinished, edit.file)
    except OSError as error:
        raise HostError(
            f"{edit.file} cannot be replaced ({error.strerror}). Run the command as the user who "
            "owns the fork, or on a copy of the fork."
        ) from error
