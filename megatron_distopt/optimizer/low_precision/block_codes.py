"""Numbers in 8 bits: how a block of fp32 values is rounded to codes and one scale, and read back;
and how values are rounded at random.

[Note: block codes] 128 neighbouring values have one scale, a power of two, which is kept as the
exponent of an fp32 number (one byte). A value is divided by the scale, rounded to fp16, and the
code is a part of its 16 bits: the sign, the lowest 3 bits of its exponent and the highest 4 of its
mantissa. So steps are proportional to values over 7 octaves, and linear below. A power of two
leaves mantissas as they are. What was read back is therefore rounded to itself, in a block with
smaller values as well, and a checkpoint that is loaded in the same precision gives the same bits.

[Note: roots] Of a second moment the root is kept. It needs half the octaves, and is what Adam
divides by. A value that is not zero never becomes zero, because Adam would divide by eps alone.
Codes have 5 bits of mantissa at most, so the square of a root is exact in fp32, and so is the root
of the square. Of other values the root is rounded to nearest, as by a GPU; MKL's root of fp32,
which torch takes on a CPU, is an ulp off at times.

[Note: stochastic rounding] An exponential average with a decay of 0.999 changes by a thousandth at
most where the gradient vanishes, less than half a step of bf16 or of 8 bits, so rounding to nearest
would keep it up for ever. Second moments and bf16 main params are therefore rounded up or down at
random, in proportion to what is cut off. The random bits are a function of an element's place among
all elements of its buffer, padding left out, and the count of updates. So a run can be repeated to
the bit, and they do not depend on ranks and buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_distopt.device import CPU

#: Of an fp32 number.
_FP32_MANTISSA_BITS, _FP32_BIAS = 23, 127
#: The exponent of a scale of NaN: all values of such a block are NaN.
_NAN_EXPONENT = 255
#: Smaller exponents are not used for scales, so that a scale and its inverse are normal numbers.
_LEAST_EXPONENT = 20
#: The bits of infinity; those of every NaN are more.
_INFINITY_BITS = 0x7F800000
#: Of a code, which is a byte: its sign, and the 3 bits of exponent and 4 of mantissa.
_SIGN, MAGNITUDE = 0x80, 0x7F
_MANTISSA_BITS = 4
#: fp16 has so many bits of mantissa, and its exponents count from there; its sign is bit 15.
_FP16_MANTISSA_BITS, _FP16_BIAS, _FP16_SIGN = 10, 15, -0x8000
_CUT_BITS = _FP16_MANTISSA_BITS - _MANTISSA_BITS
_SIGN_SHIFT = 8  # between the signs of fp16 and of a code
_LAST_KEPT = 1 << _CUT_BITS
#: The exponent, as fp16 keeps it, that the largest value of a block gets: the largest of 3 bits.
_TOP = 7
#: What is added to the exponent of that value for the scale, and from what it is subtracted for the
#: inverse of the scale.
_TO_SCALE = _FP16_BIAS - _TOP
_INVERSE = 2 * _FP32_BIAS - _TO_SCALE
#: The largest exponent of a scale, so that it and its inverse are normal; blocks with larger values
#: are NaN.
_LARGEST_EXPONENT = 2 * _FP32_BIAS - 16 + _TOP
_HALF_BITS = 16  # of an fp32 number
_POSITIVE = 0x7FFFFFFF  # all bits of an int32 but its sign
#: Odd numbers with bits everywhere, by which the place and the count of updates are spread.
_FACTOR_OF_PLACE, _FACTOR_OF_COUNT = 0x9E3779B1, 0xC2B2AE35


def encode(values: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rounds fp32 values [blocks, 128], which are overwritten, to codes of that shape and exponents
    of blocks, both uint8.

    `noise` is int16 of the same shape with random bits, to round at random; None to round to
    nearest.
    """
    largest = values.abs().amax(1)
    exponents = _exponents_of(largest)
    is_too_large = exponents > _LARGEST_EXPONENT
    exponents.masked_fill_(is_too_large, _NAN_EXPONENT)
    finite = exponents.clamp(max=_NAN_EXPONENT - 1)
    inverses = _power_of_two(_INVERSE - finite)
    values.mul_(inverses.unsqueeze(1))
    halves = values.to(torch.float16)
    bits = halves.view(torch.int16)
    if noise is None:
        bits.add_(_LAST_KEPT // 2)
    else:
        bits.add_(noise & (_LAST_KEPT - 1))
    signs = bits >> _SIGN_SHIFT
    signs.bitwise_and_(_SIGN)
    bits.bitwise_right_shift_(_CUT_BITS)
    bits.bitwise_and_(MAGNITUDE)
    bits.bitwise_or_(signs)
    return bits.to(torch.uint8), exponents.to(torch.uint8)


def encode_roots(values: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`encode` for the roots of values that are at least 0 and stay; see [Note: roots]."""
    roots = root_of(values)
    codes, exponents = encode(roots, noise)
    is_lost = (codes == 0) & (roots > 0)
    codes.add_(is_lost)  # the smallest code
    return codes, exponents


def decode(codes: Tensor, exponents: Tensor) -> Tensor:
    """The fp32 values [blocks, 128] of what `encode` returned."""
    bits = codes.to(torch.int16)
    signs = bits << _SIGN_SHIFT
    signs.bitwise_and_(_FP16_SIGN)
    bits.bitwise_and_(MAGNITUDE)
    bits.bitwise_left_shift_(_CUT_BITS)
    bits.bitwise_or_(signs)
    halves = bits.view(torch.float16)
    values = halves.to(torch.float32)
    wide = exponents.to(torch.int32)
    scales = _power_of_two(wide + _TO_SCALE)
    is_nan = wide == _NAN_EXPONENT
    scales.masked_fill_(is_nan, torch.nan)
    return values.mul_(scales.unsqueeze(1))


def _exponents_of(largest: Tensor) -> Tensor:
    """The exponents of scales.

    What a code cannot hold in the octave of the largest value counts as the next octave, so that
    nothing is rounded out of range.

    Args:
        largest: the largest absolute value of each block, fp32; it is overwritten.

    Returns:
        int32 in the shape of `largest`; `_NAN_EXPONENT` where it is inf or NaN.
    """
    bits = largest.view(torch.int32).clamp_(max=_INFINITY_BITS)
    below_next_code = (1 << (_FP32_MANTISSA_BITS - _MANTISSA_BITS)) - 1
    exponents = (bits + below_next_code) >> _FP32_MANTISSA_BITS
    return exponents.clamp_(_LEAST_EXPONENT, _NAN_EXPONENT)


def _power_of_two(exponents: Tensor) -> Tensor:
    """fp32 powers of two from exponents as fp32 keeps them, int32."""
    return (exponents << _FP32_MANTISSA_BITS).view(torch.float32)


def root_of(values: Tensor) -> Tensor:
    """The square root, rounded to nearest; see [Note: roots].

    A root in float64 that is an ulp off still rounds to the right fp32 number: no root of an fp32
    number is so near to the middle of two others.
    """
    if values.device.type != CPU:
        return values.sqrt()
    doubles = values.double()
    doubles.sqrt_()
    return doubles.float()


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds fp32 up or down at random, by int32 noise from 0 to 2**16 - 1; inf and NaN stay."""
    bits = values.view(torch.int32) + noise
    bits.bitwise_right_shift_(_HALF_BITS)
    upper = bits.to(torch.int16)
    rounded = upper.view(torch.bfloat16)
    special = values.to(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, special)


def random_bits(start: int, numel: int, count: Tensor) -> Tensor:
    """31 random bits, int32 [numel], for neighbouring elements; the same whenever it is called with
    the same arguments.

    `count` is of updates, 0-D on the device of the result.
    Source: the constants of a 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
    """
    bits = torch.arange(numel, dtype=torch.int32, device=count.device)
    bits.add_(_signed(start))
    bits.mul_(_signed(_FACTOR_OF_PLACE))
    of_count = count.to(torch.int32)
    bits.add_(of_count * _signed(_FACTOR_OF_COUNT))
    bits.bitwise_xor_(_shifted(bits, 16))
    bits.mul_(_signed(0x85EBCA6B))
    bits.bitwise_xor_(_shifted(bits, 13))
    bits.mul_(_signed(0xC2B2AE35))
    bits.bitwise_xor_(_shifted(bits, 16))
    return bits.bitwise_and_(_POSITIVE)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shifts zeros in from the left, as unsigned numbers are."""
    lowest = (1 << (32 - shift)) - 1
    shifted = bits >> shift
    return shifted.bitwise_and_(lowest)


def _signed(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    half = 1 << 31
    return (number + half) % (2 * half) - half
