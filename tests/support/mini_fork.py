"""Drives the small fork of 2023 of tests/hosts/mini_fork: many runs in one process, because a spawn
costs seconds.

In a rank (see spawn.py), once for the switches that the fork reads while it is imported:

    fork = MiniFork.imported(file_layout="gathered")
    run = fork.train("--bf16", "--use-distributed-optimizer", ours=True)
    run.losses, run.params["..."], run.optimizer

Through a launcher, for what depends on how a process starts: `launch("torchrun", 2, [...])`.
"""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

import megatron_distopt
from tests.support.spawn import forget_groups, run_ranks
from tests.support.values import from_ranks

FOLDER = Path(__file__).parent.parent / "hosts" / "mini_fork"
SCRIPT = FOLDER / "pretrain.py"
_CORE = "megatron-core==0.2.0"
_ROOT = Path(__file__).parent.parent.parent


@cache
def core_folder() -> Path:
    """megatron-core 0.2.0 beside the virtual environment's own, installed at first use."""
    folder = Path(sys.prefix) / _CORE.replace("==", "-")
    if not folder.exists():
        unfinished = Path(tempfile.mkdtemp(dir=sys.prefix))
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*pip, "--target", str(unfinished), _CORE], check=True)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder


@dataclass(frozen=True)
class Iteration:
    """One line of the fork's training log."""

    loss: float
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    num_zeros: int | None
    lr: float


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """What one training left in this rank."""

    iterations: tuple[Iteration, ...]  # of the rank that logs
    params: Mapping[str, Tensor]  # copies of this rank's model params, by the fork's names
    optimizer: Any  # the fork's or ours
    model: Any  # the fork's chunks
    args: Any  # the fork's

    @property
    def losses(self) -> list[float]:
        """By iteration."""
        return [each.loss for each in self.iterations]


@dataclass(frozen=True)
class MiniFork:
    """The fork, imported in this process with some switches."""

    training: Any  # a module of it
    script: Any  # another one
    # optimizers of earlier trainings are used again, with their process groups
    goes_back: bool = False
    #: The layout of the last training, whose process groups the next one keeps if it has the same.
    entered: list[tuple[object, ...]] = field(default_factory=list)

    @classmethod
    def imported(
        cls, *, goes_back: bool = False, folder: Path = FOLDER, **switches: str
    ) -> MiniFork:
        """Imports the fork; `switches` are its MINI_FORK_* variables in lower case,
        MINI_FORK_NATIVE defaults to 1."""
        os.environ.setdefault("MINI_FORK_NATIVE", "1")
        # DeepSpeed takes half a second to name it
        os.environ.setdefault("MEGATRON_DISTOPT_ACCELERATOR", "torch")
        os.environ["MINI_FORK_CORE"] = str(core_folder())
        os.environ.update({f"MINI_FORK_{name.upper()}": value for name, value in switches.items()})
        sys.path.insert(0, str(folder))
        script = import_module("pretrain")
        return cls(import_module("megatron.training"), script, goes_back)

    def train(self, *words: str, ours: bool = True) -> TrainingRun:
        """Collective: the fork's own `pretrain` with these flags, with the package installed
        meanwhile or not."""
        self._forget((dist.group.WORLD, *_layout_in(words)))
        sys.argv = [str(SCRIPT), *words, "--curves", "kept"]
        installation = megatron_distopt.install() if ours else None
        kept: dict[str, Any] = {}
        setup = self.training.setup_model_and_optimizer

        def keep(*args: Any, **kwargs: Any) -> Any:
            kept["all"] = setup(*args, **kwargs)
            return kept["all"]

        def keep_curves(file: str, records: list[Any], *_: Any) -> None:
            """Collective: what the last rank has logged, on the first; digests of params and a file
            take longer."""
            last = from_ranks(records)[-1]
            kept["rows"] = last if dist.get_rank() == 0 else []

        script, replaced = (
            self.script,
            {"setup_model_and_optimizer": keep, "write_curves": keep_curves},
        )
        try:
            with mock.patch.multiple(self.training, **replaced):
                self.training.pretrain(
                    script.train_data, script.model_provider, None, script.forward_step
                )
        except BaseException:
            # whatever is under way in its groups, the next training does not meet it
            self.entered.clear()
            raise
        finally:
            if installation is not None:
                installation.undo()
        return self._result(kept["rows"], *kept["all"][:2])

    def _result(self, rows: list[dict[str, Any]], model: Any, optimizer: Any) -> TrainingRun:
        iterations = tuple(
            Iteration(
                row["loss"],
                row["grad_norm"],
                row["loss_scale"],
                bool(row["skipped"]),
                row["num_zeros"],
                row["lr"],
            )
            for row in rows
        )
        getattr(optimizer, "finish_param_gather", bool)()
        bare = model[0]
        while hasattr(bare, "module"):
            bare = bare.module
        params = {name: param.detach().clone() for name, param in bare.named_parameters()}
        return TrainingRun(
            iterations, params, optimizer, model, import_module("megatron").get_args()
        )

    def _forget(self, layout: tuple[object, ...] = ()) -> None:
        """A process trains once in a fork; here it forgets its arguments, and groups of another
        layout."""
        state = import_module("megatron.global_vars")._STATE
        state.args = state.timers = None
        if layout and self.entered == [layout]:
            return
        self.entered[:] = [layout]
        mpu = import_module("megatron.core").mpu
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        if not self.goes_back:
            forget_groups()
        for name in (
            "sequence_data_parallel",
            "sequence_parallel",
            "expert_model_parallel",
            "expert_data_parallel",
        ):
            for what in ("group", "rank", "world_size"):
                vars(mpu).pop(f"get_{name}_{what}", None)


