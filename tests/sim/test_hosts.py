"""A Megatron of 2023 and megatron-core on the simulated accelerator: bits, and what a
steady step costs.

The bits are those that they leave on the CPU. The costs are in tests/support/sim/README.md: host
synchronisations, launches, bytes, scratch memory. The host waits for events of the step before (see
[Note: deferred check] in optimizer/deferred.py), which are done by then on a device that is not
faster than its host; these are counted apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential

from megatron_distopt import distribute
from tests.sim import host_programs
from tests.sim.host_programs import CORE, FORK
from tests.sim.trial import FEW, many, try_host
from tests.support.core_version import core_mentions
from tests.support.sim import Counts, machine
from tests.support.sim.memory import memory
from tests.support.spawn import run_ranks

SHORT = {
    "fork": ("bf16 overlap, fp32 norms",),
    "core": ("its flags, half on the host", "its flags, all on the host"),
}
LONG = [("fork", name) for name in FORK] + [("core", name) for name in CORE]
WIDTH, LAYERS = 256, (2, 4)
_EVENT = "synchronize event"


@dataclass(frozen=True)
class Cost:
    """Of one step on one rank."""

    waits: int  # for what the device computes in this step
    events: int  # of the step before that the host waits for
    launches: int  # of kernels
    nbytes: float  # read and written, for each element that the rank owns
    # allocated at the peak beyond what was held before, for each element that the rank owns
    scratch_nbytes: float


def _cost_of(step: Callable[[], object], owned: int) -> Cost:
    gc.collect()  # an optimizer of an earlier training waits for its last check when it goes
    machine.finish()
    memory.reset_peak()
    held, machine.counts = memory.held, Counts()
    step()
    counts, machine.counts = machine.counts, Counts()
    waits = [each for each in counts.synchronisations if each != _EVENT]
    nbytes = counts.nbytes_read + counts.nbytes_written
    events = len(counts.synchronisations) - len(waits)
    return Cost(
        len(waits), events, len(counts.launches), nbytes / owned, (memory.peak - held) / owned
    )


def _torch(size: int, layers: int, **options: Any) -> Cost:
    model = Sequential(*(Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(layers))).to(
        "sim"
    )
    optimizer = distribute(
        model, torch.optim.AdamW(model.parameters()), accelerator="torch", clip_grad=1.0, **options
    )
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

    with mock.patch.object(fork.training, "_update", update):
        host_programs.train("fork", "bf16 overlap, fp32 norms", "sim")
    return found[-1]


def _core() -> Cost:
    found: list[Cost] = []
    host_programs.prepare_core("sim")
    from tests.support import gpt

    with host_programs.streams_of("sim"):
        training = gpt.Training(CORE["bf16 overlap"])
        parts = gpt.parts_of(training.optimizer)
        owned = sum(
            flat.plan.in_buffer.numel for part in parts for flat in part.sharded.flat_params
        )
        for _ in range(3):
            training.forward_backward()
            found.append(_cost_of(training.optimizer.step, owned))
            training.finish_step()
        training.close()
    return found[-1]


def _collect(rank: int, size: int, host: str, names: Sequence[str]) -> dict[str, Any]:
    """megatron-core and the small fork are both called megatron, so each has processes of its
    own."""
    found: dict[str, Any] = {"wrong": try_host(rank, size, host, names, FEW)}
    if host == "core":
        found["costs"] = {"core": _core()}
    else:
        costs = {f"torch {layers}": _torch(size, layers) for layers in LAYERS}
        costs["torch overlap"] = _torch(
            size, LAYERS[0], overlap_grad_reduce=True, overlap_param_gather=True
        )
        found["costs"] = {**costs, "fork": _fork()}
    machine.finish()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """By host and rank."""
    return {
        host: run_ranks(_collect, 2, host, list(filter(_is_there, names)), seconds=400)
        for host, names in SHORT.items()
    }


def _is_there(name: str) -> bool:
    """Whether this megatron-core has the flags; never asked in ranks of the fork, whose package has
    the same name."""
    return "flags" not in name or core_mentions(
        "optimizer/optimizer_config.py", "optimizer_cpu_offload"
    )


@pytest.fixture(scope="module")
def costs(found: dict[str, list[dict[str, Any]]]) -> dict[str, Cost]:
    costs = {**found["core"][0]["costs"], **found["fork"][0]["costs"]}
    for name, cost in costs.items():
        print(name, cost)  # noqa: T201 - shown with -rP, for the docs
    return costs


@pytest.mark.parametrize(
    ("host", "name"), [(host, name) for host, names in SHORT.items() for name in names]
)
def test_megatron_when_on_an_asynchronous_device_then_the_bits_are_those_of_the_cpu(
    found: dict[str, list[dict[str, Any]]], host: str, name: str
) -> None:
    if not _is_there(name):
        pytest.skip("this megatron-core has no state on the host")
    assert [of_rank["wrong"][name] for of_rank in found[host]] == [[], []]


@pytest.mark.parametrize("name", ["torch 2", "torch overlap", "fork", "core"])
def test_step_when_steady_then_nothing_waits_and_nothing_is_allocated_by_numel(
    costs: dict[str, Cost], name: str
) -> None:
    assert costs[name].waits == 0
    assert costs[name].events <= 2
    assert costs[name].scratch_nbytes < 0.5


def test_step_when_the_model_is_larger_then_as_many_launches(costs: dict[str, Cost]) -> None:
    assert len({costs[f"torch {layers}"].launches for layers in LAYERS}) == 1


def test_step_when_bf16_then_the_bytes_of_the_table_are_moved(costs: dict[str, Cost]) -> None:
    """42, see [Note: bytes of a step] in optimizer/sharded.py; half a byte for the numbers of the
    statistics."""
    assert 42 <= costs["torch 2"].nbytes <= 42.5


@pytest.mark.long
@pytest.mark.parametrize(("host", "name"), LONG)
def test_megatron_when_on_an_asynchronous_device_then_no_seed_finds_anything(
    host: str, name: str
) -> None:
    if not _is_there(name):
        pytest.skip("this megatron-core has no state on the host")
    assert run_ranks(try_host, 2, host, [name], many(name), seconds=3000) == [{name: []}] * 2
