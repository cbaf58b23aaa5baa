"""What one rank gathers, and what is divided before it is added up: on groups of one to three ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group, Reduction, collectives, gather_to_first, reduce_grads
from megatron_distopt.layout import ParamSpec, lay_out
from tests.support.spawn import run_ranks

RANKS = 3
PART = 4
#: By name: the ranks of the launcher that are in it. In the last the first one is not the lowest number of all.
GROUPS = {"all": (0, 1, 2), "alone": (1,), "first two": (0, 1), "last two": (1, 2)}


def _gathered(group: Group, mark: float, dtype: torch.dtype) -> dict[str, Any]:
    part = (torch.arange(PART) + mark).to(dtype)
    before = part.clone()
    whole = gather_to_first(part, group)
    if whole is not None and group.size > 1:
        assert whole.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
    return {
        "gathered": None if whole is None else whole.tolist(),
        "dtype": None if whole is None else whole.dtype,
        "is unchanged": torch.equal(part, before),
    }


def _reduced(group: Group, mark: int, divide_by: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """This rank's shards of two buckets, and what its gradients were."""
    layout = lay_out([ParamSpec("a", 5), ParamSpec("b", 6)], num_shards=group.size, bucket_size=5, alignment_numel=1)
    grad = (torch.arange(layout.numel) * 2.0 + 12 * mark).to(dtype)
    buffer = ShardedBuffer(layout, group.rank, grad, torch.zeros(layout.numel))
    before: list[float] = grad.tolist()
    reduce_grads(buffer, group, Reduction(divide_by))
    return [float(value) for _, shard in buffer.reduces for value in shard], before


def _overflows(group: Group, divide_by: int) -> bool:
    """Two thirds of the largest fp16 number on every rank."""
    layout = lay_out([ParamSpec("a", 6)], num_shards=group.size, alignment_numel=1)
    grad = torch.full((layout.numel,), 43_000.0, dtype=torch.float16)
    buffer = ShardedBuffer(layout, group.rank, grad, torch.zeros(layout.numel))
    reduce_grads(buffer, group, Reduction(divide_by))
    [(_, shard)] = buffer.reduces
    return not bool(shard.isfinite().all())


