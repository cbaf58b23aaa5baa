"""Params of a minority dtype: packed pieces tile them, whatever the layout, and travel bit for
bit."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import CompactBuffer, ShardedBuffer, move_into_buffer, pack_params
from megatron_distopt.buffers.compact import _plan_runs
from megatron_distopt.comm import Group, gather_params
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import (
    BufferLayout,
    FlatParamPlan,
    ParamSpec,
    lay_out,
    owned_shards,
    plan_flat_params,
)
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan
from megatron_distopt.optimizer.step import HostStep, run_step
from tests.support.spawn import run_ranks

Params = dict[str, Parameter]

#: Shapes of up to three dimensions, smaller and larger than a shard; which of them are of the
#: minority; the cuts.
SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
MODELS = st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8).filter(
    lambda model: any(is_minority for _, is_minority in model)
)
SHARDS = st.integers(1, 5)
BUCKETS = st.one_of(st.none(), st.integers(1, 60))
ALIGNMENTS = st.sampled_from((1, 4))
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


def _layout(shapes: dict[str, tuple[int, ...]], shards: int, **how: Any) -> BufferLayout:
    specs = [ParamSpec(name, torch.Size(shape).numel()) for name, shape in shapes.items()]
    return lay_out(specs, num_shards=shards, **how)


def _minority(model: list[tuple[tuple[int, ...], bool]], dtype: torch.dtype) -> Params:
    """Every element has another value, small enough to be exact in each dtype."""
    names = [f"param{index}" for index, (_, is_minority) in enumerate(model) if is_minority]
    shapes = [shape for shape, is_minority in model if is_minority]
    numels = [torch.Size(shape).numel() for shape in shapes]
    values = (torch.arange(1, sum(numels) + 1) / 2**12).to(dtype).split(numels)
    return {
        name: Parameter(each.reshape(shape).clone())
        for name, shape, each in zip(names, shapes, values, strict=True)
    }


def _packed(params: Params, layout: BufferLayout) -> list[CompactBuffer]:
    """Of every rank, each with params of its own."""
    grad = torch.zeros(layout.numel)
    copies = [
        {name: Parameter(param.detach().clone()) for name, param in params.items()}
        for _ in _ranks(layout)
    ]
    return [pack_params(copies[rank], layout, rank, grad) for rank in _ranks(layout)]


def _ranks(layout: BufferLayout) -> range:
    return range(layout.num_shards)


def _all_gathered(buffers: list[CompactBuffer]) -> None:
    """What the all-gather does, in one process."""
    parts = [part.clone() for buffer in buffers for _, part in buffer.gathers]
    for buffer in buffers:
        for whole, _ in buffer.gathers:
            whole.copy_(torch.cat(parts))


def _runs(layout: BufferLayout, rank: int, params: Params) -> tuple[FlatParamPlan[bool], ...]:
    """Of the minority; between two aligned params a run has padding."""
    return plan_flat_params(
        owned_shards(layout, rank), lambda name: True if name in params else None
    )


@settings(max_examples=40, deadline=None)
@given(MODELS, SHARDS, BUCKETS, ALIGNMENTS, DTYPES)
def test_pack_when_any_layout_then_ranks_hold_every_element_once_and_publish_all(
    model: list[tuple[tuple[int, ...], bool]],
    shards: int,
    bucket: int | None,
    alignment: int,
    dtype: torch.dtype,
) -> None:
    shapes = {f"param{index}": shape for index, (shape, _) in enumerate(model)}
    layout = _layout(shapes, shards, bucket_size=bucket, alignment_numel=alignment)
    params = _minority(model, dtype)
    buffers = _packed(params, layout)
    runs = [_runs(layout, rank, params) for rank in _ranks(layout)]
    # No even gather moves less, but for the gaps that put a run in phase with its gradients.
    (part_numel,) = {buffer.part_numel for buffer in buffers}
    assert max(sum(run.in_buffer.numel for run in each) for each in runs) <= part_numel
    assert part_numel <= max(sum(run.in_buffer.numel + 7 for run in each) for each in runs) + 7
    assert part_numel % 8 == 0
    for buffer, run in (
        (buffer, run) for buffer, each in zip(buffers, runs, strict=True) for run in each
    ):
        found = buffer.param_of(run.in_buffer)
        assert (found.storage_offset() - run.in_buffer.start) % 8 == 0
        # updated, then sent
        assert found.untyped_storage().data_ptr() == buffer.param.untyped_storage().data_ptr()
        for shard in run.shards:
            wanted = params[shard.name].detach().flatten()[shard.in_param.as_slice()]
            assert torch.equal(found[run.in_flat_param(shard).as_slice()], wanted)
        assert int(found.count_nonzero()) == run.in_buffer.numel - run.padding_numel
    held = Counter(
        float(value) for buffer in buffers for _, part in buffer.gathers for value in part if value
    )
    expected = Counter(
        float(value) for param in params.values() for value in param.detach().flatten()
    )
    assert held == expected
    # 16 bits cannot tell 2,744 values apart
    assert set(expected.values()) == {1} or dtype is not torch.float32
    _all_gathered(buffers)
    for buffer in buffers:
        buffer.publish()
        # collect, then publish
        assert all(torch.equal(buffer.params[name], params[name]) for name in params)
    for buffer in buffers:
        for run in _runs(layout, buffer.rank, params):
            buffer.param_of(run.in_buffer).mul_(2)
    _all_gathered(buffers)
    for buffer in buffers:
        buffer.publish()
        assert all(torch.equal(buffer.params[name], params[name] * 2) for name in params)


def test_collect_when_somebody_changed_the_params_then_this_ranks_part_follows_and_no_other() -> (
    None
):
    layout = _layout({"wide": (7,), "norm": (5,), "bias": (4,)}, 2, alignment_numel=1)
    params = {name: Parameter(torch.ones(numel)) for name, numel in (("norm", 5), ("bias", 4))}
    # it owns [8, 16): "norm" from 1 on, and "bias"
    buffer = pack_params(params, layout, 1, torch.zeros(layout.numel))
    with torch.no_grad():
        for param in params.values():
            param.copy_(torch.arange(float(param.numel())) + 10)
    buffer.collect()
    assert buffer.param.tolist() == [0.0] * 8 + [11.0, 12.0, 13.0, 14.0, 10.0, 11.0, 12.0, 13.0]


def test_pack_when_a_param_is_not_contiguous_then_it_becomes_so_with_its_values() -> None:
    values = torch.arange(12.0).view(3, 4).t()
    param = Parameter(values)
    assert not param.is_contiguous()
    layout = _layout({"wide": (2,), "norm": (4, 3)}, 2, alignment_numel=1)
    first, second = (
        pack_params({"norm": Parameter(values)}, layout, rank, torch.zeros(layout.numel))
        for rank in (0, 1)
    )
    # They own 2 to 7 and 7 to 14 of the buffer; a part of 16 begins at 0 and at 16.
    assert [
        *first.param[2:7].tolist(),
        *second.param[16 + 7 : 16 + 14].tolist(),
    ] == values.flatten().tolist()
    buffer = pack_params({"norm": param}, layout, 1, torch.zeros(layout.numel))
    assert param.is_contiguous()
    assert torch.equal(param, values)
    buffer.param.copy_(torch.arange(32.0))
    buffer.publish()
    assert param.flatten().tolist() == [*range(2, 7), *range(16 + 7, 16 + 14)]


def test_buffer_when_a_tensor_has_another_length_then_refused() -> None:
    layout = _layout({"norm": (3,), "wide": (9,)}, 4, alignment_numel=1)
    params = {"norm": Parameter(torch.ones(3))}
    for sizes, kind in (((12, 11), "param"), ((11, 12), "grad")):
        grad, param = (torch.zeros(size) for size in sizes)
        with pytest.raises(LayoutError, match=rf"{kind} buffer has shape \(11,\).*12 elements"):
            CompactBuffer(layout, 0, grad, param, frozenset(params), params, 3)


def test_pack_when_there_are_4096_shards_then_it_costs_what_the_pieces_cost() -> None:
    """100 layers of 10 million elements, each with a norm: a piece more for each shard border that
    cuts one."""
    shapes = {
        f"{layer}.{name}": (numel,)
        for layer in range(100)
        for name, numel in (("weight", 10**7), ("norm", 4096))
    }
    params = {name: Parameter(torch.ones(4096)) for name in shapes if name.endswith("norm")}
    seconds = {}
    for shards in (8, 4096):
        layout = _layout(shapes, shards)
        grad = torch.empty(layout.numel, device="meta")
        start = time.process_time()
        packed = pack_params(params, layout, shards // 2, grad)
        packed.publish()
        seconds[shards] = time.process_time() - start
        assert sum(len(run.flat.shards) for run in packed._runs) <= 100 + shards
    # about 0.01 on an idle core; a loop over ranks and params takes a second
    assert seconds[4096] < 0.5


def test_runs_when_4096_ranks_share_many_buckets_then_only_their_holders_cost_anything() -> None:
    """Planning it by rank and bucket takes seconds where this takes 0.01."""
    specs = [
        ParamSpec(f"{layer}.{name}", numel)
        for layer in range(200)
        for name, numel in (("weight", 50_000_000), ("norm", 8192))
    ]
    layout = lay_out(specs, num_shards=4096, bucket_size=40_000_000)
    names = {spec.name for spec in specs if spec.numel == 8192}
    start = time.process_time()
    runs = _plan_runs(layout, names)
    assert time.process_time() - start < 0.5
    assert len(layout.buckets) > 150
    assert sum(run.flat.in_buffer.numel for run in runs) == 200 * 8192


# Over real ranks: a bf16 model with fp32 norms against one process that has everything.

MODEL = {
    "norm.weight": (9,),
    "wide.weight": (13, 7),
    "wide.bias": (13,),
    "norm.bias": (9,),
    "deep.weight": (31,),
}
NORMS = ("norm.weight", "norm.bias")
CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)
STEPS = 4


def _model() -> Params:
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(shape, generator=generator) for name, shape in MODEL.items()}
    return {name: Parameter(v if name in NORMS else v.bfloat16()) for name, v in values.items()}


def _grads(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randint(-9, 10, shape, generator=generator) / 256
        for name, shape in MODEL.items()
    }


def _train(group: Group) -> dict[str, Tensor]:
    """Sharded steps; the gradient is given to all ranks reduced."""
    params, size, rank = _model(), group.size, group.rank
    layout = _layout(dict(MODEL), size, alignment_numel=1)
    grad = torch.zeros(layout.numel)
    norms, others = (
        {n: p for n, p in params.items() if (n in NORMS) is of_norms} for of_norms in (True, False)
    )
    wide = ShardedBuffer(layout, rank, grad, move_into_buffer(others, layout), frozenset(others))
    buffers = (wide, pack_params(norms, layout, rank, grad))
    scale = make_loss_scale(CONFIG, torch.device("cpu"))
    plan = StepPlan(
        [ParamGroup({}, tuple(MODEL))], choose_inner(CONFIG, "cpu"), CONFIG, scale, lambda: group
    )
    optimizer = ShardedOptimizer(buffers, plan)
    for step in range(STEPS):
        for name, value in _grads(step).items():
            grad[layout.slot_of[name].in_buffer.as_slice()] = value.flatten()
        assert run_step(HostStep(optimizers=[optimizer], everyone=group))[0].updated
        for buffer in buffers:
            gather_params(buffer, group)
    return {name: param.detach().clone() for name, param in params.items()}


def _train_in_groups(rank: int, size: int) -> dict[int, dict[str, Tensor]]:
    """By number of ranks that train together."""
    alone = [dist.new_group([each]) for each in range(size)][rank]
    pairs = dist.new_group([0, 1])
    groups = {1: Group.of(alone), 3: Group.of()} | ({2: Group.of(pairs)} if rank < 2 else {})
    return {number: _train(groups[number]) for number in sorted(groups)}


def _train_whole() -> dict[str, Tensor]:
    """torch's own AdamW over fp32 copies."""
    params = _model()
    mains = {name: param.detach().float() for name, param in params.items()}
    adam = torch.optim.AdamW(
        [*mains.values()], lr=0.01, weight_decay=0.1, betas=CONFIG.betas, foreach=True
    )
    for step in range(STEPS):
        for name, value in _grads(step).items():
            mains[name].grad = value
        adam.step()
    return {name: mains[name].to(param.dtype) for name, param in params.items()}


def test_train_when_norms_are_fp32_among_bf16_then_every_bit_is_that_of_one_process() -> None:
    wanted = _train_whole()
    assert not torch.equal(wanted["norm.weight"], wanted["norm.weight"].bfloat16().float())
    by_size = [found for of_rank in run_ranks(_train_in_groups, 3) for found in of_rank.values()]
    assert len(by_size) == 3 + 2 + 3  # by rank and number of ranks that train together
    for found in by_size:
        assert found.keys() == wanted.keys()
        assert all(found[name].dtype == wanted[name].dtype for name in wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
