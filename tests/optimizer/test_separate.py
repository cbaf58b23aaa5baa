"""Flat params that are cut between params, because these have counts of updates of their own from
then on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import Group
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.optimizer.step import HostStep, run_step
from tests.support.models import Params, exact_grads

pytestmark = pytest.mark.usefixtures("one_rank")


def _built(adam: str, dtype: torch.dtype) -> tuple[Params, ShardedOptimizer]:
    model = Params(default=dtype)
    return model, distribute(model, DistOptConfig(accelerator="torch", adam=adam, lr=0.01)).sharded


def _step(model: Params, sharded: ShardedOptimizer, step: int) -> None:
    sharded.buffers[0].grad.zero_()
    sharded.buffers[0].grad[: sharded.buffers[0].grad.numel()].copy_(
        _whole(model, sharded, exact_grads(step, 0, 0))
    )
    run_step(HostStep(optimizers=[sharded], everyone=Group.of()))


def _whole(model: Params, sharded: ShardedOptimizer, grads: dict[str, Tensor]) -> Tensor:
    layout = sharded.buffers[0].layout
    whole = torch.zeros(layout.numel)
    for name, grad in grads.items():
        whole[layout.slot_of[f"held.{name.replace('.', '_')}"].in_buffer.as_slice()] = (
            grad.flatten()
        )
    return whole


def _flat(model: Params) -> Tensor:
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adam", ["torch_fused", "torch_foreach"])
def test_separate_when_in_the_middle_of_training_then_changes_no_value(
    adam: str, dtype: torch.dtype
) -> None:
    (whole, one), (cut, other) = _built(adam, dtype), _built(adam, dtype)
    for step in range(4):
        _step(whole, one, step)
        _step(cut, other, step)
        if step == 1:
            other.separate(lambda name: name)
    assert (len(one.flat_params), len(other.flat_params)) == (1, 5)
    # Cut elsewhere, the kernel's vectors begin elsewhere, and what its last lanes do may differ in
    # the last bit.
    torch.testing.assert_close(_flat(cut), _flat(whole), rtol=1e-6, atol=1e-7)
    assert [group["params"] for group in other.inner.param_groups] == [
        [run.main for run in other.flat_params]
    ]
