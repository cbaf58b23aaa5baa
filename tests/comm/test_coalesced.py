"""Buckets that are sent at once are one launch where the backend gains from it; tried over gloo's own collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group, collectives, gather_params, reduce_grads
from megatron_distopt.layout import ParamSpec, lay_out
from tests.support.spawn import run_ranks

RANKS, BUCKETS = 2, 3


def _buffer(rank: int) -> ShardedBuffer:
    layout = lay_out([ParamSpec(str(number), 10) for number in range(BUCKETS)], num_shards=RANKS, bucket_size=10)
    grad, param = torch.arange(layout.numel) + 100.0 * rank, torch.arange(layout.numel) - 7.0 * rank
    return ShardedBuffer(layout, rank, grad, param)


def _sent(rank: int) -> list[list[float]]:
    """This rank's shards of the grads, and all params."""
    buffer, group = _buffer(rank), Group.of()
    reduce_grads(buffer, group)
    gather_params(buffer, group)
    shards = [shard.tolist() for _, shard in buffer.reduces]
    return [*shards, buffer.param.tolist()]


class Launches(TorchDispatchMode):
    """Names of the collectives that are launched meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def _collect(rank: int, size: int) -> dict[str, Any]:
    pair_to_pair = _sent(rank)
    collectives._PAIRWISE_OVER, collectives._NCCL = "nobody", "gloo"
    with Launches() as launches:
        same = _sent(rank) == pair_to_pair
    return {"same": same, "launches": launches.names}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_collect, RANKS)


def test_buckets_when_sent_at_once_then_all_are_one_launch_with_the_same_result(found: list[dict[str, Any]]) -> None:
    assert [each["same"] for each in found] == [True] * RANKS
    for each in found:
        assert len(each["launches"]) == 2
        assert all("coalesced" in name for name in each["launches"])
