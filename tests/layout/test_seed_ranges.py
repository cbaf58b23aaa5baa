"""The range maps of the seed systems, written down independently, against our layout of one bucket.

The seed systems keep one buffer for all params of a dtype, pad it to a multiple of the data-parallel size n, and give
rank r the elements [r*k, (r+1)*k) where k is the padded numel over n. For each param that overlaps, their maps hold the
overlap three times: in the whole buffer, in the rank's own part of it, and in the param.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.layout import BufferLayout, ParamSpec, lay_out, owned_shards

MODELS = 3000

Range = tuple[int, int]
Ranges = dict[str, tuple[Range, Range, Range]]  # param: in the whole buffer, in the rank's part, in the param


@dataclass(frozen=True)
class Model:
    """The numel of each param in buffer order (the seed systems reverse the order of registration), and the ranks."""

    numels: tuple[int, ...]
    num_ranks: int

    @property
    def numel_padded(self) -> int:
        total = sum(self.numels)
        return total + (-total) % self.num_ranks


def seed_ranges(model: Model, rank: int) -> Ranges:
    """What the seed systems' maps hold on one rank."""
    part_numel = model.numel_padded // model.num_ranks
    part_start = rank * part_numel
    ranges: Ranges = {}
    param_start = 0
    for index, numel in enumerate(model.numels):
        start_in_part = max(0, param_start - part_start)
        stop_in_part = min(part_numel, param_start + numel - part_start)
        if start_in_part < stop_in_part:
            in_param_start = max(0, part_start - param_start)
            ranges[f"param{index}"] = (
                (part_start + start_in_part, part_start + stop_in_part),
                (start_in_part, stop_in_part),
                (in_param_start, in_param_start + stop_in_part - start_in_part),
            )
        param_start += numel
    return ranges


def ranges_by_counting(model: Model) -> list[Ranges]:
    """The same for every rank, element by element: slow, and too simple to be wrong."""
    part_numel = model.numel_padded // model.num_ranks
    found: list[dict[str, list[tuple[int, int, int]]]] = [{} for _ in range(model.num_ranks)]
    position = 0
    for index, numel in enumerate(model.numels):
        for element in range(numel):
            rank, in_part = divmod(position, part_numel)
            found[rank].setdefault(f"param{index}", []).append((position, in_part, element))
            position += 1
    return [{name: _first_to_last(elements) for name, elements in ranges.items()} for ranges in found]


def _first_to_last(elements: list[tuple[int, int, int]]) -> tuple[Range, Range, Range]:
    in_buffer, in_part, in_param = ((column[0], column[-1] + 1) for column in zip(*elements, strict=True))
    return in_buffer, in_part, in_param


def our_layout(model: Model) -> BufferLayout:
    specs = [ParamSpec(f"param{index}", numel) for index, numel in enumerate(model.numels)]
    return lay_out(specs, num_shards=model.num_ranks, alignment_numel=1)


def our_ranges(layout: BufferLayout, rank: int) -> Ranges:
    return {
        shard.name: (
            (shard.in_buffer.start, shard.in_buffer.stop),
            (shard.in_shard.start, shard.in_shard.stop),
            (shard.in_param.start, shard.in_param.stop),
        )
        for shard in owned_shards(layout, rank)
    }


def random_models() -> Iterator[Model]:
    """From a handful of elements on a few ranks to billions on thousands; the same ones in every run."""
    draw = random.Random(20240229)
    for _ in range(MODELS):
        largest = draw.choice((3, 40, 5000, 10**9))
        numels = tuple(draw.randint(1, largest) for _ in range(draw.randint(1, 24)))
        yield Model(numels, draw.choice((1, 2, 3, 4, 5, 7, 8, 12, 64, 4096)))


def some_ranks(model: Model) -> range:
    """All ranks of a small group; of a large one about forty, the last of them included."""
    step = max(1, (model.num_ranks - 1) // 40)
    return range((model.num_ranks - 1) % step, model.num_ranks, step)


def test_seed_ranges_when_models_are_random_then_the_layout_of_one_bucket_gives_the_same_numbers() -> None:
    seen = {"padded": 0, "owns nothing": 0, "param cut by three shards": 0, "several params": 0}
    for model in random_models():
        layout = our_layout(model)
        assert len(layout.buckets) == 1
        assert layout.numel == model.numel_padded
        for rank in some_ranks(model):
            expected = seed_ranges(model, rank)
            assert our_ranges(layout, rank) == expected, f"{model} rank {rank}"
            seen["owns nothing"] += not expected
            seen["several params"] += len(expected) > 1
        seen["padded"] += model.numel_padded > sum(model.numels)
        seen["param cut by three shards"] += max(model.numels) > 2 * layout.shard_numel
    # The sample is worth something only if it holds each of these kinds many times.
    assert min(seen.values()) > MODELS // 20, seen


def test_seed_ranges_when_the_buffer_is_one_bucket_then_bucket_and_buffer_count_alike() -> None:
    for model in (Model((3, 4), 2), Model((1,), 3), Model((7, 1, 9, 2), 4)):
        for rank in range(model.num_ranks):
            for shard in owned_shards(our_layout(model), rank):
                assert (shard.bucket, shard.rank) == (0, rank)
                assert shard.in_bucket == shard.in_buffer


def test_seed_ranges_when_written_out_by_hand_then_both_agree() -> None:
    model = Model((3, 4), 2)  # 7 elements padded to 8, 4 a rank: param1 is cut after its first element
    assert seed_ranges(model, 0) == {"param0": ((0, 3), (0, 3), (0, 3)), "param1": ((3, 4), (3, 4), (0, 1))}
    assert seed_ranges(model, 1) == {"param1": ((4, 7), (0, 3), (1, 4))}
    assert [our_ranges(our_layout(model), rank) for rank in range(2)] == [seed_ranges(model, rank) for rank in range(2)]


@settings(deadline=None)  # a busy machine is no failure
@given(
    numels=st.lists(st.integers(1, 30), min_size=1, max_size=10).map(tuple),
    num_ranks=st.integers(1, 40),
)
def test_seed_ranges_when_every_element_is_counted_then_both_agree(numels: tuple[int, ...], num_ranks: int) -> None:
    model = Model(numels, num_ranks)
    counted = ranges_by_counting(model)
    assert [seed_ranges(model, rank) for rank in range(num_ranks)] == counted
    layout = our_layout(model)
    assert [our_ranges(layout, rank) for rank in range(num_ranks)] == counted
