"""Flat buffers without names: which layouts are understood, which names are found, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.megatron_core.flat_slots import (
    Candidate,
    FlatMain,
    Order,
    Slot,
    Values,
    names_of,
    slots_of,
)
from megatron_distopt.layout import Placement
from tests.support.refusals import assert_says

BF16 = torch.bfloat16
REMEDY = "Give the optimizer state and the model of one save."


def main_params(sizes: Sequence[int]) -> list[Tensor]:
    """In the order of registration; no two begin alike."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(numel, generator=generator) for numel in sizes]


def candidates_of(mains: Sequence[Tensor]) -> list[Candidate]:
    models = [main.to(BF16) for main in mains]
    return [Candidate(Placement(f"p{n}", (m.numel(),)), BF16, lambda m=m: m) for n, m in enumerate(models)]  # type: ignore[misc]


def buffer_of(mains: Sequence[Tensor], *, alignment: int, bucket_size: int = 1 << 30) -> Tensor:
    """As megatron-core lays them out and saves them: backwards, and buckets without what fills them up."""
    buckets: list[Tensor] = []
    bucket = torch.zeros(0)
    for main in reversed(mains):
        gap = -bucket.numel() % alignment
        bucket = torch.cat([bucket, torch.zeros(gap), main])
        if bucket.numel() >= bucket_size:
            buckets.append(bucket)
            bucket = torch.zeros(0)
    return torch.cat([*buckets, bucket])


def found_in(flat: Tensor, candidates: Sequence[Candidate], *, is_one_bucket: bool = False) -> tuple[Slot, ...]:
    return slots_of(FlatMain("0", BF16, lambda: flat, is_one_bucket), Values(candidates, BF16))


SIZES = (128, 40, 1600, 40, 64, 7, 160)


@pytest.mark.parametrize(("alignment", "bucket_size"), [(1, 1 << 30), (64, 1 << 30), (64, 200), (64, 1)])
def test_slots_when_megatron_core_laid_it_out_then_every_param_is_found(alignment: int, bucket_size: int) -> None:
    mains = main_params(SIZES)
    flat = buffer_of(mains, alignment=alignment, bucket_size=bucket_size)
    slots = found_in(flat, candidates_of(mains))
    assert [slot.candidates for slot in slots] == [(number,) for number in reversed(range(len(SIZES)))]
    for slot, main in zip(slots, reversed(mains), strict=True):
        assert torch.equal(flat[slot.start : slot.start + slot.numel], main)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(3, 200), min_size=1, max_size=9),
    alignment=st.sampled_from((1, 64)),
    bucket_size=st.integers(1, 400),
    frozen=st.sets(st.integers(0, 8)),
)
def test_slots_when_any_params_are_laid_out_then_they_are_found_where_they_are(
    sizes: list[int], alignment: int, bucket_size: int, frozen: set[int]
) -> None:
    mains = main_params(sizes)
    trained = [number for number in range(len(sizes)) if number not in frozen] or [0]
    flat = buffer_of([mains[number] for number in trained], alignment=alignment, bucket_size=bucket_size)
    try:
        slots = found_in(flat, candidates_of(mains))
    except CheckpointError as error:  # a small param may lie where others leave a gap: then nobody can know
        assert "in several ways" in str(error) and min(sizes) < 64
        return
    assert [slot.candidates for slot in slots] == [(number,) for number in reversed(trained)]


def test_slots_when_the_bucket_is_known_then_only_multiples_of_the_alignment_begin_a_param() -> None:
    mains = main_params(SIZES)
    with pytest.raises(
        CheckpointError, match=r"^Invalid flat buffer 0: no param of the model begins after element 160 "
    ):
        found_in(buffer_of(mains, alignment=1), candidates_of(mains), is_one_bucket=True)


def test_slots_when_a_shared_embedding_follows_then_the_space_before_it_ends_the_bucket() -> None:
    mains = main_params((40,))
    slots = found_in(torch.cat([mains[0], torch.zeros(24)]), candidates_of(mains), is_one_bucket=True)
    assert [(slot.start, slot.numel) for slot in slots] == [(0, 40)]


def test_slots_when_a_value_is_not_the_models_then_it_is_refused() -> None:
    mains = main_params(SIZES)
    flat = buffer_of(mains, alignment=64)
    flat[500] += 1.0
    with pytest.raises(CheckpointError) as error:
        found_in(flat, candidates_of(mains))
    assert_says(
        str(error.value),
        f"Invalid flat buffer 0: no param of the model begins after element 360 of {flat.numel()}. Must hold main "
        f"params of the model one after the other, which round to the model's values. {REMEDY}",
    )


