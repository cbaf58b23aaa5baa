"""Sums over several nodes: who is on which node, each node's sum sent once, 8 bits that are
unbiased, and exemptions.

One spawn of five ranks, which also form smaller groups. A node is simulated by the number of a
network namespace.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Communicator, Group, Reduction, pairwise, shared_memory
from megatron_distopt.comm.codes import AsCodes, stretches_of
from megatron_distopt.comm.collectives import all_gather, reduce_scatter
from megatron_distopt.comm.shared_memory import nodes_of
from megatron_distopt.layout import ParamSpec, lay_out
from tests.support.spawn import run_ranks

RANKS = 5
Members = tuple[tuple[int, ...], ...]
#: By name, the ranks of each node.
NODES = {
    "1+1": ((0,), (1,)),
    "2": ((0, 1),),
    "2+1": ((0, 1), (2,)),
    "1+1+1": ((0,), (1,), (2,)),
    "2+2": ((0, 1), (2, 3)),
    "2+2 crosswise": ((0, 2), (1, 3)),
    "2+2+1": ((0, 1), (2, 3), (4,)),
    "3+2": ((0, 1, 4), (2, 3)),
}
SEVERAL = [name for name, members in NODES.items() if len(members) > 1]
NUMEL = 1111
PARAMS = (("first", 3000), ("bias", 200), ("router.weight", 512), ("short", 100), ("last", 5003))
EXEMPTED = {"bias", "router.weight", "short"}
CODED = frozenset({"first", "last"})
BUCKET_SIZES = {"one bucket": None, "buckets": 3000}
STEPS = 32
#: On which 8 bits are tried.
CODED_NODES = ("1+1", "2+1", "1+1+1", "2+2", "2+2+1", "3+2")


def _group(
    members: Members, rank: int, *, is_allowed: bool = True, is_simulated: bool = True
) -> Group | None:
    """A new group of the ranks of these nodes, of which this rank knows its node before the first
    collective."""
    ranks = sorted(each for node in members for each in node)
    handle = dist.new_group(ranks)
    if rank not in ranks:
        return None
    group = Group.of(handle)
    own = next(node for node in members if rank in node)
    with pytest.MonkeyPatch.context() as patch:
        if is_simulated:
            patch.setattr(shared_memory, "_network", lambda: members.index(own))
        shared_memory.allow_shared_memory(group, is_allowed)
        nodes_of(group)
    return group


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _ring(ranks: tuple[Any, ...], last: Any) -> list[Any]:
    """Downwards from the one before `last`, which is the last one."""
    place = ranks.index(last)
    return [ranks[(place - 1 - distance) % len(ranks)] for distance in range(len(ranks))]


def _reference(members: Members, numel: int, owner: int, dtype: torch.dtype) -> Tensor:
    """The shard of an owner: added up inside nodes, rounded where it is sent, then over nodes."""
    home = next(node for node in members if owner in node)
    sums = {}
    for node in members:
        carrier = owner if node is home else node[home.index(owner) % len(node)]
        total = _in_order(
            [_values(rank, numel * sum(map(len, members))) for rank in _ring(node, carrier)]
        )
        sums[node] = total if node is home else total.to(dtype).float()
    return _in_order([sums[node] for node in _ring(members, home)])


def _sums(group: Group, members: Members, rank: int) -> dict[str, bool]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for chunks, nbytes in (("one chunk", 16 << 20), ("many chunks", 8 << 10)):
            for overlapped in (False, True):
                bucket = _values(rank, group.size * NUMEL)
                shard = bucket.view(group.size, -1)[group.rank]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(pairwise, "SCRATCH_NBYTES", nbytes)
                    reduce_scatter(
                        bucket, shard, group, Reduction(reduce_dtype=dtype), overlapped=overlapped
                    ).wait()
                    gathered = torch.full((group.size, NUMEL), rank, dtype=dtype)
                    all_gather(
                        gathered.view(-1), gathered[group.rank], group, overlapped=overlapped
                    ).wait()
                wanted = _reference(members, NUMEL, rank, dtype).view(group.size, -1)[group.rank]
                ranks = sorted(each for node in members for each in node)
                assert [set(row.tolist()) for row in gathered] == [{each} for each in ranks]
                if len(members) > 1 and max(map(len, members)) > 1:
                    found[f"{dtype} {chunks} {overlapped}"] = torch.equal(shard, wanted)
    return found


class _Coded:
    """Gradients of `PARAMS` over a group, reduced in 8 bits."""

    def __init__(
        self, group: Group, rank: int, bucket_size: int | None = None, *, overlapped: bool = False
    ) -> None:
        specs = [ParamSpec(name, numel) for name, numel in PARAMS]
        layout = lay_out(specs, num_shards=group.size, bucket_size=bucket_size, alignment_numel=128)
        self.buffer = ShardedBuffer(
            layout, group.rank, torch.zeros(layout.numel), torch.zeros(layout.numel)
        )
        self.group, self.rank, self.step = group, rank, 0
        how = Reduction(reduce_dtype=torch.int8, coded=CODED)
        self._communicator = Communicator(group, how, overlap_grads=overlapped)
        self._communicator.count_updates = lambda: self.step
        self._communicator.add([self.buffer], [self.buffer])
        self._overlapped = overlapped

    def reduced(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """By name of a param, the sum of its gradients over the group, on every rank."""
        self.buffer.grad.zero_()
        for slot in self.buffer.layout.slots:
            self.buffer.grad[slot.in_buffer.as_slice()] = grads[slot.name]
            if self._overlapped:
                self._communicator.grad_arrived(slot.name)
        self._communicator.finish_grads()
        sums = torch.zeros_like(self.buffer.grad)
        for (_, shard), bucket in zip(self.buffer.reduces, self.buffer.layout.buckets, strict=True):
            sums[bucket.shard(self.group.rank, self.group.size).as_slice()] = shard
        nonfinite = (~sums.isfinite()).float()
        sums.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for each in (sums, nonfinite):
            dist.all_reduce(each, group=self.group.handle)
        sums[nonfinite > 0] = torch.nan
        return {slot.name: sums[slot.in_buffer.as_slice()] for slot in self.buffer.layout.slots}


def _grads(rank: int) -> dict[str, Tensor]:
    """On a grid, so that sums over ranks are exact."""
    return {
        name: (_values(rank + 7 * number, numel) * 64).round() / 64
        for number, (name, numel) in enumerate(PARAMS)
    }


def _scale_of(values: Tensor) -> Tensor:
    """By element, the scale of its block, or twice as much."""
    blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % 128)).view(-1, 128)
    return (
        (blocks.amax(1) / 127).log2().ceil().exp2().mul(2).repeat_interleave(128)[: values.numel()]
    )


def _in_8_bits(group: Group, members: Members, rank: int) -> dict[str, Any]:
    ranks = sorted(each for node in members for each in node)
    exact = {name: _in_order([_grads(each)[name] for each in ranks]) for name, _ in PARAMS}
    by_node = [
        {name: _in_order([_grads(each)[name] for each in node]) for name, _ in PARAMS}
        for node in members
    ]
    bound = {name: _in_order([_scale_of(sums[name]) for sums in by_node]) for name, _ in PARAMS}
    found: dict[str, Any] = {}
    coded = _Coded(group, rank)
    mean = {name: torch.zeros(numel) for name, numel in PARAMS}
    seen = []
    for step in range(STEPS):
        coded.step = step
        sums = coded.reduced(_grads(rank))
        seen.append(sums)
        for name in mean:
            mean[name] += sums[name] / STEPS
    found["bounded"] = all(
        bool(((sums[name] - exact[name]).abs() <= bound[name]).all())
        for sums in seen
        for name in exact
    )
    found["exempted"] = all(
        torch.equal(sums[name], exact[name]) for sums in seen for name in EXEMPTED
    )
    found["tail"] = all(torch.equal(sums["last"][-11:], exact["last"][-11:]) for sums in seen)
    found["rounds"] = not torch.equal(seen[0]["first"], exact["first"])
    found["differs by step"] = not torch.equal(seen[0]["first"], seen[1]["first"])
    # Errors of a mean of STEPS are spread like those of one by 1 / sqrt(STEPS); over elements they
    # cancel further.
    errors = torch.cat([((mean[name] - exact[name]) / bound[name]) for name in ("first", "last")])
    found["mean error"], found["spread"] = float(errors.mean()), float(errors.std())
    for name, size in BUCKET_SIZES.items():
        for overlapped in (False, True):
            other = _Coded(group, rank, size, overlapped=overlapped)
            same = []
            for step in range(3):
                other.step = step
                sums = other.reduced(_grads(rank))
                same.append(all(torch.equal(sums[each], seen[step][each]) for each in exact))
            found[f"equal {name} {overlapped}"] = all(same)
    found["nan"] = _with_nan(coded, rank, ranks)
    return found


def _with_nan(coded: _Coded, rank: int, ranks: list[int]) -> list[int]:
    """Elements that are NaN afterwards, by where the last rank alone has inf or NaN."""
    found = []
    for name, place, value in (
        ("first", 200, torch.inf),
        ("last", 5000, torch.nan),
        ("router.weight", 7, torch.inf),
    ):
        grads = _grads(rank)
        if rank == ranks[-1]:
            grads[name][place] = value
        sums = coded.reduced(grads)
        found.append(sum(int((~each.isfinite()).sum()) for each in sums.values()))
        assert not sums[name][place].isfinite()
    return found


def _bytes(group: Group, rank: int) -> dict[str, float]:
    """Bytes an element that this rank sends to other nodes for gradients and bf16 params."""
    found = {}
    layout = lay_out([ParamSpec("a", 128 * 40)], num_shards=group.size, alignment_numel=128)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int8)):
        sent, original = [0], pairwise.send

        def counted(
            tensor: Tensor, *args: Any, sent: list[int] = sent, original: Any = original
        ) -> Any:
            sent[0] += tensor.numel() * tensor.element_size()
            return original(tensor, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairwise, "send", counted)
            bucket = _values(rank, layout.numel)
            codes = (
                partial(AsCodes, stretches_of(layout, 0, frozenset("a")), 0)
                if name == "int8"
                else None
            )
            shard = bucket.view(group.size, -1)[group.rank]
            reduce_scatter(bucket, shard, group, Reduction(reduce_dtype=dtype, codes=codes))
            whole = torch.full((layout.numel,), float(group.rank), dtype=torch.bfloat16)
            all_gather(whole, whole.view(group.size, -1)[group.rank], group).wait()
            assert whole.view(group.size, -1)[:, 0].tolist() == list(range(group.size))
        found[name] = sent[0] / layout.numel
    return found


def about(group: Group, members: Members, rank: int, *, is_coded: bool) -> dict[str, Any]:
    """Collective: what a group does whose ranks are on these nodes."""
    found: dict[str, Any] = {
        "members": nodes_of(group).members,
        "sums": _sums(group, members, rank),
    }
    if is_coded:
        found |= {"int8": _in_8_bits(group, members, rank), "bytes": _bytes(group, rank)}
    return found


def between_namespaces() -> None:
    """Collective of five ranks, two on each of two nodes and one on a third: checks groups of some
    of them."""
    rank = dist.get_rank()
    for members in (
        ((0, 1), (2, 3), (4,)),
        ((0,), (2,), (4,)),
        ((0, 1), (2,)),
        ((0, 1), (2, 3)),
        ((0,), (4,)),
    ):
        group = _group(members, rank, is_simulated=False)
        if group is not None:
            found = about(group, members, rank, is_coded=True)
            ranks = sorted(each for node in members for each in node)
            assert found["members"] == tuple(tuple(map(ranks.index, node)) for node in members), (
                found["members"]
            )
            assert all(found["sums"].values()), found["sums"]
            _assert_right(found["int8"])
            os.write(1, f"right on {'+'.join(str(len(node)) for node in members)}\n".encode())


def _all(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, members in NODES.items():
        group = _group(members, rank)
        if group is not None:
            found[name] = about(group, members, rank, is_coded=name in CODED_NODES)
    group = _group(NODES["2+2"], rank, is_allowed=rank != 1)
    if group is not None:
        found["one forbids"] = {
            "members": nodes_of(group).members,
            "sums": _sums(group, ((0,), (1,), (2, 3)), rank),
        }
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_all, RANKS, seconds=240)


def _of(found: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [each[case] for each in found if case in each]


@pytest.mark.parametrize("name", NODES)
def test_nodes_when_ranks_can_map_each_other_then_they_are_on_one(
    name: str, found: list[dict[str, Any]]
) -> None:
    for each in _of(found, name):
        assert each["members"] == tuple(sorted(NODES[name], key=min))


def test_nodes_when_a_rank_forbids_shared_memory_then_it_is_a_node_of_its_own(
    found: list[dict[str, Any]],
) -> None:
    for each in _of(found, "one forbids"):
        assert each["members"] == ((0,), (1,), (2, 3))
        assert all(each["sums"].values()) and each["sums"]


@pytest.mark.parametrize("name", SEVERAL)
def test_sum_when_there_are_several_nodes_then_it_is_that_of_the_sums_of_nodes_to_the_bit(
    name: str, found: list[dict[str, Any]]
) -> None:
    for each in _of(found, name):
        assert all(each["sums"].values()), each["sums"]
        assert len(each["sums"]) == (8 if max(map(len, NODES[name])) > 1 else 0)


@pytest.mark.parametrize("name", CODED_NODES)
def test_int8_when_it_is_communicated_then_it_is_unbiased_bounded_exact_where_exempted_and_repeats(
    name: str, found: list[dict[str, Any]]
) -> None:
    for each in _of(found, name):
        _assert_right(each["int8"])


def _assert_right(coded: dict[str, Any]) -> None:
    for what in ("bounded", "exempted", "tail", "rounds", "differs by step"):
        assert coded[what], what
    for size in BUCKET_SIZES:
        for overlapped in (False, True):
            assert coded[f"equal {size} {overlapped}"], (size, overlapped)
    # 8,003 elements of 32 steps each: a mean error of 1/sqrt(256096) of a spread below 1/2, four
    # times over.
    assert abs(coded["mean error"]) < 0.004, coded["mean error"]
    assert coded["spread"] < 0.5 / STEPS**0.5, coded["spread"]
    # The block of an element that is coded, the element alone where it is exempted.
    assert coded["nan"] == [128, 1, 1], coded["nan"]


@pytest.mark.parametrize(("name", "factor"), [("1+1", 0.5), ("2+2", 0.25)])
def test_bytes_when_nodes_have_several_ranks_then_sums_and_params_are_sent_once(
    name: str, factor: float, found: list[dict[str, Any]]
) -> None:
    for each in _of(found, name):
        # Of 6, 4 and 3 bytes an element a rank sends half alone, and a quarter where the node has
        # two ranks.
        assert each["bytes"] == {
            "fp32": 6 * factor,
            "bf16": 4 * factor,
            "int8": (3 + 1 / 128) * factor,
        }
