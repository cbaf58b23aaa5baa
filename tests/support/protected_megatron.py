"""A training with a Megatron, for nodes that die: `torchrun ... protected_megatron.py fork|core
PLAN`.

PLAN is that of protected_training.py, whose JSON lines are written here, too; the host loads, saves
and resumes by itself. "fork" is the small fork of 2023, "core" the installed megatron-core in a
stand-in for Megatron-LM's script.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import dropout

import megatron_distopt
from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.checkpoint.protect.restart import Resumed
from tests.support.cases import Case
from tests.support.mini_fork import SCRIPT, MiniFork
from tests.support.protected_training import Log, Plan, wait_for_snapshot
from tests.support.step_records import recorded_steps

FP16 = "--fp16 --initial-loss-scale 262144 --loss-scale-window 2 --hysteresis 1 --clip-grad 0.5"
CORE = Case(
    "distopt",
    tp=2,
    dp=2,
    precision="fp16",
    initial_loss_scale=2.0**12,
    loss_scale_window=2,
    lr=1e-2,
)
STEP_RECORDS = "steps"  # the file of what each step computed, in the folder of the run


def with_chance(script: Any) -> None:
    """Lets random numbers of all kinds decide about each loss of the small fork."""
    plain = script.forward_step

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        output, loss_of = plain(iterator, model)
        noise = dropout(torch.ones(4), 0.5).sum() + random.random() + float(np.random.rand())
        return output * noise, loss_of

    script.forward_step = forward_step


class Notes:
    """What a training does, by functions of the host's script that are replaced."""

    def __init__(self, plan: Plan, training: Any, args: Callable[[], Any]) -> None:
        self._plan, self._args, self._source = plan, args, "disk"
        self._log = Log(plan, 0)
        self._train, training.train = training.train, self.train
        self._training_log, training.training_log = training.training_log, self.training_log
        resume = Protection.resume

        def noted_resume(protection: Protection, *given: Any, **named: Any) -> Resumed | None:
            resumed = resume(protection, *given, **named)
            self._source = "disk" if resumed is None else "memory"
            return resumed

        Protection.resume = noted_resume  # type: ignore[method-assign]

    def train(self, forward_step: Any, chunks: Sequence[torch.nn.Module], *others: Any) -> Any:
        step = self._args().iteration
        self._log(begins_at=step, source=self._source if step else "nothing", pid=os.getpid())
        records = self._train(forward_step, chunks, *others)
        digest = hashlib.sha256(repr((random.random(), np.random.rand(), torch.rand(()))).encode())
        for param in (param for chunk in chunks for param in chunk.parameters()):
            digest.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
        self._log(ended=self._plan.steps, checksum=digest.hexdigest())
        return records

    def training_log(self, *given: Any) -> Any:
        record = self._training_log(*given)
        if dist.get_rank() == 0:
            self._log(step=record["iteration"], loss=[*record.values()], lr=record["lr"])
        wait_for_snapshot()
        time.sleep(self._plan.pause)
        return record


def train_fork(plan: Plan) -> None:
    fork = MiniFork.imported(file_layout="gathered")
    with_chance(fork.script)
    words = (
        f"--use-distributed-optimizer {FP16} --tensor-model-parallel-size 2 --global-batch-size 8"
    ).split()
    words += ["--train-iters", str(plan.steps), "--load", plan.load or f"{plan.folder}/nothing"]
    words += ["--save", f"{plan.folder}/disk", "--save-interval", "1"] if plan.save_at else []
    for name, value in plan.options.items():
        words += [f"--distopt-{name.replace('_', '-')}", str(value)]
    sys.argv = [str(SCRIPT), *words]
    megatron_distopt.install()
    import megatron

    Notes(plan, fork.training, megatron.get_args)
    script = fork.script
    fork.training.pretrain(script.train_data, script.model_provider, None, script.forward_step)


def train_core(plan: Plan) -> None:
    from tests.support.core_script import ScriptOfCore

    os.environ.update(
        {f"MEGATRON_DISTOPT_{name.upper()}": str(value) for name, value in plan.options.items()}
    )
    dist.init_process_group("gloo")
    script, copies = ScriptOfCore.imported(), dist.get_world_size() // CORE.tp
    Notes(plan, script.training, lambda: script.args)
    case = CORE.of(dp=copies, num_microbatches=CORE.num_microbatches * CORE.dp // copies)
    load = Path(plan.load or f"{plan.folder}/nothing")
    script.run(case, load, train_iters=plan.steps, save=f"{plan.folder}/disk", save_at=plan.save_at)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    plan = Plan.read(sys.argv[2])
    with recorded_steps(Path(plan.folder) / STEP_RECORDS):
        {"fork": train_fork, "core": train_core}[sys.argv[1]](plan)
    dist.destroy_process_group()
