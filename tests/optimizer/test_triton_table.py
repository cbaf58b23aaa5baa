"""How flat params are cut for the kernels, and when a table is built anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_distopt.optimizer.triton_table import Tables, cut, place_grads

BYTES = 16


@given(
    numel=st.integers(1, 60),
    phase=st.integers(0, 7),
    blocks=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    has_model=st.booleans(),
)
def test_cut_when_tensors_are_in_phase_then_the_body_is_aligned_in_all_and_less_than_a_vector_is_left(
    numel: int, phase: int, blocks: list[int], has_model: bool
) -> None:
    words = [4 * (phase + 8 * block) for block in blocks]
    model = 2 * phase if has_model else None
    found = cut(numel, words, model)
    assert 0 <= found.head <= numel and found.head + found.body <= numel and found.body % 8 == 0
    assert numel - found.body < 16
    if found.body:
        assert found.head < 8 and numel - found.head - found.body < 8
        assert all((word + 4 * found.head) % BYTES == 0 for word in words)
        assert model is None or (model + 2 * found.head) % BYTES == 0


@pytest.mark.parametrize(("words", "model"), [((0, 4), None), ((0, 0), 1), ((0, 0), 2), ((2, 2), None)])
def test_cut_when_no_element_is_aligned_in_all_then_nothing_is_in_the_body(
    words: tuple[int, int], model: int | None
) -> None:
    found = cut(1000, words, model)
    assert (found.head, found.body) == (1000, 0)


def test_place_grads_when_memory_is_allocated_anew_then_the_places_in_it_are_the_same() -> None:
    places = []
    kept = torch.zeros(40)
    for _ in range(2):
        scratch = torch.zeros(100)
        sources, found = place_grads([kept[3:9], scratch[:7], scratch[7:90]])
        starts = [sources[place.source] + place.offset for place in found]
        assert starts == [kept[3:].data_ptr(), scratch.data_ptr(), scratch[7:].data_ptr()]
        places.append(found)
    assert places[0] == places[1]


def test_place_grads_when_there_are_more_allocations_than_sources_then_the_last_ones_are_addresses() -> None:
    grads = [torch.zeros(2) for _ in range(7)]
    sources, places = place_grads(grads)
    assert len(sources) == 4
    starts = [place.offset + (sources[place.source] if place.source < 4 else 0) for place in places]
    assert starts == [grad.data_ptr() for grad in grads]


def test_tables_when_more_are_asked_for_than_are_held_then_the_oldest_is_built_again() -> None:
    built: list[int] = []
    tables: Tables[int] = Tables(most=2)
    for key in (1, 2, 1, 2, 3, 3, 1):
        assert tables.get(key, torch.device("cpu"), lambda key=key: built.append(key) or key) == key
    assert built == [1, 2, 3, 1]
