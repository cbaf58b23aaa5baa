"""The command `megatron-distopt`: its command lines, and the one place that prints.

Most commands need torch; the file that answers a command is imported when it runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from megatron_distopt.cli import plan_command
from megatron_distopt.cli.show import Answer
from megatron_distopt.errors import DistOptError
from megatron_distopt.plugin.entry_point_block import BLOCK
from megatron_distopt.version import VERSION

_PROGRAM = "megatron-distopt"
#: What a shell makes of a command that Ctrl-C ended.
_INTERRUPTED = 130
#: What `convert` writes.
FORMATS = ("distopt", "per-rank", "gathered", "plain", "torch")

_DOCTOR = """Says whether training with this optimizer could start. It reads the fork's source,
looks at this Python, its devices and launchers, and then installs the package and imports the
fork's training module in another process. That trial needs no GPU and leaves nothing behind.
Exit status 0 if training could start, 1 if there is a problem."""
_DOCTOR_EXAMPLES = """examples:
  megatron-distopt doctor                          the Megatron that this Python would import
  megatron-distopt doctor ~/Megatron-DeepSpeed -- --use-distributed-optimizer --bf16"""
_PATCH = f"""Lets a fork find this package by itself. It adds {len(BLOCK)} marked lines after the
fork's get_megatron_optimizer, which ask for installed packages that register an optimizer factory.
The place is found in the syntax tree, so this also works on a fork that has drifted. Exit status 0
if the patch is applied or can be, 1 if not."""
_COMPARE = """Runs the first iterations of a training with the host's optimizer and with this one,
and says whether they are equal to the bit, equal but for rounding, or where they begin to differ.
LAUNCH LINE starts with torchrun, deepspeed or python. No checkpoint is read or written.
The results are in compare.json and compare.png. Exit status 0 if the runs are the same, 1 if not,
3 if there is no verdict, because the host's own run did not run or cannot be repeated."""
_CHECKPOINT = """CKPT is the folder of a checkpoint, its manifest.json, an iteration, or the
--save folder of a run, whose latest iteration is taken. It may be in any
format that convert reads. No GPU, process group or Megatron is needed."""
_INSPECT = """Prints what a checkpoint holds, without reading a tensor: params, shapes,
dtypes, files, param groups, steps, the loss scale, and who wrote it.

"""
_VERIFY = """Reads a whole checkpoint, and names the file and the param of everything that
is wrong: checksums, missing or repeated elements, and values that are not
finite. Exit status 0 if nothing is wrong, 1 if something is.

"""
_DIFF = """Compares two checkpoints, written at any sizes: of every tensor the largest
absolute difference, the same against the largest value in A, and how many
elements differ; then options, steps and loss scales. Exit status 0 if they
are equal to the bit, 1 if not, 2 if one cannot be read.

A and B are what inspect takes for CKPT."""
_CONVERT = """Reads a checkpoint in one format and writes it in another:

  distopt     this package's own; loads at any size
  per-rank    Megatron-LM 23.04: one file a rank, for one data-parallel size
  gathered    Megatrons since 23.06 and Megatron-DeepSpeed
  plain       a Megatron without a distributed optimizer
  torch       one file for torch.load

SRC is whatever inspect takes as CKPT. per-rank, gathered and plain need the
model files of its iteration; DST is then a new iteration that has them."""

