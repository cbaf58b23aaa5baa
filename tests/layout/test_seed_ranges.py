"""What the seed systems' range maps hold, counted element by element, is what our layout of one bucket says.

The seed systems keep one buffer for all params of a dtype, pad it to a multiple of the data-parallel size n, and give
rank r the elements [r*k, (r+1)*k) where k is the padded numel over n. For each param that overlaps, their maps hold the
overlap three times: in the whole buffer, in the rank's own part of it, and in the param.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_distopt.layout import ParamSpec, lay_out, owned_shards

Range = tuple[int, int]
Ranges = dict[str, tuple[Range, Range, Range]]  # by param: in the whole buffer, in the rank's part, in the param


def ranges_by_counting(numels: tuple[int, ...], num_ranks: int) -> list[Ranges]:
    """The ranges of every rank, element by element: slow, and too simple to be wrong.

    >>> ranges_by_counting((3, 4), 2)[1]  # 7 elements are padded to 8, 4 a rank: param1 is cut after its first element
    {'param1': ((4, 7), (0, 3), (1, 4))}
    """
    part_numel = -(-sum(numels) // num_ranks)
    found: list[dict[str, list[tuple[int, int, int]]]] = [{} for _ in range(num_ranks)]
    position = 0
    for index, numel in enumerate(numels):
        for element in range(numel):
            rank, in_part = divmod(position, part_numel)
            found[rank].setdefault(f"param{index}", []).append((position, in_part, element))
            position += 1
    return [{name: _first_to_last(elements) for name, elements in ranges.items()} for ranges in found]


def _first_to_last(elements: list[tuple[int, int, int]]) -> tuple[Range, Range, Range]:
    in_buffer, in_part, in_param = ((column[0], column[-1] + 1) for column in zip(*elements, strict=True))
    return in_buffer, in_part, in_param


@settings(deadline=None)  # a busy machine is no failure
@given(numels=st.lists(st.integers(1, 30), min_size=1, max_size=10).map(tuple), num_ranks=st.integers(1, 40))
@example(numels=(3, 4), num_ranks=2)
@example(numels=(1,), num_ranks=3)
@example(numels=(7, 1, 2000, 2), num_ranks=64)
def test_seed_ranges_when_every_element_is_counted_then_both_agree(numels: tuple[int, ...], num_ranks: int) -> None:
    specs = [ParamSpec(f"param{index}", numel) for index, numel in enumerate(numels)]
    layout = lay_out(specs, num_shards=num_ranks, alignment_numel=1)
    assert len(layout.buckets) == 1
    ours: list[Ranges] = []
    for rank in range(num_ranks):
        shards = owned_shards(layout, rank)
        assert all((shard.rank, shard.bucket, shard.in_bucket) == (rank, 0, shard.in_buffer) for shard in shards)
        spans = {shard.name: (shard.in_buffer, shard.in_shard, shard.in_param) for shard in shards}
        ours.append({name: tuple((span.start, span.stop) for span in each) for name, each in spans.items()})  # type: ignore[misc]
    assert ours == ranges_by_counting(numels, num_ranks)
