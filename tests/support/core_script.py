"""A stand-in for the training script of Megatron-LM around the installed megatron-core: as much as
a restart meets.

`ScriptOfCore.imported()` in a rank makes `megatron.training`, whose functions have the names, the
places and the order of calls that Megatron-LM's have; tests/hosts/test_main_line.py has the real
one.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_GLOBAL_VARS = "_GLOBAL_ARGS = None\n"
_CHECKPOINTING = """
import random
from pathlib import Path

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from megatron.training import global_vars

TRACKER = "latest_checkpointed_iteration.txt"


def file_in(folder, iteration):
    ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    return Path(folder) / f"iter_{iteration:07d}" / "mp_rank_{:02d}_{:03d}.pt".format(*ranks)


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, operations):
    args = global_vars._GLOBAL_ARGS
    file = file_in(args.save, iteration)
    optimizer.save(file.parent / "optimizer")
    tensor_parallel_size = mpu.get_tensor_model_parallel_world_size()
    layout = tensor_parallel_size, mpu.get_pipeline_model_parallel_world_size()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), tracked
    scheduler = opt_param_scheduler.state_dict()
    others = scheduler, args.consumed_train_samples, operations, layout, states
    if mpu.get_data_parallel_rank() == 0:
        torch.save(others, file)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / TRACKER).write_text(str(iteration))


def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg="load", strict=True):
    args = global_vars._GLOBAL_ARGS
    folder = Path(getattr(args, load_arg))
    if not (folder / TRACKER).exists():
        return 0, 0
    iteration = int((folder / TRACKER).read_text())
    file = file_in(folder, iteration)
    if not file.exists():
        file = file.with_name("mp_rank_00_000.pt")
    saved = torch.load(file, weights_only=False)
    scheduler, args.consumed_train_samples, operations, layout, states = saved
    optimizer.load(file.parent / "optimizer")
    opt_param_scheduler.load_state_dict(scheduler)
    tensor_parallel_size = mpu.get_tensor_model_parallel_world_size()
    if layout == (tensor_parallel_size, mpu.get_pipeline_model_parallel_world_size()):
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        tensor_parallel.get_cuda_rng_tracker().set_states(states[3])
    return iteration, operations
"""
_TRAINING = """
from megatron.training import global_vars
from megatron.training.checkpointing import load_checkpoint, save_checkpoint

updates = []


def update_num_microbatches(consumed_samples, consistency_check=True, verbose=False):
    updates.append(consumed_samples)


def setup(model, optimizer, opt_param_scheduler):
    args = global_vars._GLOBAL_ARGS
    loaded = load_checkpoint(model, optimizer, opt_param_scheduler)
    args.iteration, args.num_floating_point_operations_so_far = loaded


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config):
    record = forward_step_func()
    opt_param_scheduler.step(increment=global_vars._GLOBAL_ARGS.global_batch_size)
    return record


def training_log(iteration, lr, record, operations):
    return {"iteration": iteration, "lr": lr, "record": record, "operations": operations}


def train(forward_step_func, model, optimizer, opt_param_scheduler):
    args = global_vars._GLOBAL_ARGS
    records, iteration = {}, args.iteration
    num_floating_point_operations_so_far = args.num_floating_point_operations_so_far
    while iteration < args.train_iters:
        args.curr_iteration = iteration
        record = train_step(forward_step_func, None, model, optimizer, opt_param_scheduler, None)
        iteration += 1
        args.consumed_train_samples += args.global_batch_size
        num_floating_point_operations_so_far += 1000
        lr = optimizer.param_groups[0]["lr"]
        records[iteration] = training_log(
            iteration, lr, record, num_floating_point_operations_so_far
        )
        if iteration in args.save_at:
            save_checkpoint(
                iteration,
                model,
                optimizer,
                opt_param_scheduler,
                num_floating_point_operations_so_far,
            )
    return records
"""


@dataclass
class ScriptOfCore:
    """The script's modules, and what trains in it."""

    training: Any
    #: By iteration what was logged: learning rate, operations, and loss, norm, loss scale, numbers
    #: drawn at random.
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    optimizer: Any = None
    args: Any = None

    @classmethod
    def imported(cls) -> ScriptOfCore:
        """Makes the modules, for the life of the process."""
        sources = {
            "": "",
            ".global_vars": _GLOBAL_VARS,
            ".checkpointing": _CHECKPOINTING,
            ".training": _TRAINING,
        }
        for name, source in sources.items():
            module = ModuleType(f"megatron.training{name}")
            sys.modules[module.__name__] = module
            exec(source, vars(module))
        return cls(module)

    def run(self, case: Any, load: Path, *, train_iters: int, **arguments: Any) -> None:
        """Collective: a start of the script."""
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        from tests.support.gpt import Training

        args = SimpleNamespace(
            load=str(load), iteration=0, train_iters=train_iters, save=None, save_at=()
        )
        vars(args).update(
            consumed_train_samples=0, skipped_train_samples=0, global_batch_size=8, **arguments
        )
        sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS = self.args = args  # type: ignore[attr-defined]
        _seed(dist.get_rank())
        training = Training(case)
        self.optimizer = training.optimizer
        scheduler = OptimizerParamScheduler(
            training.optimizer, 0.0, case.lr, 0.0, 16, 80, "linear", 0.0, 0.1, 80, "linear"
        )
        self.training.setup(training.chunks, training.optimizer, scheduler)
        training.steps_taken = args.iteration

        def forward_step() -> tuple[Any, ...]:
            step = training.step()
            return step.loss, step.grad_norm, step.loss_scale, _drawn()

        self.records = self.training.train(
            forward_step, training.chunks, training.optimizer, scheduler
        )


def _seed(rank: int) -> None:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def _drawn() -> tuple[float, ...]:
    """A number of each kind of randomness."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    with get_cuda_rng_tracker().fork():
        return (*numbers, float(torch.rand(())))
