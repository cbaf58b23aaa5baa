"""The communicator on several streams of the simulated accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import ShardedBuffer, pack_params, view_of
from megatron_distopt.comm import Communicator, Group
from megatron_distopt.layout import ParamSpec, lay_out, owned_shards
from tests.support.sim import install, machine
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import run_ranks

NUMEL, SEEDS = 24, 20


def _packed(rank: int, size: int) -> tuple[Communicator, ShardedBuffer, Parameter]:
    """Params of a minority dtype: what a gather brings is copied to its place."""
    layout = lay_out([ParamSpec("other", NUMEL), ParamSpec("few", NUMEL)], num_shards=size)
    few = Parameter(torch.zeros(NUMEL, device="sim"))
    buffer = pack_params({"few": few}, layout, rank, torch.zeros(layout.numel, device="sim"))
    communicator = Communicator(Group.of(), overlap_params=True)
    communicator.add([], [buffer])
    return communicator, buffer, few


def _read_on_two_streams(rank: int, size: int) -> list[list[float]]:
    communicator, buffer, few = _packed(rank, size)
    found: list[list[float]] = []
    for seed in range(SEEDS):
        machine.seed(seed)
        with torch.no_grad():
            for _, shard in buffer.gathers:
                shard.fill_(seed + 1.0)
        communicator.gather()
        if seed % 2:
            machine.finish()  # the gather has ended when it is waited for; the copy that follows it has not
        other = torch.Stream("sim")
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            communicator.param_needed("few")
            ahead: Tensor = few.detach().sum()
        communicator.param_needed("few")
        behind = few.detach().sum()
        with other:
            found.append([float(ahead)])
        found[-1].append(float(behind))
        machine.finish()
        communicator.finish_params()
    return found


def _add_up_on_two_streams(rank: int, size: int) -> list[list[float]]:
    """Gradients of one bucket that two streams write. From the second step on it is launched when it is complete."""
    layout = lay_out([ParamSpec("one", NUMEL), ParamSpec("two", NUMEL)], num_shards=size)
    buffer = ShardedBuffer(
        layout, rank, torch.zeros(layout.numel, device="sim"), torch.zeros(layout.numel, device="sim")
    )
    communicator = Communicator(Group.of(), overlap_grads=True)
    communicator.add([buffer], [])
    found: list[list[float]] = []
    for seed in range(SEEDS):
        machine.seed(seed)
        here, other = torch.accelerator.current_stream(), torch.Stream("sim")
        other.wait_stream(here)
        for stream, slot in zip((other, here), layout.slots, strict=True):
            with stream:
                view_of(buffer.grad, slot.in_buffer).fill_(seed + 1.0)
                communicator.grad_arrived(slot.name)
        here.wait_stream(other)  # as autograd does behind backward
        communicator.finish_grads()
        owned = torch.cat([view_of(buffer.grad, each.in_buffer) for each in owned_shards(layout, rank)])
        found.append([float(owned.min()), float(owned.max())])
        buffer.grad.zero_()
    return found


def _all(rank: int, size: int) -> dict[str, list[list[float]]]:
    install()
    take_over_world()
    return {"params": _read_on_two_streams(rank, size), "grads": _add_up_on_two_streams(rank, size)}


def streams_are_right() -> dict[str, bool]:
    """By what was read or written on two streams, whether every seed gave the right sums."""
    found = run_ranks(_all, 2)[0]
    params = [[NUMEL * (seed + 1.0)] * 2 for seed in range(SEEDS)]
    grads = [[2 * (seed + 1.0)] * 2 for seed in range(SEEDS)]
    return {"params": found["params"] == params, "grads": found["grads"] == grads}


@pytest.fixture(scope="module")
def found() -> dict[str, bool]:
    return streams_are_right()


def test_param_of_a_minority_dtype_when_read_on_two_streams_then_both_wait(found: dict[str, bool]) -> None:
    assert found["params"]


def test_bucket_when_two_streams_write_its_gradients_then_it_is_reduced_after_both(found: dict[str, bool]) -> None:
    assert found["grads"]
