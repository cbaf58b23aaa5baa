"""`megatron-distopt patch`: lets a fork find the package by itself, or takes that out again."""

from __future__ import annotations

import argparse
from difflib import unified_diff

from megatron_distopt.cli.show import Answer
from megatron_distopt.plugin.entry_point_block import BLOCK
from megatron_distopt.plugin.fork_edit import Edit, find_block, plan_apply, plan_undo, write
from megatron_distopt.plugin.fork_source import fork_at


def answer(parsed: argparse.Namespace) -> Answer:
    """Checks, applies or undoes the patch; where that cannot be done, nothing is changed."""
    tree, fork, action = fork_at(parsed.fork), parsed.fork, parsed.action
    block = find_block(tree)
    is_applied = block is not None
    if action == ("apply" if is_applied else "undo"):
        found = "applied already" if is_applied else "not applied"
        return Answer({}, [f"is {found}: nothing to {'do' if is_applied else 'undo'}"])
    edit = plan_apply(tree) if block is None else plan_undo(tree, block)
    if action != "check":
        write(edit)
    place = f"{edit.name}, {len(BLOCK)} lines after line {edit.line}"
    if action == "undo":
        text = f"undone: {place}; the file is as it was before"
    elif action == "check" and not is_applied:
        text = (
            f"can be applied: {place}. To put them in, run megatron-distopt patch --apply "
            f"{fork}\n\n{as_diff(edit)}"
        )
    else:
        text = (
            f"{'is ' if is_applied else ''}applied: {place}. To take them out, run "
            f"megatron-distopt patch --undo {fork}"
        )
    return Answer({}, [text.removesuffix("\n")])


def as_diff(edit: Edit) -> str:
    """Returns a unified diff without context, so that no line of the fork is in it.

    `git apply --unidiff-zero` and `patch -p1` take it, for a file that has the same number of lines
    before the place.
    """
    before, after = (
        [line.decode("utf-8", "replace") for line in content.splitlines(keepends=True)]
        for content in (edit.before, edit.after)
    )
    lines = unified_diff(before, after, f"a/{edit.name}", f"b/{edit.name}", n=0)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
