"""The runner: starts a training script with the package installed, and otherwise as Python would
start it.

::

    torchrun --nproc-per-node 8 -m megatron_distopt pretrain_gpt.py ...
    deepspeed --num_gpus 8 --module megatron_distopt pretrain_gpt.py ...
    python -m megatron_distopt -m package.pretrain ...

The script is `__main__`, with its own arguments, folder, exit status and traceback. Processes that
it spawns find its functions. The DeepSpeed launcher puts --local_rank=N before the script's name;
the script receives it as its first argument.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType

from megatron_distopt.errors import ConfigError, DistOptError
from megatron_distopt.patch_points import in_force
from megatron_distopt.plugin.install import fix_host, install
from megatron_distopt.plugin.recording import (
    ITERATIONS_VARIABLE,
    NUDGE_VARIABLE,
    RECORD_VARIABLE,
    record_training,
)

_USAGE = "usage: python -m megatron_distopt [--local_rank=N] SCRIPT.py|-m MODULE [ARGUMENTS]"
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass(frozen=True)
class TrainingScript:
    """The script or module that is run."""

    name: str  # a path, or the dotted name of a module
    is_module: bool
    # the launcher's argument before the name, and everything after the name
    arguments: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> None:
    """Installs the package and runs the target. `argv` does not include the program's name; None
    for `sys.argv[1:]`.

    The exit status is the target's own, 2 for a bad command line, or 1 if the package cannot be
    installed.
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{_USAGE}\n")
        return
    try:
        target = parse_target(words)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n{_USAGE}\n")
        raise SystemExit(2) from None
    script = os.path.abspath(target.name)
    # python 3.11 can leave both folders out
    if not target.is_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(script)  # python -m put the working directory there
    try:
        if RECORD_VARIABLE in os.environ:
            fix_host(in_force)  # the host's own optimizer gets the same fixes as ours
            iterations = int(os.environ[ITERATIONS_VARIABLE])
            nudge = float(os.environ[NUDGE_VARIABLE])
            record_training(os.environ[RECORD_VARIABLE], iterations, nudge)
        install()
    except DistOptError as error:
        sys.stderr.write(f"megatron_distopt: {error}\n")
        raise SystemExit(1) from None
    sys.argv = [target.name, *target.arguments]
    sys.excepthook = _without_our_frames(sys.excepthook)
    if target.is_module:
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        return
    # Like `python` itself; runpy.run_path would put the absolute path into sys.argv[0].
    main_module = ModuleType("__main__")
    main_module.__file__ = script
    sys.modules["__main__"] = main_module
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, vars(main_module))


def parse_target(words: Sequence[str]) -> TrainingScript:
    """Splits the command line into the script and its arguments. Refuses a script that does not
    exist."""
    launcher = [word for word in words[:1] if word.startswith(("--local_rank", "--local-rank"))]
    rest = list(words[len(launcher) :])
    is_module = rest[:1] == ["-m"]
    name, arguments = rest[is_module : is_module + 1], rest[is_module + 1 :]
    if not name or (not is_module and not os.path.isfile(name[0])):
        missing = "No training script was given"
        if name:
            missing = f"There is no training script {name[0]!r}"
        raise ConfigError(f"{missing}. First write the script's path, or -m and a module.")
    return TrainingScript(name[0], is_module, (*launcher, *arguments))


def _without_our_frames(original: ExceptHook) -> ExceptHook:
    """Makes a traceback start with the first frame of the script, as it does without the runner."""
    ours = (
        __file__,
        runpy.__file__,
        os.path.join(os.path.dirname(os.path.dirname(__file__)), "__main__.py"),
    )

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename in (
            *ours,
            "<frozen runpy>",
        ):
            traceback = traceback.tb_next
        original(kind, error.with_traceback(traceback), traceback)

    return hook
