"""A gather that fails, on one rank; what goes right is in tests/hosts/test_param_overlap.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group, ParamOverlap
from megatron_distopt.layout import ParamSpec, lay_out


@pytest.fixture
def group() -> Iterator[Group]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield Group.of()
    dist.destroy_process_group()


class _Failing:
    """A gather of a rank that has lost another one."""

    def wait(self) -> None:
        raise RuntimeError("rank 1 has ended")


def test_param_when_its_gather_failed_then_nobody_ever_takes_it_for_complete(group: Group) -> None:
    layout = lay_out([ParamSpec(name, 4) for name in "ab"], num_shards=1, bucket_size=1, alignment_numel=1)
    overlap = ParamOverlap([ShardedBuffer(layout, 0, torch.ones(layout.numel), torch.zeros(layout.numel))], group)
    overlap.begin(after_forward=False)
    overlap._pending[1] = _Failing()
    overlap.wait_for(overlap.numbers_of("a"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            overlap.finish()
    assert overlap.is_pending
