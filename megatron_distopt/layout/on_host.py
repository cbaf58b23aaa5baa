"""Which buckets have their state on the host, and which fraction of the state fits into a memory.

The optimizer puts state where `choose_buckets` says (optimizer/offload.py), and `megatron-distopt plan` counts with the
same function. Buckets are whole, so a fraction takes more than it says: of a single bucket any fraction above 0 takes
all. Which fraction fits therefore cannot be computed from bytes alone; it is searched for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from megatron_distopt.layout.buckets import BufferLayout

#: Fractions are searched for, and written in messages, in hundredths.
_STEPS = 100


def choose_buckets(layouts: Sequence[BufferLayout], fraction: float) -> list[frozenset[int]]:
    """The buckets whose state is on the host, by buffer: those that come first, until the fraction is reached.

    Args:
        layouts: of the buffers of 16-bit params, in the order in which their gradients arrive in backward.
        fraction: of their elements, padding included; from 0 to 1.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec(name, 64) for name in "abcd"], num_shards=2, bucket_size=64)
    >>> [sorted(*choose_buckets([layout], fraction)) for fraction in (0.0, 0.25, 0.26, 1.0)]
    [[], [0], [0, 1], [0, 1, 2, 3]]
    """
    wanted = fraction * sum(layout.numel for layout in layouts)
    chosen: list[set[int]] = [set() for _ in layouts]
    taken = 0
    for buckets, layout in zip(chosen, layouts, strict=True):
        for bucket in layout.buckets:
            if taken < wanted:
                buckets.add(bucket.index)
                taken += bucket.in_buffer.numel
    return [frozenset(each) for each in chosen]


def least_fraction(fits: Callable[[float], bool]) -> float | None:
    """The least hundredth with which something fits; None where it does not fit with 1 either.

    Args:
        fits: whether it fits with a fraction; if so, it fits with every larger one as well.

    >>> least_fraction(lambda fraction: fraction > 0.3), least_fraction(lambda fraction: False)
    (0.31, None)
    """
    found = bisect_left(range(_STEPS + 1), True, key=lambda step: fits(step / _STEPS))
    return found / _STEPS if found <= _STEPS else None


def greatest_fraction(fits: Callable[[float], bool]) -> float:
    """The greatest hundredth with which something fits.

    Args:
        fits: whether it fits with a fraction; if so, it fits with every smaller one as well, and always with 0.

    >>> greatest_fraction(lambda fraction: fraction <= 0.3), greatest_fraction(lambda fraction: fraction < 2)
    (0.3, 1.0)
    """
    first = bisect_left(range(_STEPS + 1), True, key=lambda step: not fits(step / _STEPS))
    return max(first - 1, 0) / _STEPS


def pinned_nbytes(nbytes: int) -> int:
    """Bytes of the host that a pinned tensor takes: torch's allocator on CUDA and ROCm has powers of two.

    Args:
        nbytes: of the tensor.

    >>> pinned_nbytes(4096), pinned_nbytes(4097), pinned_nbytes(0)
    (4096, 8192, 0)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
