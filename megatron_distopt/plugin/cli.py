"""The command `megatron-distopt`: doctor, hosts, patch, plan, and those on checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from megatron_distopt.errors import DistOptError
from megatron_distopt.hosts.generations import GENERATIONS, Generation
from megatron_distopt.hosts.source.block import BLOCK
from megatron_distopt.hosts.source.tree import fork_at
from megatron_distopt.hosts.tried import TRIED, Tried
from megatron_distopt.plugin.commands.answer import Answer
from megatron_distopt.plugin.commands.arguments import add_commands
from megatron_distopt.plugin.doctor.findings import as_json, as_table, can_start
from megatron_distopt.plugin.patch_files import Edit, as_diff, is_patched, plan_apply, plan_undo, write
from megatron_distopt.version import VERSION

__all__ = ["main"]

_PROGRAM = "megatron-distopt"
#: What a shell makes of a command that Ctrl-C ended.
_INTERRUPTED = 130
_DOCTOR = """Says whether training with this optimizer could start: reads the fork's source without importing it, and
looks at this Python, its devices, kernels and launchers. Exit status 0 if it could, 1 if there is a problem."""
_DOCTOR_EXAMPLES = """examples:
  megatron-distopt doctor                          the Megatron that this Python would import
  megatron-distopt doctor ~/Megatron-DeepSpeed -- --use-distributed-optimizer --bf16 --DDP-impl local"""
_PATCH = f"""Lets a fork find this package by itself: {len(BLOCK)} marked lines after its get_megatron_optimizer ask for
installed packages that register an optimizer factory. The place is found by the syntax tree, so it works on a fork
that has drifted. Exit status 0 if it can be or is done, 1 if not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: without the program's name; `sys.argv[1:]` where None.

    Returns:
        The exit status: 0, or 1 where something stands in the way of training or patching, or is wrong with a
        checkpoint; `diff` has 2 for a checkpoint that it cannot read.

    Raises:
        SystemExit: 2 for a bad command line, 0 after -h.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if words[:1] == ["doctor"] and "--" in words else len(words)
    parsed = _parser().parse_args(words[:end])
    parsed.launch = words[end + 1 :]
    status: int
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
    except DistOptError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        status = parsed.refused
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        status = _INTERRUPTED
    except BrokenPipeError:  # such as `| head`: Python would say so again when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(_PROGRAM, description="A distributed optimizer for Megatron forks.")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {VERSION}")
    parser.set_defaults(refused=1)
    names = "doctor|hosts|patch|inspect|verify|diff|convert|plan"
    commands = parser.add_subparsers(title="commands", metavar=names, required=True)
    _add_doctor(commands)
    _add_hosts(commands)
    _add_patch(commands)
    for command in add_commands(commands):
        command.set_defaults(run=_on_checkpoints)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        usage=f"{_PROGRAM} doctor [-h] [--json] [FORK] [-- LAUNCH FLAGS ...]",
        help="would training start here, and with what?",
        description=_DOCTOR,
        epilog=_DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("fork", nargs="?", type=Path, metavar="FORK", help="folder that holds the folder megatron")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(run=_doctor)


def _add_hosts(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "which Megatrons are supported, and what was run"
    command = commands.add_parser("hosts", help=text, description=f"Prints {text}.")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(run=_hosts)


def _add_patch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "patch",
        help="let a fork find this package by itself, or take that out again",
        description=_PATCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = command.add_mutually_exclusive_group(required=True)
    for action, text in (
        ("check", "say whether it can be done or is done, and print the difference"),
        ("apply", "put the lines in"),
        ("undo", "take exactly those lines out; the file is as before, to the byte"),
    ):
        what.add_argument(f"--{action}", dest="action", action="store_const", const=action, help=text)
    command.add_argument("fork", type=Path, metavar="FORK", help="folder that holds the folder megatron")
    command.set_defaults(run=_patch)


def _doctor(parsed: argparse.Namespace) -> int:
    findings = import_module("megatron_distopt.plugin.doctor.diagnose").diagnose(parsed.fork, parsed.launch)
    print(as_json(findings) if parsed.json else as_table(findings, _width()))
    return 0 if can_start(findings) else 1


def _on_checkpoints(parsed: argparse.Namespace) -> int:
    answer: Answer = import_module(parsed.module).answer(parsed)
    print(answer.as_json() if parsed.json else answer.as_text(_width()))
    return answer.status


def _width() -> int | None:
    """Of the terminal; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _hosts(parsed: argparse.Namespace) -> int:
    if parsed.json:
        rows = {"generations": [_as_row(each) for each in GENERATIONS], "tried": [*map(dataclasses.asdict, TRIED)]}
        print(json.dumps(rows, indent=2))
        return 0
    for generation in GENERATIONS:
        patch_points = ", ".join(map(str, generation.patch_points))
        print(f"{'supported' if generation.is_supported else 'not supported'}: {generation.name}")
        print(f"  who       {generation.examples}")
        print(f"  replaced  {patch_points}" if generation.is_supported else f"  instead   {generation.remedy}")
    for tried in TRIED:
        print(f"\n{_as_text(tried)}")
    return 0


def _as_row(generation: Generation) -> dict[str, object]:
    return {
        "name": generation.name,
        "examples": generation.examples,
        "is_supported": generation.is_supported,
        "patch_points": [*map(str, generation.patch_points)],
        "remedy": generation.remedy,
    }


def _as_text(tried: Tried) -> str:
    head = f"run: {tried.host} {tried.version}, {tried.date}: {tried.result}"
    return f"{head}\n  what      {tried.what}\n  where     {tried.where}"


def _patch(parsed: argparse.Namespace) -> int:
    tree = fork_at(parsed.fork)
    is_applied = is_patched(tree)
    if parsed.action == ("apply" if is_applied else "undo"):
        print("is applied already: nothing to do" if is_applied else "is not applied: nothing to undo")
        return 0
    edit = plan_undo(tree) if is_applied else plan_apply(tree)
    if parsed.action != "check":
        write(edit)
    print(_said(parsed.action, edit, parsed.fork, is_applied=is_applied), end="")
    return 0


def _said(action: str, edit: Edit, fork: Path, *, is_applied: bool) -> str:
    place = f"{edit.name}, {len(BLOCK)} lines after line {edit.line}"
    if action == "undo":
        return f"undone: {place}; the file is as it was before\n"
    undo = f"megatron-distopt patch --undo {fork} takes them out"
    if action == "apply":
        return f"applied: {place}; {undo}\n"
    if is_applied:
        return f"is applied: {place}; {undo}\n"
    return f"can be applied: {place}; megatron-distopt patch --apply {fork} puts them in\n\n{as_diff(edit)}"
