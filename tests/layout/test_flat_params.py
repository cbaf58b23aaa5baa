"""Flat params: neighbours with equal keys become one flat tensor, padding between them included."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.layout import BufferLayout, ParamSpec, lay_out, owned_shards, plan_flat_params

LAYOUTS = st.builds(
    lay_out,
    st.lists(st.integers(1, 40), min_size=1, max_size=12).map(
        lambda numels: [ParamSpec(f"p{index}", numel) for index, numel in enumerate(numels)]
    ),
    num_shards=st.integers(1, 5),
    bucket_size=st.none() | st.integers(1, 120),
    alignment_numel=st.sampled_from((1, 2, 7, 16)),
)
#: By number of the param: which of three groups it is in; None for one that is not updated.
KEYS = st.lists(st.none() | st.integers(0, 2), min_size=12, max_size=12)


@settings(deadline=None)
@given(layout=LAYOUTS, keys=KEYS)
def test_flat_params_when_random_then_they_hold_the_owned_shards_and_each_is_as_long_as_can_be(
    layout: BufferLayout, keys: list[int | None]
) -> None:
    def key_of(name: str) -> int | None:
        return keys[int(name.removeprefix("p"))]

    in_params = {
        i for slot in layout.slots for i in range(slot.in_buffer.start, slot.in_buffer.stop)
    }
    buffer = list(range(layout.numel))
    for rank in range(layout.num_shards):
        shards = owned_shards(layout, rank)
        flats = plan_flat_params(shards, key_of)
        assert [each for flat in flats for each in flat.shards] == [
            e for e in shards if key_of(e.name) is not None
        ]
        assert all(left.in_buffer.stop <= right.in_buffer.start for left, right in pairwise(flats))
        runs = [kind for kind, _ in groupby((shard.bucket, key_of(shard.name)) for shard in shards)]
        assert [(flat.bucket, flat.key) for flat in flats] == [
            run for run in runs if run[1] is not None
        ]
        for flat in flats:
            assert {shard.bucket for shard in flat.shards} == {flat.bucket}
            assert {key_of(shard.name) for shard in flat.shards} == {flat.key}
            owned = layout.buckets[flat.bucket].shard(rank, layout.num_shards)
            assert flat.in_buffer.intersect(owned) == flat.in_buffer
            elements = buffer[flat.in_buffer.as_slice()]
            assert flat.padding_numel == sum(element not in in_params for element in elements)
            assert flat.in_flat_param(flat.shards[0]).start == 0
            assert flat.in_flat_param(flat.shards[-1]).stop == len(elements)
            for shard in flat.shards:
                # From the place in the param alone.
                start = layout.slot_of[shard.name].in_buffer.start
                expected = [
                    start + element for element in range(shard.in_param.start, shard.in_param.stop)
                ]
                assert elements[flat.in_flat_param(shard).as_slice()] == expected