#: By name: the module that answers, a question, and what it does.
_COMMANDS = {
    "doctor": ("doctor", "could training start here, and with what?", _DOCTOR),
    "patch": ("patch", "let a fork find this package by itself, or undo that", _PATCH),
    "compare": ("compare_command", "does a training stay the same with this optimizer?", _COMPARE),
    "inspect": ("inspect", "what does a checkpoint hold?", _INSPECT + _CHECKPOINT),
    "verify": ("verify", "is a checkpoint complete and undamaged?", _VERIFY + _CHECKPOINT),
    "diff": ("diff", "how do two checkpoints differ?", _DIFF),
    "convert": ("convert_command", "write a checkpoint in another format", _CONVERT),
    "plan": (
        "plan_command",
        "what would a choice of parallel sizes cost?",
        plan_command.DESCRIPTION,
    ),
}
_FORK = "folder that holds the folder megatron"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` is without the program's name, and `sys.argv[1:]` where None.

    Returns:
        The exit status: 0, or 1 where something stands in the way of training or patching, or is
        wrong with a checkpoint; `diff` has 2 for a checkpoint that it cannot read, and `compare` 3
        where there is no verdict.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    end = (
        words.index("--")
        if words[:1] in (["doctor"], ["compare"]) and "--" in words
        else len(words)
    )
    parsed = _parser().parse_args(words[:end])
    parsed.launch = words[end + 1 :]
    status: int
    try:
        answer: Answer = import_module(f"megatron_distopt.cli.{parsed.module}").answer(parsed)
        # A file or a pipe has no width.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(answer.as_json() if parsed.json else answer.as_text(width))
        sys.stdout.flush()
        status = answer.status
    # such as `| head`: Python would say so again when it flushes at the end
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (DistOptError, OSError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        status = parsed.refused
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        status = _INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        _PROGRAM, description="A distributed optimizer for Megatron forks."
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {VERSION}")
    parser.set_defaults(refused=1, json=False)
    commands = parser.add_subparsers(title="commands", metavar="|".join(_COMMANDS), required=True)
    of = {}
    for name, (module, text, description) in _COMMANDS.items():
        shape = argparse.RawDescriptionHelpFormatter
        of[name] = commands.add_parser(
            name, help=text, description=description, formatter_class=shape
        )
        of[name].set_defaults(module=module)
        if name != "patch":
            of[name].add_argument("--json", action="store_true", help="print one JSON document")
    doctor, patch, compare, diff, convert = (
        of[name] for name in ("doctor", "patch", "compare", "diff", "convert")
    )
    doctor.usage = f"{_PROGRAM} doctor [-h] [--json] [--no-trial] [FORK] [-- LAUNCH FLAGS ...]"
    doctor.epilog = _DOCTOR_EXAMPLES
    text = "do not import anything of the fork, for a login node without its packages"
    doctor.add_argument("--no-trial", dest="has_trial", action="store_false", help=text)
    doctor.add_argument("fork", nargs="?", type=Path, metavar="FORK", help=_FORK)
    compare.usage = (
        f"{_PROGRAM} compare [-h] [--json] [--iterations N] [--keep-load] [--output DIR] -- LAUNCH "
        "LINE"
    )
    compare.add_argument(
        "--iterations",
        type=_count,
        default=20,
        metavar="N",
        help="iterations of each run (default 20)",
    )
    compare.add_argument(
        "--keep-load", action="store_true", help="start from the checkpoint that the line loads"
    )
    compare.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for the two files (default .)",
    )
    compare.set_defaults(refused=3)
    what = patch.add_mutually_exclusive_group(required=True)
    for action, meaning in (
        ("check", "say whether the patch can be applied or is applied, and print the difference"),
        ("apply", "put the lines in"),
        ("undo", "take exactly those lines out, which restores the file to the byte"),
    ):
        what.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, help=meaning
        )
    patch.add_argument("fork", type=Path, metavar="FORK", help=_FORK)
    for name in ("inspect", "verify"):
        of[name].add_argument("checkpoint", type=Path, metavar="CKPT")
    diff.add_argument("first", type=Path, metavar="A", help="a checkpoint")
    diff.add_argument("second", type=Path, metavar="B", help="another")
    diff.set_defaults(refused=2)
    convert.add_argument("source", type=Path, metavar="SRC", help="a checkpoint")
    convert.add_argument("target", type=Path, metavar="DST", help="the folder or file to write")
    convert.add_argument("--to", choices=FORMATS, required=True, help="the format to write")
    convert.add_argument(
        "--dp", type=_count, metavar="N", help="data-parallel size of the run that will load it"
    )
    text = "use the averages of a run with ema_decay as the params, also in the model files"
    convert.add_argument("--averaged", action="store_true", help=text)
    convert.add_argument(
        "--resume-step",
        type=_count,
        metavar="N",
        help="number of updates so far, if SRC does not have it",
    )
    plan_command.add_arguments(of["plan"], _count)
    return parser


def _count(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


if __name__ == "__main__":
    sys.exit(main())
