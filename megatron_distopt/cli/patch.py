"""`megatron-distopt patch`: puts one marked block into a fork's file, right after its factory, and takes it out again.

The place is found by the syntax tree, so a fork that has drifted is patched as well as one that has not. A plan is an
`Edit`, both contents of one file; `write` puts the new one in place of the old by a rename, so a fork is never half
patched.
"""

from __future__ import annotations

import argparse
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from megatron_distopt.cli.show import Answer
from megatron_distopt.errors import HostError, HostMismatchError, InvariantError, UnknownHostError, refusal
from megatron_distopt.hosts.detect import recognise
from megatron_distopt.hosts.source.block import BEGIN, BLOCK, END, as_bytes, has_marker, intact_block
from megatron_distopt.hosts.source.found import PatchPointFound
from megatron_distopt.hosts.source.survey import find_patch_point
from megatron_distopt.hosts.source.tree import SourceTree, fork_at


@dataclass(frozen=True)
class Edit:
    """A change of one file that is not made yet: whole lines, put in or taken out at one place.

    Args:
        file: that is changed.
        name: its path in the fork.
        before, after: all of its content.
        line: after which the block stands; counted without the block.
    """

    file: Path
    name: str
    before: bytes
    after: bytes
    line: int


def answer(parsed: argparse.Namespace) -> Answer:
    """Checks, applies or undoes the patch.

    Raises:
        HostError: it cannot be done; nothing is changed then.
    """
    tree = fork_at(parsed.fork)
    is_applied = is_patched(tree)
    if parsed.action == ("apply" if is_applied else "undo"):
        said = "is applied already: nothing to do" if is_applied else "is not applied: nothing to undo"
        return Answer({}, [said])
    edit = plan_undo(tree) if is_applied else plan_apply(tree)
    if parsed.action != "check":
        write(edit)
    return Answer({}, [_said(parsed.action, edit, parsed.fork, is_applied=is_applied)])


def _said(action: str, edit: Edit, fork: Path, *, is_applied: bool) -> str:
    place = f"{edit.name}, {len(BLOCK)} lines after line {edit.line}"
    if action == "undo":
        return f"undone: {place}; the file is as it was before"
    undo = f"megatron-distopt patch --undo {fork} takes them out"
    if action == "apply":
        return f"applied: {place}; {undo}"
    if is_applied:
        return f"is applied: {place}; {undo}"
    apply = f"megatron-distopt patch --apply {fork} puts them in"
    return f"can be applied: {place}; {apply}\n\n{as_diff(edit)}".removesuffix("\n")


def is_patched(tree: SourceTree) -> bool:
    """Whether the fork has the block.

    Raises:
        HostError: the tree is no supported fork, or the block was edited by hand.
    """
    file = _factory_file(tree)
    content = file.read_bytes()
    if has_marker(content) and intact_block(content) is None:
        got = f"{tree.shown(file)}, where the lines from {BEGIN!r} to {END!r} were edited"
        rule = f"hold those {len(BLOCK)} lines as this version puts them in"
        raise HostError(refusal("patched file", got, rule, "Take the lines out by hand, or check the file out again"))
    return has_marker(content)


def plan_apply(tree: SourceTree) -> Edit:
    """Plans the edit that puts the block into a fork that has none.

    Raises:
        UnknownHostError: the tree is no supported fork.
        HostMismatchError: the function is missing, has another signature, or was replaced by other code.
        UnreadableSourceError: the file is no Python.
    """
    file = _factory_file(tree)
    patch_point = _usable_patch_point(tree)
    before = file.read_bytes()
    lines = before.splitlines(keepends=True)
    head, tail = b"".join(lines[: patch_point.end]), b"".join(lines[patch_point.end :])
    edit = Edit(file, tree.shown(file), before, _joined(head, tail), patch_point.end)
    block = intact_block(edit.after)
    if block is None or edit.after[: block.start] + edit.after[block.stop :] != before:
        raise InvariantError(refusal("edit", edit.name, "be undone by --undo to the byte", "Report this as a bug"))
    return edit


def plan_undo(tree: SourceTree) -> Edit:
    """Plans the edit that takes the block out again; the inverse of `plan_apply`.

    Raises:
        HostError: there is no block, or it was edited by hand.
    """
    file = _factory_file(tree)
    before = file.read_bytes()
    block = intact_block(before) if is_patched(tree) else None
    if block is None:
        remedy = "Run megatron-distopt patch --check to see what is there"
        raise HostError(refusal("fork", f"{tree.shown(file)} without our block", "hold it", remedy))
    line = len(before[: block.start].splitlines())
    return Edit(file, tree.shown(file), before, before[: block.start] + before[block.stop :], line)


def write(edit: Edit) -> None:
    """Replaces the file by its new content in one rename, with the same mode.

    Raises:
        HostError: the folder cannot be written to, or the file changed since the edit was planned.
    """
    try:
        if edit.file.read_bytes() != edit.before:
            rule, remedy = "stay as it is while it is patched", "Run the command again"
            raise HostError(refusal("fork", f"{edit.name} changed meanwhile", rule, remedy))
        _replace(edit.file, edit.after)
    except OSError as error:
        remedy = "Run it as the user who owns the fork, or on a copy of it"
        got = f"{edit.file} ({error.strerror})"
        raise HostError(refusal("fork", got, "be in a folder that you may write to", remedy)) from error


def as_diff(edit: Edit) -> str:
    """A unified diff without context, so that no line of the fork is in it.

    `git apply --unidiff-zero` and `patch -p1` take it, for a file that has the same number of lines before the place.
    """
    before, after = (
        [line.decode("utf-8", "replace") for line in content.splitlines(keepends=True)]
        for content in (edit.before, edit.after)
    )
    lines = unified_diff(before, after, f"a/{edit.name}", f"b/{edit.name}", n=0)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _factory_file(tree: SourceTree) -> Path:
    generation = recognise(tree.has)
    reason = generation.refusal()
    if reason is not None:
        raise UnknownHostError(reason)
    file = tree.file_of(generation.patch_points[0].module)
    if file is None:
        remedy = "Use a Megatron that docs/hosts.md lists"
        raise HostMismatchError(refusal(str(generation.patch_points[0]), "missing", "exist", remedy))
    return file.resolve()  # a link stays a link


def _usable_patch_point(tree: SourceTree) -> PatchPointFound:
    found = find_patch_point(tree, recognise(tree.has).patch_points[0])
    reason = found.refusal()
    if reason is not None:
        raise HostMismatchError(reason)
    if not found.is_at_top:
        remedy = "Use the runner or megatron_distopt.install() instead"
        got = f"defined under another statement in {found.place}"
        raise HostMismatchError(refusal(str(found.patch_point), got, "stand at the top level of its module", remedy))
    return found


def _joined(head: bytes, tail: bytes) -> bytes:
    """Puts the block after `head`; a file without a final newline has none with the block either."""
    newline = _newline_of(head)
    block = as_bytes(newline)
    return head + block + tail if head.endswith(newline) else head + newline + block[: -len(newline)]


def _newline_of(head: bytes) -> bytes:
    """Returns the newline of the last line that ends with one."""
    ends = [line[len(line.rstrip(b"\r\n")) :] for line in head.splitlines(keepends=True)]
    return next((end for end in reversed(ends) if end), b"\n")


def _replace(file: Path, content: bytes) -> None:
    mode = stat.S_IMODE(file.stat().st_mode)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as temporary:
            temporary.write(content)
            temporary.flush()
            os.fsync(temporary.fileno())
        os.chmod(name, mode)
        os.replace(name, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
