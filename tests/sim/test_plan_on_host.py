"""`plan` with state on the host against what a real optimizer of the simulated accelerator holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt import distribute
from megatron_distopt.cli.plan_command import StagePlan, plan_stage
from megatron_distopt.cli.plan_model import Choice, ParallelSizes
from megatron_distopt.optimizer.low_precision.low_precision_tensor import memory_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import Memory
from tests.sim.trial import begin
from tests.support.plan_command import BUCKET, GPT
from tests.support.sim import machine
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import run_ranks

_SIZE = 2
_CUT = ParallelSizes(dp=_SIZE)
#: Fractions, dtypes of grads and sizes of buckets. A pinned tensor of one bucket spans several flat params.
CHOICES = {
    "all": Choice(_CUT, bucket_size=BUCKET, offload_fraction=1.0),
    "one bucket": Choice(_CUT, offload_fraction=0.1),
    "grads in bf16": Choice(_CUT, grad_dtype="bf16", bucket_size=BUCKET, offload_fraction=0.5),
    "fp16": Choice(_CUT, "fp16", bucket_size=BUCKET, offload_fraction=0.5),
    # The forms are those of the device; what is on the host is fp32.
    "remainder, int8 and bf16": Choice(
        _CUT,
        bucket_size=BUCKET,
        main_params_dtype="remainder",
        exp_avg_dtype="int8",
        exp_avg_sq_dtype="bfloat16",
        offload_fraction=0.5,
    ),
}


@dataclass(frozen=True)
class Held:
    """What a rank held after two steps."""

    memory: Memory
    host_storages: int  # bytes of the storages behind the state on the host
    pinned_storages: int  # bytes of the storages behind pinned tensors


def _model(plan: StagePlan) -> Module:
    model = Module()
    for number, param in enumerate(plan.params):
        dtype: torch.dtype = getattr(torch, param.spec.dtype)
        model.register_parameter(f"param{number}", Parameter(torch.zeros(param.spec.shape, dtype=dtype)))
    return model.to("sim")


def _storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors of the CPU, each counted once."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(found.values())


def _held(rank: int, choice: Choice) -> Held:
    plan = plan_stage(GPT, choice, 0, rank)
    model = _model(plan)
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim > 1]},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = distribute(
        model,
        torch.optim.AdamW(groups),
        accelerator="torch",
        bucket_size=choice.bucket_size,
        offload_fraction=choice.offload_fraction,
        main_params_dtype=choice.main_params_dtype,
        exp_avg_dtype=choice.exp_avg_dtype,
        exp_avg_sq_dtype=choice.exp_avg_sq_dtype,
        grads_in_fp32=choice.grad_dtype == "fp32",
        loss_scale=1.0 if choice.dtype == "fp16" else None,
    )
    for _ in range(2):
        torch.stack([param.float().sum() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded: Any = optimizer.sharded
    on_host = [flat for flat in sharded.flat_params if flat.on_host is not None]
    pinned = [part for flat in on_host for part in (flat.on_host.model, flat.on_host.arrived)]
    staged = {each.untyped_storage().data_ptr() for each in pinned}
    state = [part for flat in on_host for part in _state(sharded, flat)]
    own = [part for part in state if part.untyped_storage().data_ptr() not in staged]
    held = Held(optimizer.memory, _storages(own), _storages(pinned))
    optimizer.release()
    return held


def _state(sharded: Any, flat: FlatParam) -> list[Tensor]:
    state = [flat.main, *(each for each in sharded.inner.state[flat.main].values() if torch.is_tensor(each))]
    return [part for each in state for part in memory_of(each)]


def collect(rank: int, size: int) -> dict[str, Held]:
    begin()
    take_over_world()
    machine.seed(1)
    return {name: _held(rank, choice) for name, choice in CHOICES.items()}


@pytest.fixture(scope="module")
def real() -> list[dict[str, Held]]:
    return run_ranks(collect, _SIZE, seconds=400.0)


@pytest.mark.parametrize("name", CHOICES)
def test_plan_when_state_is_on_the_host_then_every_byte_is_where_a_real_optimizer_has_it(
    name: str, real: list[dict[str, Held]]
) -> None:
    for rank, ranks in enumerate(real):
        held, planned = ranks[name], plan_stage(GPT, CHOICES[name], 0, rank).footprint
        memory = held.memory
        assert (planned.param_nbytes, planned.grad_nbytes) == (memory.param_nbytes, memory.grad_nbytes)
        assert (planned.main_nbytes, planned.moment_nbytes) == (memory.main_nbytes, memory.moment_nbytes)
        assert planned.host_nbytes == memory.host_nbytes == held.host_storages > 0
        assert planned.staging_nbytes == held.pinned_storages >= memory.staging_nbytes
        on_device = memory.param_nbytes + memory.grad_nbytes + memory.state_nbytes - memory.host_nbytes
        assert planned.lasting_nbytes == on_device
