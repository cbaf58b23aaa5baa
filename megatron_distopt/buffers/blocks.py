"""Blocks of neighbouring fp32 values that share one scale: a power of two, which is kept as the
exponent of an fp32 number, in one byte.

Numbers of 8 bits are stored so ([Note: block codes] in block_codes.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Of an fp32 number.
MANTISSA_BITS, EXPONENT_BIAS = 23, 127
#: The exponent of a scale of NaN: all values of such a block are NaN.
NAN_EXPONENT = 255
#: Smaller exponents are not used for scales, so that a scale and its inverse are normal numbers.
LEAST_EXPONENT = 20
#: The bits of infinity; those of every NaN are more.
_INFINITY_BITS = 0x7F800000


def exponents_of(largest: Tensor, mantissa_bits: int) -> Tensor:
    """The exponents of scales.

    What a code cannot hold in the octave of the largest value counts as the next octave, so that
    nothing is rounded out of range.

    Args:
        largest: the largest absolute value of each block, fp32; it is overwritten.
        mantissa_bits: of a code.

    Returns:
        int32 in the shape of `largest`; `NAN_EXPONENT` where it is inf or NaN.
    """
    bits = largest.view(torch.int32).clamp_(max=_INFINITY_BITS)
    below_next_code = (1 << (MANTISSA_BITS - mantissa_bits)) - 1
    return ((bits + below_next_code) >> MANTISSA_BITS).clamp_(LEAST_EXPONENT, NAN_EXPONENT)


def power_of_two(exponents: Tensor) -> Tensor:
    """fp32 powers of two from exponents as fp32 keeps them, int32."""
    return (exponents << MANTISSA_BITS).view(torch.float32)