def _averaged(group: Group, divide_by: int, reduce_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Over a backend that averages: what it was asked for, and what came out, at once and overlapped."""
    found: dict[str, Any] = {"ops": [], "out": []}
    own = collectives._reduce_scatter

    def averaging(shard: Tensor, bucket: Tensor, *, op: Any, group: Any, async_op: bool = False) -> Any:
        found["ops"].append("average" if op == dist.ReduceOp.AVG else "sum")
        if op == dist.ReduceOp.AVG:
            bucket.mul_(1 / dist.get_world_size(group))
        return own(shard, bucket, op=dist.ReduceOp.SUM, group=group, async_op=async_op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_PAIRWISE_OVER", "nobody")
        patch.setattr(collectives, "_NCCL", "gloo")
        patch.setattr(collectives, "_reduce_scatter", averaging)
        for act in (collectives.reduce_scatter, partial(collectives.reduce_scatter, overlapped=True)):
            bucket = (torch.arange(group.size * PART) * 0.3 + group.rank).float()
            shard = bucket.view(group.size, -1)[group.rank]
            act(bucket, shard, group, Reduction(divide_by, reduce_dtype)).wait()
            found["out"].append(shard.tolist())
    return found


def run_all(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, members in GROUPS.items():
        handle = dist.new_group(list(members))
        if rank not in members:
            continue
        group = Group.of(None if name == "all" else handle)
        found[name] = {
            "gathered": _gathered(group, 10.0 * (rank + 1), torch.float32),
            "gathered in bf16": _gathered(group, 10.0 * (rank + 1), torch.bfloat16),
            "sum": _reduced(group, rank, 1, torch.float32),
            "divided": _reduced(group, rank, 4, torch.float32),
            "fp16 sum overflows": _overflows(group, 1),
            "fp16 average overflows": _overflows(group, group.size),
            "averaged": _averaged(group, group.size),
            "averaged otherwise": _averaged(group, 4),
            "averaged in 16 bits": _averaged(group, group.size, torch.bfloat16),
        }
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS)


def by_member(found: list[dict[str, Any]], name: str, what: str) -> list[Any]:
    return [found[rank][name][what] for rank in GROUPS[name]]


@pytest.mark.parametrize(("what", "dtype"), [("gathered", torch.float32), ("gathered in bf16", torch.bfloat16)])
@pytest.mark.parametrize("name", GROUPS)
def test_gather_when_done_then_the_groups_first_rank_alone_has_all_parts_in_order(
    name: str, what: str, dtype: torch.dtype, found: list[dict[str, Any]]
) -> None:
    first, *others = by_member(found, name, what)
    assert first["gathered"] == [10.0 * (rank + 1) + index for rank in GROUPS[name] for index in range(PART)]
    assert first["dtype"] is dtype
    assert [each["gathered"] for each in others] == [None] * len(others)
    assert all(each["is unchanged"] for each in (first, *others))


@pytest.mark.parametrize(("what", "divide_by"), [("sum", 1), ("divided", 4)])
@pytest.mark.parametrize("name", GROUPS)
def test_reduce_grads_when_divided_then_each_shard_has_the_sum_of_the_quotients(
    name: str, what: str, divide_by: int, found: list[dict[str, Any]]
) -> None:
    of_members = by_member(found, name, what)
    size = len(of_members)
    layout = lay_out([ParamSpec("a", 5), ParamSpec("b", 6)], num_shards=size, bucket_size=5, alignment_numel=1)
    wanted = [sum(column) / divide_by for column in zip(*(before for _, before in of_members), strict=True)]
    for rank, (shards, _) in enumerate(of_members):
        spans = [bucket.shard(rank, size) for bucket in layout.buckets]
        assert len(spans) == 2
        assert shards == [wanted[index] for span in spans for index in range(span.start, span.stop)]


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "alone"])
def test_reduce_grads_when_in_fp16_then_an_average_fits_where_the_sum_does_not(
    name: str, found: list[dict[str, Any]]
) -> None:
    assert set(by_member(found, name, "fp16 sum overflows")) == {True}
    assert set(by_member(found, name, "fp16 average overflows")) == {False}


def _averages_of(name: str) -> list[list[float]]:
    """By rank: its shard of what was divided, in fp32, and then added up."""
    size = len(GROUPS[name])
    divided = [(torch.arange(size * PART) * 0.3 + rank).float() / size for rank in range(size)]
    total: Tensor = sum(divided[1:], divided[0])
    return [part.tolist() for part in total.view(size, -1)]


@pytest.mark.parametrize("name", GROUPS)
def test_reduce_scatter_when_the_backend_averages_then_it_does_where_that_is_the_division_to_the_bit(
    name: str, found: list[dict[str, Any]]
) -> None:
    of_members = by_member(found, name, "averaged")
    wanted = {"all": ["sum", "sum"], "alone": [], "first two": ["average"] * 2, "last two": ["average"] * 2}
    assert [each["ops"] for each in of_members] == [wanted[name]] * len(of_members)
    for each, average in zip(of_members, _averages_of(name), strict=True):
        assert each["out"] == [each["out"][0]] * 2
        # Three summands may be added up in another order: the last bit of numbers up to 4.
        assert each["out"][0] == (pytest.approx(average, abs=5e-7) if len(of_members) > 2 else average)


@pytest.mark.parametrize("what", ["averaged otherwise", "averaged in 16 bits"])
def test_reduce_scatter_when_divided_by_something_else_or_in_16_bits_then_the_backend_adds_up(
    what: str, found: list[dict[str, Any]]
) -> None:
    asked = [op for name in GROUPS for each in by_member(found, name, what) for op in each["ops"]]
    sums = 2 * sum(len(members) for members in GROUPS.values() if len(members) > 1)
    assert asked == (["sum"] * sums if what == "averaged otherwise" else [])
