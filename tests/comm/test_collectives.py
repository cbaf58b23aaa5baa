"""Gathers, averages, sums in a reduce dtype, one launch for many buckets, and a backend that lacks
one.

One spawn of three ranks, which also form groups of one and two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import (
    Group,
    Reduction,
    collectives,
    gather_params,
    gather_to_first,
    pairwise,
    reduce_grads,
    try_collectives,
)
from megatron_distopt.comm.group_nodes import alone
from megatron_distopt.errors import DistOptError
from megatron_distopt.layout import ParamSpec, lay_out
from tests.support.facts import Facts, facts_of
from tests.support.refusals import assert_says

RANKS = 3
PART = 4
#: By name: the ranks of the launcher that are in it. In the last the first one is not the lowest
#: number of all.
GROUPS = {"all": (0, 1, 2), "alone": (1,), "first two": (0, 1), "last two": (1, 2)}


def _gathered(group: Group, mark: float) -> dict[str, Any]:
    part = (torch.arange(PART) + mark).bfloat16()
    before = part.clone()
    whole = gather_to_first(part, group)
    if whole is not None and group.size > 1:
        assert whole.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
    return {
        "gathered": None if whole is None else whole.tolist(),
        "dtype": None if whole is None else whole.dtype,
        "is unchanged": torch.equal(part, before),
    }


def _divided(group: Group, mark: int) -> tuple[list[float], list[float]]:
    """This rank's shards of two buckets, and what its gradients were."""
    layout = lay_out(
        [ParamSpec("a", 5), ParamSpec("b", 6)],
        num_shards=group.size,
        bucket_size=5,
        alignment_numel=1,
    )
    grad = torch.arange(layout.numel) * 2.0 + 12 * mark
    buffer = ShardedBuffer(layout, group.rank, grad, torch.zeros(layout.numel))
    before: list[float] = grad.tolist()
    reduce_grads(buffer, group, Reduction(divide_by=4))
    return [float(value) for _, shard in buffer.reduces for value in shard], before


def _overflows(group: Group, divide_by: int) -> bool:
    """Two thirds of the largest fp16 number on every rank."""
    layout = lay_out([ParamSpec("a", 6)], num_shards=group.size, alignment_numel=1)
    grad = torch.full((layout.numel,), 43_000.0, dtype=torch.float16)
    buffer = ShardedBuffer(layout, group.rank, grad, torch.zeros(layout.numel))
    reduce_grads(buffer, group, Reduction(divide_by))
    [(_, shard)] = buffer.reduces
    return not bool(shard.isfinite().all())