def test_slots_when_the_buffer_is_longer_than_its_params_then_it_is_refused() -> None:
    mains = main_params((64, 64))
    with pytest.raises(CheckpointError, match=r"begins after element 128 of 129\. "):
        found_in(torch.cat([*reversed(mains), torch.zeros(1)]), candidates_of(mains))


def test_slots_when_zeros_may_lie_in_several_places_then_it_is_refused() -> None:
    # 4 zeros of a bias and 60 of its alignment: the bias may be at either end of them.
    mains = [main_params((64,))[0], torch.zeros(4), main_params((60,))[0]]
    flat = torch.cat([mains[2], torch.zeros(4), torch.zeros(4), torch.zeros(60), mains[0]])
    with pytest.raises(CheckpointError) as error:
        found_in(flat, candidates_of(mains))
    assert_says(
        str(error.value),
        "Invalid flat buffer 0: params of the model fit it in several ways. Must be covered by params of the model in "
        "one way. Train a step more, so that params which are all zeros differ, and save again.",
    )


def test_slots_when_nan_is_a_value_then_it_is_compared_like_any_other() -> None:
    main = torch.tensor([1.0, torch.nan, -0.0, 0.0])
    assert len(found_in(main, candidates_of([main]))) == 1
    with pytest.raises(CheckpointError):
        found_in(torch.tensor([1.0, torch.nan, 0.0, 0.0]), candidates_of([main]))


def slots(*possible: set[int]) -> list[Slot]:
    return [Slot(64 * number, 64, tuple(sorted(each))) for number, each in enumerate(possible)]


def names(buffers: Sequence[Sequence[Slot]], orders: Sequence[Order]) -> list[list[int]]:
    return names_of(buffers, candidates_of(main_params((1,) * 10)), orders, "FOLDER")


REGISTERED = {number: number for number in range(10)}


def test_names_when_neighbours_are_known_then_what_lies_between_them_follows() -> None:
    assert names([slots({4}, {1, 3, 5}, {2}, {1, 3, 5}, {0})], [REGISTERED]) == [[4, 3, 2, 1, 0]]


def test_names_when_another_buffer_has_the_param_then_it_is_out_of_the_question() -> None:
    assert names([slots({5}, {1, 3}), slots({4}, {1, 3}, {2})], [REGISTERED]) == [[5, 1], [4, 3, 2]]


def test_names_when_neighbours_are_alike_then_they_have_the_reverse_of_their_order() -> None:
    assert names([slots({5}, {3, 4}, {3, 4}, {2})], [REGISTERED]) == [[5, 4, 3, 2]]


def test_names_when_lists_are_of_several_ranks_then_each_narrows() -> None:
    orders = [{0: 0, 2: 1, 4: 2}, {1: 0, 3: 1, 5: 2}]
    # 1 has a slot of its own; 0 comes before 2 in the first list, so that its slot would have to come after that of 2.
    assert names([slots({4}, {1, 3}, {2}, {1})], orders) == [[4, 3, 2, 1]]
    assert names([slots({5}, {4}, {0, 3}, {2}, {1})], orders) == [[5, 4, 3, 2, 1]]


def test_names_when_an_order_contradicts_what_is_known_then_it_is_not_used() -> None:
    contradicted = {0: 9, 1: 5, 2: 0, 3: 7}
    assert names([slots({3}, {1, 9}, {2}, {0}, {9})], [contradicted]) == [[3, 1, 2, 0, 9]]


def test_names_when_two_params_may_be_meant_then_both_are_named() -> None:
    with pytest.raises(CheckpointError) as error:
        names([slots({5}, {1, 3})], [REGISTERED])
    assert_says(
        str(error.value),
        "Invalid params in FOLDER: 'p1' or 'p3' at element 64. Must be told apart by their values, or by the order in "
        "which the file lists them. Train a few steps more, so that params which are alike differ, and save again.",
    )


def test_names_when_all_that_fit_are_elsewhere_then_that_is_said() -> None:
    with pytest.raises(CheckpointError, match=r"^Invalid params in FOLDER: none at element 128\. "):
        names([slots({1}, {3}, {1, 3})], [])
