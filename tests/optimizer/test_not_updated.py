"""A param that lies in a buffer and is in no group: it keeps its bits and its gradient is
nobody's."""

from __future__ import annotations

import pytest
import torch

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.config import DistOptConfig
from megatron_distopt.layout import ParamSpec, lay_out
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan
from megatron_distopt.optimizer.step import HostStep, run_step

NUMEL = 3


pytestmark = pytest.mark.usefixtures("one_rank")


def optimizer_of(names: tuple[str, ...], dtype: torch.dtype, **options: object) -> ShardedOptimizer:
    """Over the params a, b and c of three elements each, of which `names` are in the group."""
    layout = lay_out([ParamSpec(name, NUMEL) for name in "abc"], num_shards=1, alignment_numel=4)
    buffer = ShardedBuffer(
        layout, 0, torch.zeros(layout.numel), torch.zeros(layout.numel, dtype=dtype)
    )
    for number, slot in enumerate(layout.slots, start=1):
        buffer.param[slot.in_buffer.as_slice()] = float(number)
        buffer.grad[slot.in_buffer.as_slice()] = float(number)
    config = DistOptConfig(optimizer="sgd", lr=0.25, momentum=0.0, weight_decay=0.0, **options)  # type: ignore[arg-type]
    plan = StepPlan(
        groups=[ParamGroup({}, names)],
        choice=choose_inner(config, "cpu"),
        config=config,
        loss_scale=make_loss_scale(config, torch.device("cpu")),
        stats_group=Group.of,
    )
    return ShardedOptimizer([buffer], plan)


@pytest.mark.parametrize(
    ("left_out", "dtype"), [("a", torch.bfloat16), ("b", torch.float32), ("c", torch.bfloat16)]
)
def test_step_when_a_param_is_in_no_group_then_it_keeps_its_bits_and_counts_nowhere(
    left_out: str, dtype: torch.dtype
) -> None:
    names = tuple(name for name in "abc" if name != left_out)
    optimizer = optimizer_of(names, dtype, count_zeros=True)
    (buffer,) = optimizer.buffers
    slots = buffer.layout.slot_of
    buffer.grad[slots[left_out].in_buffer.as_slice()] = 0.0  # its zeros are not counted either
    (result,) = run_step(HostStep(optimizers=[optimizer], everyone=Group.of()))
    numbers = {"a": 1.0, "b": 2.0, "c": 3.0}
    for name, number in numbers.items():
        updated = number - 0.25 * number if name in names else number
        assert buffer.param[slots[name].in_buffer.as_slice()].tolist() == [updated] * NUMEL
    square = sum(NUMEL * numbers[name] ** 2 for name in names)
    # The square is exact; its root rounds once, in float64 or in float32.
    assert result.grad_norm == pytest.approx(square**0.5, rel=1e-7)
    assert result.num_zeros == 0
    held = [shard.name for run in optimizer.flat_params for shard in run.plan.shards]
    assert held == list(names)


def test_step_when_the_gradient_of_a_param_in_no_group_is_nan_then_it_is_nobodys() -> None:
    optimizer = optimizer_of(("a", "c"), torch.float32)
    (buffer,) = optimizer.buffers
    buffer.grad[buffer.layout.slot_of["b"].in_buffer.as_slice()] = float("nan")
    (result,) = run_step(HostStep(optimizers=[optimizer], everyone=Group.of()))
    assert result.updated
    assert buffer.param[buffer.layout.slot_of["b"].in_buffer.as_slice()].tolist() == [2.0] * NUMEL