def _averaged(
    group: Group, divide_by: int, reduce_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Over a backend that averages: what it was asked for, and what came out, at once and
    overlapped."""
    found: dict[str, Any] = {"ops": [], "out": []}
    own = getattr(dist, collectives.REDUCE_SCATTER)

    def averaging(
        shard: Tensor, bucket: Tensor, *, op: Any, group: Any, async_op: bool = False
    ) -> Any:
        found["ops"].append("average" if op == dist.ReduceOp.AVG else "sum")
        if op == dist.ReduceOp.AVG:
            bucket.mul_(1 / dist.get_world_size(group))
        return own(shard, bucket, op=dist.ReduceOp.SUM, group=group, async_op=async_op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_PAIRWISE_OVER", "nobody")
        patch.setattr(collectives, "_LIKE_NCCL", ("gloo",))
        patch.setattr(dist, collectives.REDUCE_SCATTER, averaging)
        for act in (
            collectives.reduce_scatter,
            partial(collectives.reduce_scatter, overlapped=True),
        ):
            bucket = (torch.arange(group.size * PART) * 0.3 + group.rank).float()
            shard = bucket.view(group.size, -1)[group.rank]
            act(bucket, shard, group, Reduction(divide_by, reduce_dtype)).wait()
            found["out"].append(shard.tolist())
    return found


def _three_buckets(rank: int) -> ShardedBuffer:
    layout = lay_out(
        [ParamSpec(str(number), 10) for number in range(3)],
        num_shards=RANKS,
        bucket_size=10,
        alignment_numel=1,
    )
    grad, param = torch.arange(layout.numel) + 100.0 * rank, torch.arange(layout.numel) - 7.0 * rank
    return ShardedBuffer(layout, rank, grad, param)


def _sent(rank: int) -> list[list[float]]:
    """This rank's shards of the grads, and all params."""
    buffer, group = _three_buckets(rank), Group.of()
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


#: Of a shard: less than a chunk, and one chunk and a part.
CHUNK = 1000
NUMELS = {"small": 900, "two chunks": CHUNK + 77}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _random(rank: int, numel: int) -> Tensor:
    return torch.randn(RANKS * numel, generator=torch.Generator().manual_seed(rank))


def _rounded_sum(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """From rank - 1 downwards, its own last and as it was."""
    parts = [
        _random((rank - distance) % RANKS, numel).view(RANKS, -1)[rank]
        for distance in range(1, RANKS)
    ]
    total = parts[0].to(dtype).float()
    for part in parts[1:]:
        total += part.to(dtype).float()
    return total + _random(rank, numel).view(RANKS, -1)[rank]


def _in_16_bits(rank: int) -> dict[str, Any]:
    group, found = Group.of(), dict[str, Any]()
    for name, dtype in DTYPES.items():
        for kind, numel in NUMELS.items():
            for way in ("at once", "overlapped", "backend's own"):
                bucket, how = _random(rank, numel), Reduction(reduce_dtype=dtype)
                shard = bucket.view(RANKS, -1)[rank]
                if way == "backend's own":
                    nodes = alone(group)
                    pairwise.begin_reduce_scatter(bucket, group, nodes, dtype).wait()
                else:
                    collectives.reduce_scatter(
                        bucket, shard, group, how, overlapped=way == "overlapped"
                    ).wait()
                found[f"{name} {kind} {way}"] = torch.equal(shard, _rounded_sum(rank, numel, dtype))
    return found


REMEDY = (
    "Write --distributed-backend nccl on GPUs or gloo on CPUs, or give init_process_group another "
    "backend."
)


def _lacking(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("Backend tin does not support it\nand more")


def _wrong_sum(bucket: torch.Tensor, *how: object) -> None:
    bucket.fill_(5)


def _distributed(model: torch.nn.Module | None = None, **options: Any) -> str:
    model = model or torch.nn.Linear(4, 4)
    before = [param.data_ptr() for param in model.parameters()]
    try:
        distribute(model, DistOptConfig(**options))
    except DistOptError as error:
        assert [param.data_ptr() for param in model.parameters()] == before, "params were moved"
        return f"{type(error).__name__}: {error}"
    return "trains"


def _tried() -> dict[str, str]:
    found = {"usual": _distributed()}
    found["16 bits"] = _distributed(
        torch.nn.Linear(4, 4).bfloat16(), reduce_dtype="bfloat16", grads_in_fp32=False
    )
    broken: dict[str, tuple[str, Callable[..., None]]] = {
        "no sum": ("reduce_scatter", _lacking),
        "wrong sum": ("reduce_scatter", _wrong_sum),
        "no gather": ("all_gather", _lacking),
    }
    for name, (what, instead) in broken.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairwise, what, instead)
            found[name] = _distributed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_PAIRWISE_OVER", "nobody")
        patch.setattr(dist, collectives.REDUCE_SCATTER, _lacking)
        found["backend's own"] = _distributed()
    return found


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tried": _tried()}
    for name, members in GROUPS.items():
        handle = dist.new_group(list(members))
        if rank not in members:
            continue
        group = Group.of(None if name == "all" else handle)
        found[name] = {
            "gathered": _gathered(group, 10.0 * (rank + 1)),
            "divided": _divided(group, rank),
            "fp16 sum overflows": _overflows(group, 1),
            "fp16 average overflows": _overflows(group, group.size),
            "averaged": _averaged(group, group.size),
            "averaged otherwise": _averaged(group, 4),
            "averaged in 16 bits": _averaged(group, group.size, torch.bfloat16),
        }
    pair_to_pair = _sent(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_PAIRWISE_OVER", "nobody")
        patch.setattr(collectives, "_LIKE_NCCL", ("gloo",))
        with Launches() as launches:
            found["coalesced"] = _sent(rank) == pair_to_pair, launches.names
    with pytest.MonkeyPatch.context() as patch:
        # Two halves for what is sent and what arrives, of two bytes each.
        patch.setattr(pairwise, "SCRATCH_NBYTES", 2 * CHUNK * 2 * (RANKS - 1) * 2)
        found["in 16 bits"] = _in_16_bits(rank)
    return found


facts = facts_of(collect_facts, RANKS)


def by_member(facts: Facts, name: str, what: str) -> list[Any]:
    return [facts.by_rank[rank][name][what] for rank in GROUPS[name]]


@pytest.mark.parametrize("name", GROUPS)
def test_gather_when_done_then_the_groups_first_rank_alone_has_all_parts_in_order(
    name: str, facts: Facts
) -> None:
    first, *others = by_member(facts, name, "gathered")
    assert first["gathered"] == [
        10.0 * (rank + 1) + index for rank in GROUPS[name] for index in range(PART)
    ]
    assert first["dtype"] is torch.bfloat16
    assert [each["gathered"] for each in others] == [None] * len(others)
    assert all(each["is unchanged"] for each in (first, *others))


@pytest.mark.parametrize("name", GROUPS)
def test_reduce_grads_when_divided_then_each_shard_has_the_sum_of_the_quotients(
    name: str, facts: Facts
) -> None:
    of_members = by_member(facts, name, "divided")
    size = len(of_members)
    layout = lay_out(
        [ParamSpec("a", 5), ParamSpec("b", 6)], num_shards=size, bucket_size=5, alignment_numel=1
    )
    wanted = [sum(column) / 4 for column in zip(*(before for _, before in of_members), strict=True)]
    for rank, (shards, _) in enumerate(of_members):
        spans = [bucket.shard(rank, size) for bucket in layout.buckets]
        assert len(spans) == 2
        assert shards == [wanted[index] for span in spans for index in range(span.start, span.stop)]


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "alone"])
def test_reduce_grads_when_in_fp16_then_an_average_fits_where_the_sum_does_not(
    name: str, facts: Facts
) -> None:
    assert set(by_member(facts, name, "fp16 sum overflows")) == {True}
    assert set(by_member(facts, name, "fp16 average overflows")) == {False}


def _averages_of(name: str) -> list[list[float]]:
    """By rank: its shard of what was divided, in fp32, and then added up."""
    size = len(GROUPS[name])
    divided = [(torch.arange(size * PART) * 0.3 + rank).float() / size for rank in range(size)]
    total: Tensor = sum(divided[1:], divided[0])
    return [part.tolist() for part in total.view(size, -1)]


@pytest.mark.parametrize("name", GROUPS)
def test_reduce_scatter_when_the_backend_averages_then_only_where_equal_to_the_bit(
    name: str, facts: Facts
) -> None:
    of_members = by_member(facts, name, "averaged")
    wanted = {
        "all": ["sum", "sum"],
        "alone": [],
        "first two": ["average"] * 2,
        "last two": ["average"] * 2,
    }
    assert [each["ops"] for each in of_members] == [wanted[name]] * len(of_members)
    for each, average in zip(of_members, _averages_of(name), strict=True):
        assert each["out"] == [each["out"][0]] * 2
        # Three summands may be added up in another order: the last bit of numbers up to 4.
        assert each["out"][0] == (
            pytest.approx(average, abs=5e-7) if len(of_members) > 2 else average
        )


@pytest.mark.parametrize("what", ["averaged otherwise", "averaged in 16 bits"])
def test_reduce_scatter_when_divided_by_something_else_or_in_16_bits_then_the_backend_adds_up(
    what: str, facts: Facts
) -> None:
    asked = [op for name in GROUPS for each in by_member(facts, name, what) for op in each["ops"]]
    sums = 2 * sum(len(members) for members in GROUPS.values() if len(members) > 1)
    assert asked == (["sum"] * sums if what == "averaged otherwise" else [])


def test_buckets_when_sent_at_once_then_all_are_one_launch_with_the_same_result(
    facts: Facts,
) -> None:
    for is_same, launches in facts["coalesced"]:
        assert is_same and len(launches) == 2
        assert all("coalesced" in name for name in launches)


@pytest.mark.parametrize("way", ["at once", "overlapped", "backend's own"])
@pytest.mark.parametrize("kind", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_when_it_is_communicated_in_16_bits_then_it_is_that_of_rounded_summands(
    facts: Facts, dtype: str, kind: str, way: str
) -> None:
    assert [each[f"{dtype} {kind} {way}"] for each in facts["in 16 bits"]] == [True] * RANKS


def test_reduce_dtype_when_grads_have_16_bits_already_then_refused(facts: Facts) -> None:
    for each in facts["tried"]:
        assert_says(
            each["16 bits"], "gradients in bfloat16 and reduce_dtype='bfloat16': grads_in_fp32=True"
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no sum", "Backend tin does not support it"),
        ("no gather", "Backend tin does not support it"),
        ("backend's own", "Backend tin does not support it"),
        (
            "wrong sum",
            f"{collectives.REDUCE_SCATTER} of float32 over 3 ranks gave [5.0] instead of [2.0]",
        ),
    ],
)
def test_backend_when_a_collective_fails_then_refused_before_anything_is_moved(
    facts: Facts, name: str, reason: str
) -> None:
    for each in facts["tried"]:
        assert_says(
            each[name],
            f"ConfigError: The backend gloo cannot run reduce-scatters on cpu: {reason}. {REMEDY}",
        )


def test_backend_when_it_has_both_then_it_trains(facts: Facts) -> None:
    assert [each["usual"] for each in facts["tried"]] == ["trains"] * RANKS


def test_backend_when_its_ranks_do_not_exist_then_nothing_is_tried() -> None:
    """In torch's fake process group every collective returns at once, as if there were other
    ranks."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        dtypes = [torch.float32]
        try_collectives(torch.device("cpu"), Group.of(), dtypes=dtypes, sums=dtypes)
    finally:
        dist.destroy_process_group()
