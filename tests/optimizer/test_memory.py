"""At most 6 + 12/n bytes an element for bf16 params with fp32 grads at group size n, read off what
is allocated."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from megatron_distopt.optimizer.sharded import Memory
from tests.support.facts import Facts, facts_of

WIDTH = 384
SIZES = (1, 2)

#: Step counts, loss scale and statistics: scalars, a few for each run; and the alignment of each
#: param to 64 elements.
CONSTANT_NBYTES = 64 * 1024


@dataclass(frozen=True)
class Found:
    """Bytes on one rank after training steps."""

    numel: int  # of the model
    allocated: int  # in all tensors of the process that were not there before, each byte once
    reported: Memory  # by the optimizer


def collect_facts(rank: int, world_size: int) -> dict[tuple[int, bool], Found]:
    groups = {size: dist.new_group(range(size)) for size in SIZES}
    return {
        (size, fp32): _measure(group, fp32=fp32)
        for size, group in groups.items()
        for fp32 in (True, False)
        if rank < size
    }


def _measure(group: dist.ProcessGroup, *, fp32: bool) -> Found:
    before = _storages()
    model = Sequential(*(Linear(WIDTH, WIDTH) for _ in range(4))).bfloat16()
    config = DistOptConfig(
        accelerator="torch", clip_grad=1.0, grads_in_fp32=fp32, bucket_size=100_000
    )
    optimizer = distribute(model, config, process_group=group)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    after = _storages()
    allocated = _num_bytes(
        {address: nbytes for address, nbytes in after.items() if address not in before}
    )
    return Found(sum(param.numel() for param in model.parameters()), allocated, optimizer.memory)


def _storages() -> dict[int, int]:
    gc.collect()
    # Gradients of one rank may not be read, and refuse to show where they lie.
    with torch._C.DisableTorchFunctionSubclass():
        storages = [
            thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, torch.Tensor)
        ]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _num_bytes(storages: dict[int, int]) -> int:
    """That are in any of them: a param has a storage of its own, which is a part of its
    buffer's."""
    total = end = 0
    for address, nbytes in sorted(storages.items()):
        total += max(address + nbytes - max(address, end), 0)
        end = max(end, address + nbytes)
    return total


facts = facts_of(collect_facts, max(SIZES))


@pytest.mark.parametrize("size", SIZES)
def test_memory_when_bf16_then_four_or_with_fp32_grads_six_and_twelve_over_n(
    facts: Facts, size: int
) -> None:
    for rank in range(size):
        for fp32, nbytes in ((True, 6), (False, 4)):
            case = facts.by_rank[rank][size, fp32]
            assert case.allocated <= (nbytes + 12 / size) * case.numel + CONSTANT_NBYTES
            # A bound that a forgotten copy of the params (2 bytes) would break.
            assert 0.5 * case.numel > CONSTANT_NBYTES


@pytest.mark.parametrize("size", SIZES)
def test_reported_memory_when_compared_then_is_what_is_allocated(facts: Facts, size: int) -> None:
    for rank in range(size):
        case = facts.by_rank[rank][size, True]
        reported = (
            case.reported.param_nbytes + case.reported.grad_nbytes + case.reported.state_nbytes
        )
        assert 0 <= case.allocated - reported <= CONSTANT_NBYTES


@pytest.mark.parametrize(
    ("precision", "state_nbytes"),
    [
        (Precision(), 12),
        (Precision("remainder"), 10),
        (Precision("remainder", "bfloat16", "bfloat16"), 6),
        (Precision("remainder", "int8", "int8"), 4 + 2 / 128),
        (Precision("bfloat16", "int8", "int8"), 2 + 2 / 128),
        (Precision("float32", "float32", "int8"), 9 + 1 / 128),
    ],
)
def test_memory_when_state_is_kept_in_less_then_it_is_what_the_page_says(
    precision: Precision, state_nbytes: float, one_rank: None
) -> None:
    model = Linear(512, 512, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    ours = distribute(model, optimizer, **vars(precision))
    for _ in range(2):
        model(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
        ours.step()
        ours.zero_grad()
    memory = ours.memory
    assert memory.state_nbytes / 512**2 == pytest.approx(state_nbytes, abs=1e-3)


def test_start_when_grads_are_kept_in_16_bits_then_the_block_counts_their_fp32_copies(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "megatron_distopt"):
        distribute(
            Linear(64, 64).bfloat16(), DistOptConfig(accelerator="torch", grads_in_fp32=False)
        )
    assert "moments 32.5 KiB, fp32 copies of grads in a step 16.2 KiB" in caplog.text
