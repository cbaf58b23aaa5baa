"""Everything that one run consists of, built from its seed. Runs of two sources differ in the
optimizer alone."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import megatron_on_cpu
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import Timers
from torch import Tensor

import megatron_distopt
from byte_gpt.data import Text, training_batches
from byte_gpt.model import build_model
from byte_gpt.settings import Precision, Settings, Source


@dataclass(frozen=True)
class Trainer:
    """Made by `training`, used by train.py."""

    settings: Settings
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    batches: Iterator[Tensor]  # int64 [micro_batch_size, seq_length + 1]
    timers: Timers  # of the model's schedule and of the optimizer


@contextmanager
def training(
    settings: Settings, source: Source, text: Text, device: torch.device
) -> Iterator[Trainer]:
    """Collective: a trainer, and afterwards no trace of it: megatron-core keeps its groups in
    globals."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed, force_reset_rng=True)
    torch.manual_seed(settings.seed)
    try:
        with _optimizer_of(source):
            yield _trainer(settings, text, device)
    finally:
        parallel_state.destroy_model_parallel()
        _end_groups()


def _end_groups() -> None:
    """megatron-core only forgets its groups, whose threads would wake during the next training."""
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def _trainer(settings: Settings, text: Text, device: torch.device) -> Trainer:
    model = build_model(settings, device)
    timers = Timers(log_level=1, log_option="max")
    optimizer = core_optimizer.get_megatron_optimizer(_optimizer_config(settings, timers), [model])
    model.config.grad_scale_func = optimizer.scale_loss
    # A barrier before each timed part would be another program than the one without timers.
    model.config.timers, model.config.barrier_with_L1_time = timers, False
    rank = parallel_state.get_data_parallel_rank()
    batches = training_batches(text, seed=settings.seed, rank=rank, shape=settings.batch_shape)
    return Trainer(settings, model, optimizer, _scheduler(optimizer, settings), batches, timers)


@contextmanager
def _optimizer_of(source: Source) -> Iterator[None]:
    """Whose optimizer `get_megatron_optimizer` builds; megatron-core's own ask for the names of
    CUDA's types."""
    installation = megatron_distopt.install() if source is Source.OURS else None
    is_ours = installation is not None and installation.is_active
    with nullcontext() if is_ours else megatron_on_cpu.map_type_strings():
        yield
    if installation:
        installation.undo()


def _optimizer_config(settings: Settings, timers: Timers) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.max_lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        clip_grad=settings.clip_grad,
        params_dtype=settings.precision.value,
        bf16=settings.precision is Precision.BF16,
        fp16=settings.precision is Precision.FP16,
        initial_loss_scale=2.0**16,
        loss_scale_window=100,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        timers=timers,
        barrier_with_L1_time=False,
    )


def _scheduler(optimizer: MegatronOptimizer, settings: Settings) -> OptimizerParamScheduler:
    """Linear warm-up, then a cosine down to `min_lr`; a step of the scheduler is one iteration."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.max_lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_iterations,
        lr_decay_steps=settings.iterations,
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.iterations,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
