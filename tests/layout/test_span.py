"""Half-open ranges: the arithmetic that everything else counts with."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import Span

SPANS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ends: Span(min(ends), max(ends)))


def elements(span: Span) -> set[int]:
    return set(range(span.start, span.stop))


@pytest.mark.parametrize(
    ("left", "right", "both"),
    [
        (Span(2, 10), Span(8, 20), Span(8, 10)),
        (Span(2, 10), Span(3, 5), Span(3, 5)),
        (Span(2, 10), Span(2, 10), Span(2, 10)),
        (Span(2, 10), Span(10, 20), None),
        (Span(2, 10), Span(11, 20), None),
        (Span(2, 10), Span(5, 5), None),
    ],
)
def test_intersect_when_spans_overlap_or_not_then_the_common_elements_or_none(
    left: Span, right: Span, both: Span | None
) -> None:
    assert left.intersect(right) == both


def test_span_when_moved_then_the_elements_are_counted_from_another_origin() -> None:
    span = Span(8, 10)
    assert span.numel == 2
    assert span.relative_to(8) == Span(0, 2)
    assert span.relative_to(5) == Span(3, 5)
    assert span.moved_by(4) == Span(12, 14)
    assert span.as_slice() == slice(8, 10)


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: Span(-1, 2), "[-1, 2)"),
        (lambda: Span(3, 2), "[3, 2)"),
        (lambda: Span(4, 6).relative_to(5), "[-1, 1)"),
        (lambda: Span(4, 6).moved_by(-5), "[-1, 1)"),
    ],
)
def test_span_when_ends_are_impossible_then_refused(make, got: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError, match=re.escape(got)):
        make()


@settings(deadline=None)
@given(left=SPANS, right=SPANS)
def test_intersect_when_spans_are_random_then_it_is_that_of_their_elements(left: Span, right: Span) -> None:
    both = left.intersect(right)
    assert both == right.intersect(left)
    assert (elements(both) if both is not None else set()) == elements(left) & elements(right)
