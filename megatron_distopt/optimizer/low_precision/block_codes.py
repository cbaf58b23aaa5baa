"""Stores numbers in 8 bits: a block of fp32 values is rounded to codes and one scale, and read
back. Also rounds values stochastically.

[Note: block codes] 128 neighbouring values share a scale, a power of two, which is stored as the
exponent of an fp32 number (one byte). A value is divided by the scale and rounded to fp16, and its
code is a part of these 16 bits: the sign, the lowest 3 bits of the exponent and the highest 4 of
the mantissa. So steps are proportional to values over 7 octaves, and linear below. A scale that is
a power of two does not change mantissas. So a value that was read back is rounded to itself, even
in a block with smaller values, and a checkpoint that is loaded in the same precision gives the same
bits.

[Note: roots] Of a second moment the root is stored. It needs half the octaves, and Adam divides by
it. A value that is not zero never becomes zero, because then Adam would divide by eps alone. Codes
have at most 5 bits of mantissa, so the square of a stored root is exact in fp32, and so is the root
of that square. For other values the root is rounded to nearest, as on a GPU. MKL's fp32 root, which
torch uses on a CPU, is sometimes an ulp off, so it is not used.

[Note: stochastic rounding] If the gradient vanishes, an exponential average with a decay of 0.999
shrinks by a thousandth in each step. That is less than half a step of bf16 or of 8 bits, so with
rounding to nearest it would never shrink. So second moments and bf16 main params are rounded up or
down at random, with a probability proportional to what is cut off. The random bits depend only on
the count of updates and on an element's place among all elements of its buffer, without padding. So
a run can be repeated bit for bit, and its results do not depend on ranks and buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_distopt.device import CPU

#: Mantissa bits and exponent bias of an fp32 number.
_FP32_MANTISSA_BITS, _FP32_BIAS = 23, 127
#: The exponent of a scale of NaN: all values of such a block are NaN.
_NAN_EXPONENT = 255
#: Smaller exponents are not used for scales, so that a scale and its inverse are normal numbers.
_LEAST_EXPONENT = 20
#: The bits of infinity as an integer; those of every NaN are larger.
_INFINITY_BITS = 0x7F800000
#: The bits of a code, which is a byte: its sign, and 3 bits of exponent with 4 of mantissa.
_SIGN, MAGNITUDE = 0x80, 0x7F
_MANTISSA_BITS = 4
#: Mantissa bits, exponent bias and sign bit of an fp16 number.
_FP16_MANTISSA_BITS, _FP16_BIAS, _FP16_SIGN = 10, 15, -0x8000
_CUT_BITS = _FP16_MANTISSA_BITS - _MANTISSA_BITS
_SIGN_SHIFT = 8  # between the signs of fp16 and of a code
_LAST_KEPT = 1 << _CUT_BITS
#: The fp16 exponent of the largest value of a block: the largest number of 3 bits.
_TOP = 7
#: The exponent of the largest value plus `_TO_SCALE` is that of the scale, and `_INVERSE` minus the
#: exponent of the largest value is that of the inverse of the scale.
_TO_SCALE = _FP16_BIAS - _TOP
_INVERSE = 2 * _FP32_BIAS - _TO_SCALE
#: The largest exponent of a scale, so that it and its inverse are normal; blocks with larger values
#: are NaN.
_LARGEST_EXPONENT = 2 * _FP32_BIAS - 16 + _TOP
_HALF_BITS = 16  # half the bits of an fp32 number
_POSITIVE = 0x7FFFFFFF  # all bits of an int32 except its sign
#: Odd numbers with well-mixed bits, to hash the place and the count of updates.
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
    """`encode` for the roots of values that are at least 0; does not overwrite the values. See
    [Note: roots]."""
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

    If a code would round the largest value up to the next octave, that octave is used, so that no
    value is rounded out of range.

    Args:
        largest: the largest absolute value of each block, fp32; it is overwritten.

    Returns:
        int32 in the shape of `largest`; `_NAN_EXPONENT` where `largest` is inf or NaN.
    """
    bits = largest.view(torch.int32).clamp_(max=_INFINITY_BITS)
    below_next_code = (1 << (_FP32_MANTISSA_BITS - _MANTISSA_BITS)) - 1
    exponents = (bits + below_next_code) >> _FP32_MANTISSA_BITS
    return exponents.clamp_(_LEAST_EXPONENT, _NAN_EXPONENT)


def _power_of_two(exponents: Tensor) -> Tensor:
    """fp32 powers of two from biased fp32 exponents, int32."""
    return (exponents << _FP32_MANTISSA_BITS).view(torch.float32)


def root_of(values: Tensor) -> Tensor:
    """The square root, rounded to nearest; see [Note: roots].

    On a CPU it is computed in float64. Even if that root is an ulp off, it rounds to the right fp32
    number: no root of an fp32 number is that close to the middle between two fp32 numbers.
    """
    if values.device.type != CPU:
        return values.sqrt()
    doubles = values.double()
    doubles.sqrt_()
    return doubles.float()


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds fp32 up or down at random, with int32 noise from 0 to 2**16 - 1. inf and NaN are not
    changed."""
    bits = values.view(torch.int32) + noise
    bits.bitwise_right_shift_(_HALF_BITS)
    upper = bits.to(torch.int16)
    rounded = upper.view(torch.bfloat16)
    special = values.to(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, special)


def random_bits(start: int, numel: int, count: Tensor) -> Tensor:
    """31 random bits for each of `numel` neighbouring elements, int32 [numel]. Equal arguments give
    equal bits.

    `count` is the number of updates, 0-D on the device of the result.
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
    """Shifts right and fills with zeros, as for unsigned numbers."""
    lowest = (1 << (32 - shift)) - 1
    shifted = bits >> shift
    return shifted.bitwise_and_(lowest)


def _signed(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    half = 1 << 31
    return (number + half) % (2 * half) - half
