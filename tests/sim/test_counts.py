"""What a steady step costs on a device: host synchronisations, launches, bytes, scratch memory; see docs/simulator.md.

The host waits for events of the step before (see [Note: deferred check] in optimizer/deferred.py), which are done by
then on a device that is not faster than its host; these are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential

from megatron_distopt import distribute
from tests.sim import host_programs
from tests.sim.trial import begin
from tests.support.sim import Counts, machine
from tests.support.sim.collectives import take_over_world
from tests.support.sim.memory import memory
from tests.support.spawn import run_ranks

WIDTH, LAYERS = 256, (2, 4)
_EVENT = "synchronize event"


@dataclass(frozen=True)
class Cost:
    """Of one step on one rank."""

    waits: int  # for what the device computes in this step
    events: int  # of the step before that the host waits for
    launches: int  # of kernels
    nbytes: float  # read and written, for each element that the rank owns
    scratch_nbytes: float  # allocated at the peak beyond what was held before, for each element that the rank owns


def _cost_of(step: Callable[[], object], owned: int) -> Cost:
    machine.finish()
    memory.reset_peak()
    held, machine.counts = memory.held, Counts()
    step()
    counts, machine.counts = machine.counts, Counts()
    waits = [each for each in counts.synchronisations if each != _EVENT]
    nbytes = counts.nbytes_read + counts.nbytes_written
    events = len(counts.synchronisations) - len(waits)
    return Cost(len(waits), events, len(counts.launches), nbytes / owned, (memory.peak - held) / owned)


def _torch(rank: int, size: int, layers: int, **options: Any) -> Cost:
    model = Sequential(*(Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(layers))).to("sim")
    optimizer = distribute(model, torch.optim.AdamW(model.parameters()), accelerator="torch", clip_grad=1.0, **options)
    batch = torch.ones(2, WIDTH, dtype=torch.bfloat16, device="sim")
    owned = sum(param.numel() for param in model.parameters()) // size
    for _ in range(3):
        model(batch).float().sum().backward()
        cost = _cost_of(optimizer.step, owned)
        optimizer.zero_grad()
    optimizer.release()
    return cost


def _fork() -> Cost:
    """Of the third iteration."""
    found: list[Cost] = []
    fork = host_programs.MiniFork.imported()
    usual = fork.training._update

    def update(model: Any, optimizer: Any, scheduler: Any) -> Any:
        result: list[Any] = []
        owned = sum(flat.plan.in_buffer.numel for flat in optimizer.sharded.flat_params)
        found.append(_cost_of(lambda: result.append(usual(model, optimizer, scheduler)), owned))
        return result[0]

    fork.training._update = update
    try:
        host_programs.train("fork", "bf16 overlap, fp32 norms", "sim")
    finally:
        fork.training._update = usual
    return found[-1]


def _core() -> Cost:
    found: list[Cost] = []
    host_programs.prepare_core("sim")
    from tests.support import gpt

    with host_programs.streams_of("sim"):
        training = gpt.Training(host_programs.CORE["bf16 overlap"])
        parts = gpt.parts_of(training.optimizer)
        owned = sum(flat.plan.in_buffer.numel for part in parts for flat in part.sharded.flat_params)
        for _ in range(3):
            training.forward_backward()
            found.append(_cost_of(training.optimizer.step, owned))
            training.finish_step()
        training.close()
    return found[-1]


def costs_of(rank: int, size: int, host: str) -> dict[str, Cost]:
    """By name; megatron-core and the small fork are both called megatron, so each has processes of its own."""
    begin()
    take_over_world()
    found = {"core": _core()} if host == "core" else _of_torch_and_fork(rank, size)
    machine.finish()
    dist.barrier()
    return found


def _of_torch_and_fork(rank: int, size: int) -> dict[str, Cost]:
    found = {f"torch {layers}": _torch(rank, size, layers) for layers in LAYERS}
    found["torch overlap"] = _torch(rank, size, LAYERS[0], overlap_grad_reduce=True, overlap_param_gather=True)
    return {**found, "fork": _fork()}


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    found = {**run_ranks(costs_of, 2, "core")[0], **run_ranks(costs_of, 2, "others")[0]}
    for name, cost in found.items():
        print(name, cost)  # noqa: T201 - shown with -rP, for the docs
    return found


@pytest.mark.parametrize("name", ["torch 2", "torch overlap", "fork", "core"])
def test_step_when_steady_then_the_host_waits_for_nothing_of_it(costs: dict[str, Cost], name: str) -> None:
    assert costs[name].waits == 0
    assert costs[name].events <= 2


def test_step_when_the_model_is_larger_then_as_many_launches(costs: dict[str, Cost]) -> None:
    assert len({costs[f"torch {layers}"].launches for layers in LAYERS}) == 1


def test_step_when_bf16_then_the_bytes_of_the_table_are_moved(costs: dict[str, Cost]) -> None:
    """42, see [Note: bytes of a step] in optimizer/sharded.py; half a byte for the numbers of the statistics."""
    assert 42 <= costs["torch 2"].nbytes <= 42.5


@pytest.mark.parametrize("name", ["torch 2", "torch overlap", "fork", "core"])
def test_step_when_steady_then_nothing_is_allocated_that_grows_with_the_model(
    costs: dict[str, Cost], name: str
) -> None:
    assert costs[name].scratch_nbytes < 0.5
