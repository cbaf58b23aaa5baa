"""fp32 grads communicated in 16 bits: one rounding of each summand but the rank's own, and sums in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import Group, Reduction, described, pairwise
from megatron_distopt.comm.collectives import reduce_scatter
from megatron_distopt.errors import ConfigError
from tests.support.refusals import assert_says
from tests.support.spawn import run_ranks

RANKS = 3
#: Of a shard: less than a chunk, and one chunk and a part.
CHUNK = 1000
NUMELS = {"small": 900, "two chunks": CHUNK + 77}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(RANKS * numel, generator=torch.Generator().manual_seed(rank))


def _wanted(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """From rank - 1 downwards, its own last and as it was."""
    parts = [_values((rank - distance) % RANKS, numel).view(RANKS, -1)[rank] for distance in range(1, RANKS)]
    total = parts[0].to(dtype).float()
    for part in parts[1:]:
        total += part.to(dtype).float()
    return total + _values(rank, numel).view(RANKS, -1)[rank]


def _collect(rank: int, size: int) -> dict[str, Any]:
    group, found = Group.of(), {}
    pairwise.SCRATCH_NBYTES = CHUNK * 2 * RANKS * 2  # what is sent and what arrives, of two bytes each
    for name, dtype in DTYPES.items():
        for kind, numel in NUMELS.items():
            for way in ("at once", "overlapped", "backend's own"):
                bucket = _values(rank, numel)
                shard = bucket.view(RANKS, -1)[rank]
                if way == "at once":
                    reduce_scatter(bucket, shard, group, Reduction(reduce_dtype=dtype))
                elif way == "overlapped":
                    reduce_scatter(bucket, shard, group, Reduction(reduce_dtype=dtype), overlapped=True).wait()
                else:
                    pairwise.begin_rounded_sum(bucket, shard, group, dtype).wait()
                found[f"{name} {kind} {way}"] = torch.equal(shard, _wanted(rank, numel, dtype))
    ways = [described(torch.device("cpu"), group, how) for how in (Reduction(), Reduction(reduce_dtype=torch.bfloat16))]
    found["described"] = ways
    found["trained"] = [_train(rank, dtype, overlap) for dtype in (None, "bfloat16") for overlap in (False, True)]
    return found


def _train(rank: int, dtype: str | None, overlap: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    config = DistOptConfig(
        adam="torch_foreach", lr=0.01, bucket_size=70, overlap_grad_reduce=overlap, reduce_dtype=dtype
    )
    optimizer = distribute(model, config)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_collect, RANKS)


@pytest.mark.parametrize("way", ["at once", "overlapped", "backend's own"])
@pytest.mark.parametrize("kind", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_when_it_is_communicated_in_16_bits_then_it_is_that_of_rounded_summands(
    found: list[dict[str, Any]], dtype: str, kind: str, way: str
) -> None:
    assert [each[f"{dtype} {kind} {way}"] for each in found] == [True] * RANKS


def test_training_when_grads_are_communicated_in_16_bits_then_overlap_changes_nothing_and_the_rounding_something(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        plain, plain_overlapped, short, short_overlapped = each["trained"]
        assert all(torch.equal(*pair) for pair in zip(plain, plain_overlapped, strict=True))
        assert all(torch.equal(*pair) for pair in zip(short, short_overlapped, strict=True))
        assert not all(torch.equal(*pair) for pair in zip(plain, short, strict=True))
        # Three updates of 0.01 an element, which rounding to 8 bits can turn around where a gradient is small.
        assert all((one - other).abs().max() < 0.06 for one, other in zip(plain, short, strict=True))


def test_described_when_grads_are_communicated_in_16_bits_then_it_says_that_they_do_not_share_memory(
    found: list[dict[str, Any]],
) -> None:
    shared = "gloo, from pair to pair in shared memory"
    assert [each["described"] for each in found] == [[shared, f"{shared}, grads in bfloat16 as messages"]] * RANKS


def _refusal(rank: int, size: int) -> str:
    config = DistOptConfig(reduce_dtype="bfloat16", grads_in_fp32=False)
    with pytest.raises(ConfigError) as error:
        distribute(torch.nn.Linear(4, 4).bfloat16(), config)
    return str(error.value)


def test_reduce_dtype_when_grads_have_16_bits_already_then_refused() -> None:
    (text,) = run_ranks(_refusal, 1)
    assert_says(text, "gradients in bfloat16 and reduce_dtype='bfloat16': grads_in_fp32=True")
