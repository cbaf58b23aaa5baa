"""`plan` with state on the host against what a real optimizer of the simulated accelerator holds and copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt import distribute
from megatron_distopt.cli.plan_choice import StagePlan, plan_stage
from megatron_distopt.cli.plan_model import Choice, ParallelSizes
from megatron_distopt.optimizer import offload
from megatron_distopt.optimizer.coded import storages_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import measure_memory
from tests.sim.trial import begin
from tests.support.plan_command import BUCKET, GPT
from tests.support.sim import machine
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import run_ranks

_SIZE = 2
_REMAINDER = {"main_params_dtype": "remainder", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "bfloat16"}
_SMALLEST = {"main_params_dtype": "bfloat16", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
_SCALED = {"main_params_dtype": "float16", "exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float8_e5m2"}
_CUT = ParallelSizes(dp=_SIZE)
#: Forms, fractions, dtypes of grads and sizes of buckets. A pinned tensor of one bucket spans several flat params.
CHOICES = {
    "fp32, half": Choice(_CUT, bucket_size=BUCKET, offload_fraction=0.5),
    "fp32, little": Choice(_CUT, bucket_size=BUCKET, offload_fraction=0.01),
    "fp32, all": Choice(_CUT, bucket_size=BUCKET, offload_fraction=1.0),
    "one bucket": Choice(_CUT, offload_fraction=0.1),
    "grads in bf16": Choice(_CUT, has_fp32_grads=False, bucket_size=BUCKET, offload_fraction=0.5),
    "fp16": Choice(_CUT, "fp16", bucket_size=BUCKET, offload_fraction=0.5, **_SCALED),  # type: ignore[arg-type]
    "remainder": Choice(_CUT, bucket_size=BUCKET, offload_fraction=0.5, **_REMAINDER),  # type: ignore[arg-type]
    "all in bf16 and int8": Choice(_CUT, bucket_size=BUCKET, offload_fraction=0.5, **_SMALLEST),  # type: ignore[arg-type]
}


@dataclass(frozen=True)
class Held:
    """What a rank held after two steps and copied in the last one, in bytes.

    Args:
        main, moments: wherever they are.
        state_on_host, pinned: as `measure_memory` says.
        host_storages, pinned_storages: the storages behind the tensors of the host.
        down, up: copied.
    """

    param: int
    grad: int
    main: int
    moments: int
    state_on_host: int
    pinned: int
    host_storages: int
    pinned_storages: int
    down: int
    up: int


def _model(plan: StagePlan) -> Module:
    model = Module()
    for number, param in enumerate(plan.params):
        dtype: torch.dtype = getattr(torch, param.spec.dtype)
        model.register_parameter(f"param{number}", Parameter(torch.zeros(param.spec.shape, dtype=dtype)))
    return model.to("sim")


def _options(choice: Choice) -> Mapping[str, Any]:
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "offload_fraction", "bucket_size")
    scale = {"loss_scale": 1.0} if choice.dtype == "fp16" else {}
    return {**{name: getattr(choice, name) for name in names}, "grads_in_fp32": choice.has_fp32_grads, **scale}


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
    given = torch.optim.AdamW(groups)
    optimizer = distribute(model, given, accelerator="torch", **_options(choice))
    copied: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        copy_all = offload._copy_all

        def counted(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
            listed = list(pairs)
            copied.extend((into.device.type, into.nbytes) for into, _ in listed)
            copy_all(listed)

        patch.setattr(offload, "_copy_all", counted)
        for _ in range(2):
            copied.clear()
            torch.stack([param.float().sum() for param in params]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    held = _measured(optimizer._model.sharded, copied)
    optimizer.release()
    return held


def _measured(sharded: Any, copied: Iterable[tuple[str, int]]) -> Held:
    memory, on_host = measure_memory(sharded), [flat for flat in sharded.flat_params if flat.on_host is not None]
    pinned = [part for flat in on_host for part in (flat.on_host.model, flat.on_host.arrived)]
    staged = {each.untyped_storage().data_ptr() for each in pinned}
    state = [part for flat in on_host for part in _state(sharded, flat)]
    own = [part for part in state if part.untyped_storage().data_ptr() not in staged]
    return Held(
        memory.param_nbytes,
        memory.grad_nbytes,
        memory.main_nbytes,
        memory.moment_nbytes,
        memory.host_nbytes,
        memory.staging_nbytes,
        _storages(own),
        _storages(pinned),
        down=sum(nbytes for place, nbytes in copied if place == "cpu"),
        up=sum(nbytes for place, nbytes in copied if place != "cpu"),
    )


def _state(sharded: Any, flat: FlatParam) -> list[Tensor]:
    state = [flat.main, *(each for each in sharded.inner.state[flat.main].values() if torch.is_tensor(each))]
    return [part for each in state for part in storages_of(each)]


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
        held, plan = ranks[name], plan_stage(GPT, CHOICES[name], 0, rank)
        planned = plan.footprint
        assert (planned.param_nbytes, planned.grad_nbytes) == (held.param, held.grad)
        assert (planned.main_nbytes, planned.moment_nbytes) == (held.main, held.moments)
        assert planned.host_nbytes == held.state_on_host == held.host_storages
        assert planned.staging_nbytes == held.pinned_storages >= held.pinned
        assert planned.lasting_nbytes == held.param + held.grad + held.main + held.moments - held.state_on_host
        assert 0 < held.state_on_host <= held.main + held.moments


@pytest.mark.parametrize("name", CHOICES)
def test_plan_when_state_is_on_the_host_then_a_step_copies_what_a_real_one_copies(
    name: str, real: list[dict[str, Held]]
) -> None:
    for rank, ranks in enumerate(real):
        held, on_host = ranks[name], plan_stage(GPT, CHOICES[name], 0, rank).updated_at(is_on_host=True)
        assert sum(share.down_nbytes for share in on_host) == held.down > 0
        assert sum(share.up_nbytes for share in on_host) == held.up > 0
