"""CRC-32 of bytes of which parts have one already.

A CRC is the remainder of the bytes, as a polynomial over {0, 1}, by a fixed one. To append n bytes multiplies what was
before by x**(8n), so the CRC of the whole follows from those of its parts without a look at the bytes.

zlib's `crc32_combine` gives the same numbers; bit 31 of one is the coefficient of x**0.
"""

from __future__ import annotations

from functools import cache

__all__ = ["joined"]

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def joined(before: int, after: int, nbytes: int) -> int:
    """CRC-32 of bytes with others behind them.

    Args:
        before: CRC-32 of the first.
        after: CRC-32 of the others.
        nbytes: how many the others are.

    >>> import zlib
    >>> joined(zlib.crc32(b"data-"), zlib.crc32(b"parallel"), 8) == zlib.crc32(b"data-parallel")
    True
    """
    return _product(_power(8 * nbytes), before) ^ after


def _product(left: int, right: int) -> int:
    """Of two remainders, a remainder again."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)  # times x
    return product


@cache
def _power(exponent: int) -> int:
    """Remainder of x**exponent; tensors of a model have few sizes."""
    if exponent < 2:
        return _X if exponent else _ONE
    half = _power(exponent // 2)
    square = _product(half, half)
    return _product(square, _X) if exponent % 2 else square
