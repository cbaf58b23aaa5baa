"""A half-open range of element indices: the only arithmetic that the layout needs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distopt.errors import LayoutError, refusal

__all__ = ["Span"]


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Elements `start` (inclusive) to `stop` (exclusive) of some 1-D index space.

    The index space is always in the name of the variable: `in_param`, `in_buffer`, `in_bucket`, `in_shard`.

    >>> Span(2, 10).intersect(Span(8, 20))
    Span(start=8, stop=10)
    >>> Span(8, 10).relative_to(8)
    Span(start=0, stop=2)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise LayoutError(
                refusal("span", f"[{self.start}, {self.stop})", "satisfy 0 <= start <= stop", "Give start before stop")
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def relative_to(self, origin: int) -> Span:
        """The same elements, counted from `origin`."""
        return Span(self.start - origin, self.stop - origin)

    def moved_by(self, distance: int) -> Span:
        """The same elements, in an index space that starts `distance` elements earlier."""
        return Span(self.start + distance, self.stop + distance)

    def intersect(self, other: Span) -> Span | None:
        """The elements in both, or None where there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def as_slice(self) -> slice:
        """For indexing a 1-D tensor."""
        return slice(self.start, self.stop)
