"""State on the host of the simulated accelerator: resumes from any place into any, and bytes as
`plan` says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt import TorchDistributedOptimizer, distribute
from megatron_distopt.cli.plan_command import plan_stage
from megatron_distopt.cli.plan_model import Choice, ParallelSizes
from megatron_distopt.optimizer.low_precision.low_precision_tensor import memory_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import Memory
from tests.sim.trial import begin
from tests.support.facts import Facts, facts_of
from tests.support.models import Params, exact_grads
from tests.support.plan_command import BUCKET, GPT, module_of
from tests.support.sim import machine

#: Fractions of one resume after the other: from each to each.
_PLACES = (0.0, 1.0, 0.5, 0.0, 0.5, 1.0, 0.0)
_SIZE = 2
_CUT = ParallelSizes(dp=_SIZE)
#: A pinned tensor of one bucket spans several flat params.
CHOICES = {
    "one bucket, fp16": Choice(_CUT, "fp16", offload_fraction=0.1),
    # The forms are those of the device; what is on the host is fp32.
    "remainder, int8 and bf16": Choice(
        _CUT,
        bucket_size=BUCKET,
        main_params_dtype="remainder",
        exp_avg_dtype="int8",
        exp_avg_sq_dtype="bfloat16",
        offload_fraction=0.5,
    ),
    "averages": Choice(_CUT, bucket_size=BUCKET, offload_fraction=0.5, ema_decay=0.75),
}


class _Run:
    """A model that trains, one step after the other, with main params as remainders on the
    device."""

    def __init__(self, device: str, rank: int, **options: Any) -> None:
        self.device, self.rank = device, rank
        self.model = Params(default=torch.bfloat16).to(device)
        given = torch.optim.AdamW(self.model.groups(), lr=2.0**-6)
        options = {
            "accelerator": "torch",
            "bucket_size": 128,
            "clip_grad": 1.0,
            "ema_decay": 0.75,
            **options,
        }
        self.optimizer: TorchDistributedOptimizer = distribute(
            self.model, given, main_params_dtype="remainder", **options
        )

    def step(self, number: int) -> None:
        grads = {
            name: grad.to(self.device) for name, grad in exact_grads(number, 0, self.rank).items()
        }
        self.model(grads).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> list[Tensor]:
        params = [param.detach().cpu() for param in self.model.parameters()]
        averages = [
            flat.average.cpu()
            for flat in self.optimizer.sharded.flat_params
            if flat.average is not None
        ]
        self.optimizer.release()
        return [*params, torch.cat(averages)]


def _uninterrupted(rank: int) -> list[Tensor]:
    run = _Run("cpu", rank)
    for number in range(len(_PLACES)):
        run.step(number)
    return run.end()


def _resumed(rank: int, folder: Path) -> list[Tensor]:
    """A step at each place, with a checkpoint between two of them."""
    params: list[Tensor] = []
    for number, fraction in enumerate(_PLACES):
        run = _Run("sim", rank, offload_fraction=fraction)
        if number:
            run.optimizer.load(folder / str(number - 1))
        run.step(number)
        run.optimizer.save(folder / str(number))
        params = run.end()
    return params


@dataclass(frozen=True)
class Held:
    """What a rank held after two steps."""

    memory: Memory
    host_storages: int  # bytes of the storages behind the state on the host
    pinned_storages: int  # bytes of the storages behind pinned tensors
    places: set[str]  # of the state that is on the host


def _storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors of the CPU, each counted once."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(found.values())


def _held(rank: int, choice: Choice) -> Held:
    plan = plan_stage(GPT, choice, 0, rank)
    model = module_of(plan).to("sim")
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
        ema_decay=choice.ema_decay,
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
    held = Held(
        optimizer.memory, _storages(own), _storages(pinned), {part.device.type for part in state}
    )
    optimizer.release()
    return held


def _state(sharded: Any, flat: FlatParam) -> list[Tensor]:
    averages = [] if flat.average is None else [flat.average]
    state = [
        flat.main,
        *averages,
        *(each for each in sharded.inner.state[flat.main].values() if torch.is_tensor(each)),
    ]
    return [part for each in state for part in memory_of(each)]


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    begin()
    machine.seed(1)
    pair = _uninterrupted(rank), _resumed(rank, folder)
    return {
        "resumed": [torch.equal(*each) for each in zip(*pair, strict=True)],
        "held": {name: _held(rank, choice) for name, choice in CHOICES.items()},
    }


facts = facts_of(collect_facts, _SIZE, seconds=400.0)


def test_training_when_every_step_resumes_elsewhere_then_every_bit_is_the_same(
    facts: Facts,
) -> None:
    assert set(pairwise(_PLACES)) == set(permutations((0.0, 0.5, 1.0), 2))
    assert all(of_rank and all(of_rank) for of_rank in facts["resumed"])


@pytest.mark.parametrize("name", CHOICES)
def test_plan_when_state_is_on_the_host_then_every_byte_is_where_a_real_optimizer_has_it(
    name: str, facts: Facts
) -> None:
    for rank, of_rank in enumerate(facts.by_rank):
        held, planned = of_rank["held"][name], plan_stage(GPT, CHOICES[name], 0, rank).footprint
        memory = held.memory
        assert (planned.param_nbytes, planned.grad_nbytes) == (
            memory.param_nbytes,
            memory.grad_nbytes,
        )
        assert (planned.main_nbytes, planned.moment_nbytes) == (
            memory.main_nbytes,
            memory.moment_nbytes,
        )
        assert planned.average_nbytes == memory.average_nbytes
        assert planned.host_nbytes == memory.host_nbytes == held.host_storages > 0
        assert planned.staging_nbytes == held.pinned_storages >= memory.staging_nbytes
        on_device = (
            memory.param_nbytes + memory.grad_nbytes + memory.state_nbytes - memory.host_nbytes
        )
        assert planned.lasting_nbytes == on_device
        assert held.places == {"cpu"}
