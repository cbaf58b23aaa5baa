"""The launch line that `megatron-distopt compare` is given, and the trainings that it starts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from megatron_distopt.cli.recorded_run import RecordedRun
from megatron_distopt.config import Switch
from megatron_distopt.errors import ConfigError, HostError
from megatron_distopt.plugin.recording import ITERATIONS_VARIABLE, NUDGE_VARIABLE, RECORD_VARIABLE

_PACKAGE, _MODULE_FLAGS = __name__.partition(".")[0], ("-m", "--module")
_LAUNCHER, _LAUNCHING = (
    re.compile(r"torchrun|deepspeed|python[\d.]*"),
    re.compile(r"torch\.distributed\.(run|launch)"),
)
#: Flags by pattern: what a host's undistributed optimizer refuses, what writes files or ends a run,
#: what loads.
DISTRIBUTED = "use-distributed-optimizer|overlap-param-gather.*"
WRITING = "(async-)?save.*|exit-.*|non-persistent-.*|tensorboard-dir|wandb-.*|distopt-protect.*"
LOADING = "load|pretrained-checkpoint|ckpt-step|use-checkpoint-args|universal-checkpoint"
# variables that do so
_LEFT_OUT = re.compile("MEGATRON_DISTOPT_(PROTECT_.*|LOG_DIGESTS|DIGEST_FILE)")
#: The line of an exception: that after the lines of code of its traceback, which are indented.
_RAISED = re.compile(
    r"^(?P<rank>(?:\[[^\]\n]*\]:? ?)*) {2,}\S.*\n(?P=rank)(?P<text>[A-Za-z_][\w.]*(?:: .*)?)$",
    re.MULTILINE,
)
#: Exceptions of ranks and launchers that only report the end of another rank.
_CONSEQUENCE = re.compile(
    "ChildFailedError|CalledProcessError|DistBackendError|DistNetworkError|Broken pipe|"
    "Connection (closed|reset|refused)|has ended|ended by"
)
#: How launchers report a process that was ended by a signal.
_KILLED = re.compile(r"(?:exit ?code *|return code )[:=] *-(\d+)")
#: Errors that argument parsers and our runner print without a traceback.
_REFUSED = re.compile(r"^(?:\[.*?\]:?\s*)*(.*: error: .*|megatron_distopt: .*)", re.MULTILINE)
#: Below this a folder counts as full: less than what one iteration writes.
_FULL_NBYTES = 1 << 20


def with_runner(words: Sequence[str]) -> list[str]:
    """Puts our runner into a launch line where it is missing; refuses one without a training
    script."""
    if any(flag in _MODULE_FLAGS and word == _PACKAGE for flag, word in pairwise(words)):
        return list(words)
    names = [Path(word).name for word in words]
    first = next(
        (place for place, name in enumerate(names) if _LAUNCHER.fullmatch(name)), len(words)
    )
    for place, (flag, word) in enumerate(pairwise(words[first:]), first + 1):
        is_module = flag in _MODULE_FLAGS and not _LAUNCHING.fullmatch(word)
        if is_module or word.endswith(".py"):
            ours = (
                [_PACKAGE, "-m"]
                if is_module
                else ["--module" if names[first] == "deepspeed" else "-m", _PACKAGE]
            )
            return [*words[:place], *ours, *words[place:]]
    raise ConfigError(
        f"The launch line {words} does not start a script by torchrun, deepspeed or python. Write "
        "the launch line after --, for example -- torchrun --nproc-per-node 8 pretrain_gpt.py "
        "ARGUMENTS."
    )


def without(words: Sequence[str], flags: str) -> list[str]:
    """Leaves out flags of the script that match a pattern, with their values."""
    at, is_kept = words.index(_PACKAGE), True
    kept = list(words[:at])
    for word in words[at:]:
        if word.startswith("--"):
            is_kept = not re.fullmatch(f"--({flags})", word.partition("=")[0].replace("_", "-"))
        kept += [word] * is_kept
    return kept


def plus(words: Sequence[str], *flags: str) -> list[str]:
    """Adds flags of the script, which win because they are last, with underscores where the line
    has those."""
    own = " ".join(words[words.index(_PACKAGE) :])
    has_underscores = re.search(r"--\w+_\w", own) and not re.search(r"--\w+-\w", own)
    return [
        *words,
        *(re.sub(r"(?<=\w)-", "_", flag) if has_underscores else flag for flag in flags),
    ]


def end_by_signals() -> None:
    """Lets TERM and HUP end the command as Ctrl-C does, so that it leaves nothing behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, signal.default_int_handler)


def train(
    scratch: Path,
    iterations: int,
    name: str,
    words: Sequence[str],
    switch: Switch,
    nudge: float = 0.0,
) -> RecordedRun:
    """Runs one training to its end, and shows how far it is; HostError where it ends before its
    time.

    Args:
        nudge: relative increase of the learning rate.
    """
    folder, console = Path(tempfile.mkdtemp(dir=scratch)), Console(stderr=True, highlight=False)
    environment = {
        name: value for name, value in os.environ.items() if not _LEFT_OUT.fullmatch(name)
    }
    environment |= {
        "MEGATRON_DISTOPT": switch.value,
        RECORD_VARIABLE: str(folder),
        ITERATIONS_VARIABLE: str(iterations),
        NUDGE_VARIABLE: str(nudge),
        "TMPDIR": str(scratch),
    }
    log, text, status, run = folder / "log", "", None, RecordedRun(folder)
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while status is None:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(0.5)
            run, before = RecordedRun(folder), text
            last = "".join(f", loss {loss:.6f}" for loss in run.values("loss")[-1:])
            text = f"{name}: iteration {len(run.steps)} of {iterations}{last}"
            if text != before or (console.is_terminal and status is not None):
                console.print(text, end="\r" if console.is_terminal and status is None else "\n")
    finally:
        _end(process, folder)
    if len(run.steps) < (iterations if status else 1):
        reason = _reason(log.read_text("utf-8", errors="replace"), status)
        if shutil.disk_usage(scratch).free < _FULL_NBYTES:
            reason = f"{scratch.parent} has no space left: set TMPDIR to another folder"
        raise HostError(
            f"{name}: the run ended with status {status} after {len(run.steps)} calls of "
            f"train_step. {reason}. To try it alone, run MEGATRON_DISTOPT={switch.value} "
            f"{shlex.join(words)}"
        )
    return run


def _reason(log: str, status: int) -> str:
    """Why a training ended, in one line of its log."""
    raised = [found["text"] for found in _RAISED.finditer(log)]
    causes = [text for text in raised if not _CONSEQUENCE.search(text)][-1:]
    numbers = [*map(int, _KILLED.findall(log)), -status]
    # the launcher sends TERM to those that are left
    killed = [signal.Signals(each) for each in numbers if each > 0 and each != signal.SIGTERM]
    causes += [f"A rank was killed by {each.name}" for each in killed[:1]]
    lines = [line.strip() for line in log.splitlines() if re.search(r"\w", line)]
    found = [*causes, *_REFUSED.findall(log), *raised[-1:], *lines[-1:], "no output"]
    return str(found[0]).rstrip(".")


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends a launcher and all that it has started, whose environment has the name of the folder."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10.0)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if f"={folder}\0".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.wait()
