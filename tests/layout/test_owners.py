"""Who updates which matrix: laws over random layouts, every refusal, and public models on up to
4,096 ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.cli.plan_command import LLAMA, layout_of
from megatron_distopt.cli.plan_model import AUTO, Choice, GptSizes, ParallelSizes, stage_params
from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import (
    BufferLayout,
    MatrixSpec,
    OwnerPlan,
    ParamSpec,
    lay_out,
    owned_shards,
    plan_owners,
)

Case = tuple[BufferLayout, Mapping[str, MatrixSpec]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout of matrices, fused matrices and element-wise params."""
    specs, matrices = [], {}
    for number in range(draw(st.integers(1, 10))):
        rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        kind = draw(st.sampled_from(("matrix", "stacked", "alternating", "element-wise")))
        name = f"p{number}"
        spec = {
            "matrix": MatrixSpec(rows, cols),
            "stacked": MatrixSpec(2 * rows, cols, sizes=(rows, rows)),
            "alternating": MatrixSpec(rows, 2 * cols, dim=1, sizes=(cols, cols)),
            "element-wise": MatrixSpec(rows, cols),
        }[kind]
        specs.append(ParamSpec(name, spec.numel, (spec.rows, spec.cols)))
        if kind != "element-wise":
            matrices[name] = spec
    bucket_size, alignment = (
        draw(st.none() | st.integers(1, 150)),
        draw(st.sampled_from((1, 2, 7, 64))),
    )
    return lay_out(
        specs,
        num_shards=draw(st.integers(1, 9)),
        bucket_size=bucket_size,
        alignment_numel=alignment,
    ), matrices


