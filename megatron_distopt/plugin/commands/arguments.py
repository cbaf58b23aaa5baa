"""The command lines of `inspect`, `verify`, `diff`, `convert` and `plan`. Imports nothing heavy: the commands
themselves need torch, and are imported when they run."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path

from megatron_distopt.errors import refusal
from megatron_distopt.plugin.commands import plan_arguments

__all__ = ["FORMATS", "add_commands"]

#: What `convert` writes.
FORMATS = ("distopt", "per-rank", "gathered", "plain", "torch")
_CHECKPOINT = """CKPT is the folder of a checkpoint, its manifest.json, an iteration, or the
--save folder of a run, of which it takes the latest iteration. It may be in
any format that convert reads. Needs no GPU, no process group, no Megatron."""
_INSPECT = f"""Prints what a checkpoint holds, without reading a tensor: params, shapes,
dtypes, files, param groups, steps, the loss scale, and who wrote it.

{_CHECKPOINT}"""
_VERIFY = f"""Reads a whole checkpoint, and names file and param of all that is wrong:
checksums, elements that are missing or there twice, values that are not
finite, params in no group or in two. Exit status 0 if it is whole, 1 if not.

{_CHECKPOINT}"""
_DIFF = """Compares two checkpoints, written at any sizes: of every tensor the largest
absolute difference, the same against the largest value in A, and how many
elements differ; then options, steps and loss scales. Exit status 0 if they
are equal to the bit, 1 if not, 2 if one cannot be read.

A and B are what inspect takes for CKPT."""
_CONVERT = """Reads a checkpoint in one format and writes it in another:

  distopt     of this package; loads at any size
  per-rank    of Megatron-LM 23.04: a file a rank, for one data-parallel size
  gathered    of the Megatrons since 23.06, Megatron-DeepSpeed among them
  plain       of a Megatron without a distributed optimizer
  torch       one file for torch.load

SRC is what inspect takes. per-rank, gathered and plain need the model files of
its iteration, and DST is then a new iteration with them."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> list[argparse.ArgumentParser]:
    """Declares them.

    Returns:
        Their parsers; what each parses has the module that answers it, by name, in `module`.
    """
    inspect = _command(commands, "inspect", "what does a checkpoint hold?", _INSPECT)
    inspect.add_argument("checkpoint", type=Path, metavar="CKPT")
    verify = _command(commands, "verify", "is a checkpoint whole?", _VERIFY)
    verify.add_argument("checkpoint", type=Path, metavar="CKPT")
    diff = _command(commands, "diff", "in what do two checkpoints differ?", _DIFF)
    diff.add_argument("first", type=Path, metavar="A", help="a checkpoint")
    diff.add_argument("second", type=Path, metavar="B", help="another")
    diff.set_defaults(refused=2)
    plan = _command(commands, "plan", "what would a choice of parallel sizes cost?", plan_arguments.DESCRIPTION)
    plan_arguments.add_arguments(plan, _count)
    return [inspect, verify, diff, _add_convert(commands), plan]


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, description: str
) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=text, description=description, formatter_class=shape)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(module=f"megatron_distopt.plugin.commands.{name}")
    return command


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    command = _command(commands, "convert", "write a checkpoint in another format", _CONVERT)
    command.add_argument("source", type=Path, metavar="SRC", help="a checkpoint")
    command.add_argument("target", type=Path, metavar="DST", help="the folder or file to write")
    command.add_argument("--to", type=_format, required=True, metavar="FORMAT", help=", ".join(FORMATS))
    command.add_argument("--dp", type=_count, metavar="N", help="data-parallel size of the run to come")
    command.add_argument("--resume-step", type=_count, metavar="N", help="updates so far, where SRC does not say it")
    return command


def _format(text: str) -> str:
    if text in FORMATS:
        return text
    near = get_close_matches(text, FORMATS, n=2, cutoff=0.6)
    remedy = f"Write --to {' or '.join(sorted(near))}" if near else "Write --to distopt for the format of this package"
    raise argparse.ArgumentTypeError(refusal("format", repr(text), f"be one of {', '.join(FORMATS)}", remedy))


def _count(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(
        refusal("number", repr(text), "be a whole number of at least 1", "Write one such as 8")
    )