@dataclass(frozen=True)
class InstalledFork(MiniFork):
    """The fork with the package installed from one training of ours to the next.

    Installing and undoing looks through all modules of the process and through the source of the
    fork, which costs more than a training of a few steps; the package is taken out only where the
    next training is the fork's own.
    """

    # the installation, while there is one
    kept: list[megatron_distopt.Installation] = field(default_factory=list)

    def train(self, *words: str, ours: bool = True) -> TrainingRun:
        """Collective: as `MiniFork.train`."""
        if ours:
            self.install()
        else:
            self.uninstall()
        return super().train(*words, ours=False)

    def install(self) -> None:
        if not self.kept:
            self.kept.append(megatron_distopt.install())

    def uninstall(self) -> None:
        while self.kept:
            self.kept.pop().undo()


def point_to(folder: Path, iteration: int) -> None:
    """Collective: of the checkpoints in a folder, trainings load that of this iteration."""
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()


def _layout_in(words: Sequence[str]) -> tuple[str, ...]:
    """Those of the flags of a training that say which process groups there are."""
    found = []
    for number, word in enumerate(words):
        if word == "--experts":
            found.append(word)
        elif word.endswith("-parallel-size"):
            found += words[number : number + 2]
    return tuple(found)


@dataclass(frozen=True)
class Launched:
    """What a launcher left."""

    status: int
    output: str


def launch(
    launcher: str,
    ranks: int,
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float = 120.0,
    folder: Path = FOLDER,
) -> Launched:
    """Runs `words` (a script or -m module, and arguments) under "torchrun" or "deepspeed", in a
    folder.

    The launcher's own script runs in a process that was forked with torch imported; its ranks are
    started anew.

    Args:
        launcher: its name; the one beside this Python is used.
        ranks: on this machine.
        words: with `-m MODULE` in torchrun's spelling for both.
        environment: in addition to this process's.
        seconds: time limit.
    """
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEGATRON_DISTOPT", "MINI_FORK"))
    }
    base |= {"MINI_FORK_CORE": str(core_folder()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    base |= {
        "MEGATRON_DISTOPT_ACCELERATOR": "torch",
        "PYTHONPATH": str(_ROOT),
        **(environment or {}),
    }
    for _ in range(3):
        port, command = str(free_port()), [str(Path(sys.executable).parent / launcher)]
        if launcher == "deepspeed":
            module = ["--module", *words[1:]] if words[0] == "-m" else list(words)
            command += ["--quiet", "--num_accelerators", str(ranks), "--master_port", port, *module]
        else:
            command += ["--nproc-per-node", str(ranks), "--master-port", port, *words]
        (done,) = run_ranks(run_script, 1, command, base, folder, seconds=seconds)
        if "EADDRINUSE" not in done.stderr:  # another process was faster
            break
    return Launched(done.returncode, done.stdout + done.stderr)


def run_script(
    rank: int, size: int, command: list[str], environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """A script of Python in this process, which a rank's is: it was forked with torch imported."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    with tempfile.TemporaryDirectory() as left:
        files = [Path(left, name) for name in ("out", "error")]
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        status = 0
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:  # noqa: BLE001 - torchrun's, of a rank that failed
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        return subprocess.CompletedProcess(command, status, *(file.read_text() for file in files))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
