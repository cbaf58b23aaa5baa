"""On the simulated accelerator plain torch leaves the bits of the CPU, and what two streams use is
waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron_distopt.buffers import ShardedBuffer, pack_params, view_of
from megatron_distopt.comm import Communicator, Group
from megatron_distopt.layout import ParamSpec, lay_out, owned_shards
from tests.sim.programs import PROGRAMS
from tests.sim.trial import FEW, MANY, many, try_programs, try_small_device
from tests.support.facts import Facts, facts_of
from tests.support.sim import Personality, machine
from tests.support.spawn import run_ranks

#: What is not long.
SHORT = (
    *(
        "mixed overlap",
        "reduced in bf16, forward on a stream",
        "fp16 dynamic",
        "nan raise",
        "saved in the background",
    ),
    *("protected", "low precision, nan skip", "host half, remainders", "muon, step on a stream"),
    "bf16 between nodes, forward on a stream",
)
#: On a device without float64 and fp16.
SHORT_SMALL = "saved in the background"
#: On four ranks; what differs between two and four is the collectives.
ON_FOUR = (
    *(
        "bf16 overlap",
        "mixed overlap",
        "reduced in bf16, forward on a stream",
        "fp16 dynamic",
        "nan skip",
    ),
    *(name for name, program in PROGRAMS.items() if program.has_nodes),
)
#: On four ranks, which add up inside two nodes first, in every run of the tests.
SHORT_ON_FOUR = ("bf16 between nodes, forward on a stream", "float32 between nodes")
#: Long ones are cut into parts of equal seeds, so that a rank need not live for an hour.
_BY_SEEDS = {
    seeds: sorted(name for name in PROGRAMS if many(name) == seeds) for seeds in map(many, PROGRAMS)
}
PARTS = [(seeds, names[start::10]) for seeds, names in _BY_SEEDS.items() for start in range(10)]
#: A device without float64 and fp16 has other numbers of a step, and the same streams.
SMALL = (
    SHORT_SMALL,
    "mixed overlap",
    "a module's buffers",
    "fp32 overlap",
    "reduced in bf16, overlap",
    "nan skip",
    "host half",
    "muon",
)

NUMEL, SEEDS = 24, 12


def _read_on_two_streams(rank: int, size: int) -> list[list[float]]:
    """Params of a minority dtype: what a gather brings is copied to its place."""
    layout = lay_out([ParamSpec("other", NUMEL), ParamSpec("few", NUMEL)], num_shards=size)
    few = Parameter(torch.zeros(NUMEL, device="sim"))
    buffer = pack_params({"few": few}, layout, rank, torch.zeros(layout.numel, device="sim"))
    communicator = Communicator(Group.of(), overlap_params=True)
    communicator.add([], [buffer])
    found: list[list[float]] = []
    for seed in range(SEEDS):
        machine.seed(seed)
        with torch.no_grad():
            for _, shard in buffer.gathers:
                shard.fill_(seed + 1.0)
        communicator.gather()
        if seed % 2:
            # the gather has ended when it is waited for; the copy that follows it has not
            machine.finish()
        other = torch.Stream("sim")
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            communicator.param_needed("few")
            ahead = few.detach().sum()
        communicator.param_needed("few")
        behind = few.detach().sum()
        with other:
            found.append([float(ahead)])
        found[-1].append(float(behind))
        machine.finish()
        communicator.finish_params()
    return found


def _add_up_on_two_streams(rank: int, size: int) -> list[list[float]]:
    """Gradients of one bucket that two streams write. From the second step on it is launched when
    it is complete."""
    layout = lay_out([ParamSpec("one", NUMEL), ParamSpec("two", NUMEL)], num_shards=size)
    buffer = ShardedBuffer(
        layout,
        rank,
        torch.zeros(layout.numel, device="sim"),
        torch.zeros(layout.numel, device="sim"),
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
        owned = torch.cat(
            [view_of(buffer.grad, each.in_buffer) for each in owned_shards(layout, rank)]
        )
        found.append([float(owned.min()), float(owned.max())])
        buffer.grad.zero_()
    return found


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = dict(try_programs(rank, size, SHORT, FEW))
    return {
        **found,
        "params": _read_on_two_streams(rank, size),
        "grads": _add_up_on_two_streams(rank, size),
    }


facts = facts_of(collect_facts, 2, seconds=300)


@pytest.mark.parametrize("name", SHORT)
def test_training_when_on_an_asynchronous_device_then_the_bits_are_those_of_the_cpu(
    facts: Facts, name: str
) -> None:
    assert facts[name] == [[], []]


def test_param_of_a_minority_dtype_when_read_on_two_streams_then_both_wait(facts: Facts) -> None:
    assert facts.first["params"] == [[NUMEL * (seed + 1.0)] * 2 for seed in range(SEEDS)]


def test_bucket_when_two_streams_write_its_gradients_then_it_is_reduced_after_both(
    facts: Facts,
) -> None:
    assert facts.first["grads"] == [[2 * (seed + 1.0)] * 2 for seed in range(SEEDS)]


def test_training_when_a_device_lacks_float64_and_fp16_then_the_bits_are_those_of_the_cpu() -> None:
    assert (
        run_ranks(try_small_device, 2, [SHORT_SMALL], FEW, seconds=300) == [{SHORT_SMALL: []}] * 2
    )


def test_training_when_ranks_of_a_node_add_up_first_then_the_bits_are_those_of_the_cpu() -> None:
    assert (
        run_ranks(try_programs, 4, SHORT_ON_FOUR, range(2), seconds=300)
        == [{name: [] for name in SHORT_ON_FOUR}] * 4
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "seeds", "names", "personality"),
    [
        *((2, *part, Personality.FULL) for part in PARTS),
        *((4, many(name), (name,), Personality.FULL) for name in ON_FOUR),
        *((2, MANY, (name,), Personality.SMALL) for name in SMALL),
    ],
)
def test_training_when_on_an_asynchronous_device_then_no_seed_finds_anything(
    size: int, seeds: Sequence[int], names: Sequence[str], personality: Personality
) -> None:
    found = run_ranks(try_programs, size, names, seeds, personality, seconds=3000)
    assert [{name: wrong for name, wrong in of_rank.items() if wrong} for of_rank in found] == [
        {}
    ] * size