@settings(deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_owners_when_planned_then_every_element_of_a_matrix_is_in_one_block(
    case: Case, seed: int
) -> None:
    layout, matrices = case
    before = [owned_shards(layout, rank) for rank in range(layout.num_shards)]
    plan = plan_owners(layout, matrices)
    assert plan.owners_of.keys() == matrices.keys()
    assert all(
        left.in_buffer.stop <= right.in_buffer.start for left, right in pairwise(plan.owners)
    )
    for name, spec in matrices.items():
        owners, slot = plan.owners_of[name], layout.slot_of[name]
        assert (owners[0].in_buffer.start, owners[-1].in_buffer.stop) == (
            slot.in_buffer.start,
            slot.in_buffer.stop,
        )
        assert sum(owner.in_buffer.numel for owner in owners) == spec.numel
        assert [shape for owner in owners for shape in owner.block.shapes] == [*spec.shapes]
        for owner in owners:
            assert owner.bucket == slot.bucket
            assert owner.in_buffer == owner.block.in_param.moved_by(slot.in_buffer.start)
            holders = {
                rank
                for rank in range(layout.num_shards)
                if owner.in_buffer.intersect(
                    layout.buckets[slot.bucket].shard(rank, layout.num_shards)
                )
            }
            assert {
                *layout.buckets[slot.bucket].holders(owner.in_buffer, layout.num_shards)
            } == holders
            assert owner.rank in range(layout.num_shards)
            assert (owner.round is None) == (holders == {owner.rank})
    # Checkpoints, main params and collectives do not depend on it, nor does it on the order in
    # which they are listed.
    assert plan.layout is layout
    assert [owned_shards(plan.layout, rank) for rank in range(layout.num_shards)] == before
    shuffled = list(matrices.items())
    Random(seed).shuffle(shuffled)
    assert plan_owners(layout, dict(shuffled)) == plan


@settings(deadline=None)
@given(case=cases())
def test_travels_when_all_ranks_are_taken_then_the_owner_gets_every_element_that_it_lacks_once(
    case: Case,
) -> None:
    layout, matrices = case
    plan, ranks = plan_owners(layout, matrices), range(layout.num_shards)
    arriving = [travel for rank in ranks for travel in plan.arriving(rank)]
    leaving = [travel for rank in ranks for travel in plan.leaving(rank)]
    assert sorted(arriving, key=repr) == sorted(leaving, key=repr)
    got = {(travel.name, travel.in_buffer.start): travel for travel in arriving}
    assert len(got) == len(arriving)
    for owner in plan.owners:
        has = Counter[int]()
        for shard in owned_shards(layout, owner.rank):
            own = shard.in_buffer.intersect(owner.in_buffer)
            has.update(range(own.start, own.stop) if own else ())
        for travel in arriving:
            if (travel.name, travel.owner, travel.round) == (owner.name, owner.rank, owner.round):
                has.update(range(travel.in_buffer.start, travel.in_buffer.stop))
        assert has == Counter(range(owner.in_buffer.start, owner.in_buffer.stop))
    for rank in ranks:
        held = {shard.name: shard.in_buffer for shard in owned_shards(layout, rank)}
        for travel in plan.leaving(rank):  # a piece of its holder in both index spaces
            owner = next(
                each
                for each in plan.owners
                if (each.rank, each.round) == (travel.owner, travel.round)
            )
            assert travel.holder == rank != travel.owner
            assert travel.in_buffer.intersect(held[travel.name]) == travel.in_buffer
            assert travel.in_block.moved_by(owner.in_buffer.start) == travel.in_buffer
        # One travels at a time to each owner, and none is left out.
        rounds = [owner.round for owner in plan.owned_by(rank) if owner.round is not None]
        assert rounds == list(range(len(rounds)))
        assert len(rounds) <= plan.num_rounds
        assert {travel.round for travel in plan.arriving(rank)} == set(rounds)


@settings(deadline=None)
@given(case=cases())
def test_costs_when_planned_then_no_rank_is_above_what_list_scheduling_guarantees(
    case: Case,
) -> None:
    layout, matrices = case
    plan = plan_owners(layout, matrices)
    costs = [sum(owner.cost for owner in plan.owned_by(rank)) for rank in range(layout.num_shards)]
    most, average = (
        max((owner.cost for owner in plan.owners), default=0),
        sum(costs) / layout.num_shards,
    )
    # Above the tolerance a matrix goes to the rank with the lowest cost, which is at most the
    # average before it.
    assert max(costs) <= max(1.03 * max(average, most), average + most)
    assert plan.imbalance == pytest.approx(max(costs) / average if matrices else 1.0)


def test_owner_when_one_rank_would_wait_for_another_then_a_whole_matrix_travels() -> None:
    """Four matrices lie in the first shard, and the second has nothing but an element-wise
    param."""
    params = [
        *(ParamSpec(f"m{number}", 4, (2, 2)) for number in range(4)),
        ParamSpec("embedding", 16),
    ]
    layout = lay_out(params, num_shards=2, alignment_numel=1)
    plan = plan_owners(layout, {f"m{number}": MatrixSpec(2, 2) for number in range(4)})
    assert [(each.rank, each.round) for each in plan.owners] == [
        (0, None),
        (0, None),
        (1, 0),
        (1, 1),
    ]
    assert plan.imbalance == 1.0


def test_owner_when_a_matrix_is_cut_then_the_rank_with_most_of_it() -> None:
    layout = lay_out(
        [ParamSpec("bias", 1), ParamSpec("m", 9, (3, 3))], num_shards=2, alignment_numel=1
    )
    [owner] = plan_owners(layout, {"m": MatrixSpec(3, 3)}).owners
    assert (owner.rank, owner.round) == (1, 0)


@pytest.mark.parametrize(
    ("matrices", "word"),
    [({"b": MatrixSpec(2, 2)}, "'b' has no elements"), ({"a": MatrixSpec(2, 3)}, "'a' has 4")],
)
def test_plan_when_matrices_are_not_those_of_the_buffer_then_refused(
    matrices: Mapping[str, MatrixSpec], word: str
) -> None:
    layout = lay_out([ParamSpec("a", 4, (2, 2))], num_shards=2)
    with pytest.raises(LayoutError, match=word):
        plan_owners(layout, matrices)


# --- models of public sizes


LARGE_MODELS = {
    "LLaMA 7B": GptSizes(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, **LLAMA),
    "LLaMA 70B": GptSizes(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000, **LLAMA
    ),
    "Mixtral 8x7B": GptSizes(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=8, **LLAMA
    ),
}


def _planned(
    model: GptSizes, num_shards: int, bucket_size: int | Literal["auto"] | None
) -> OwnerPlan:
    params = stage_params(model, ParallelSizes(dp=num_shards), 0, "bfloat16")
    layout = layout_of(
        params, Choice(ParallelSizes(dp=num_shards), bucket_size=bucket_size), num_shards
    )
    matrices = [
        param.spec
        for param in params
        if ".layers." in param.spec.name and len(param.spec.shape) == 2
    ]
    return plan_owners(layout, {spec.name: MatrixSpec.of(spec) for spec in matrices})


@pytest.mark.parametrize("num_shards", [64, 4096])
@pytest.mark.parametrize("model", LARGE_MODELS.values(), ids=LARGE_MODELS)
def test_plan_when_the_model_is_large_then_even_and_cheap_at_any_number_of_ranks(
    model: GptSizes, num_shards: int
) -> None:
    plan = _planned(model, num_shards, AUTO)
    if num_shards <= 64:
        assert plan.imbalance < 1.06  # a rank has six matrices at least
    # a rank has few matrices, or none: the costliest matrix decides, or one more than the average
    # rank has
    else:
        costs = [owner.cost for owner in plan.owners]
        assert plan.imbalance < 1.31 * max(1.0, max(costs) * num_shards / sum(costs))


@pytest.mark.parametrize("model", LARGE_MODELS.values(), ids=LARGE_MODELS)
def test_plan_when_a_buffer_is_one_bucket_then_hardly_anything_travels(model: GptSizes) -> None:
    plan = _planned(model, 8, None)
    # A border between two shards cuts one matrix; others travel only for the sake of balance.
    holders = [
        plan.layout.buckets[owner.bucket].holders(owner.in_buffer, 8) for owner in plan.owners
    ]
    assert sum(len(ranks) > 1 for ranks in holders) <= 7
    sent = sum(travel.in_buffer.numel for rank in range(8) for travel in plan.leaving(rank))
    # bytes there and back, and those of the bucket
    assert 4 * sent / 8 < 0.005 * 6 * plan.layout.numel * 7 / 8
