"""Half-open ranges: the arithmetic that everything else counts with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import Span

SPANS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(
    lambda ends: Span(min(ends), max(ends))
)


def elements(span: Span) -> set[int]:
    return set(range(span.start, span.stop))


def test_span_when_ends_are_impossible_then_refused() -> None:
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(LayoutError, match=f"start at {start} and stop at {stop}"):
            Span(start, stop)
    with pytest.raises(LayoutError, match="start at -1 and stop at 1"):
        Span(4, 6).relative_to(5)


@settings(deadline=None)
@given(left=SPANS, right=SPANS)
def test_intersect_when_spans_are_random_then_it_is_that_of_their_elements(
    left: Span, right: Span
) -> None:
    both = left.intersect(right)
    assert both == right.intersect(left)
    assert both is None or both.numel > 0
    assert (elements(both) if both is not None else set()) == elements(left) & elements(right)
