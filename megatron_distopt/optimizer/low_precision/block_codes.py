"""Numbers in 8 and 16 bits: how a block of fp32 values is rounded to codes and one scale, and read
back.

[Note: block codes] 128 neighbouring values have one scale, a power of two, which is kept as the
exponent of an fp32 number (one byte). A value is divided by the scale, rounded to fp16, and the
code is a part of its 16 bits: the sign, the lowest bits of its exponent and the highest of its
mantissa. So steps are proportional to values over many octaves, and linear below. A power of two
leaves mantissas as they are. What was read back is therefore rounded to itself, in a block with
smaller values as well, and a checkpoint that is loaded in the same precision gives the same bits.

[Note: roots] Of a second moment the root is kept. It needs half the octaves, and is what Adam
divides by. A value that is not zero never becomes zero, because Adam would divide by eps alone.
Codes have 11 bits of mantissa at most, so the square of a root is exact in fp32, and so is the root
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

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.device import CPU

#: Bits of fp32: of its mantissa, of the smaller half of a word, and where its exponent counts from.
_MANTISSA, _HALF, _BIAS = 23, 16, 127
#: The exponent of a scale of NaN: all values of such a block are NaN.
_NAN = 255
#: Smaller exponents are not used for scales, so that a scale and its inverse are normal numbers.
_LEAST = 20
#: The bits of infinity; those of every NaN are more.
_INF = 0x7F800000
_SIGN16, _MAGNITUDE8 = -0x8000, 0x7F


@dataclass(frozen=True)
class BlockCode:
    """How a value that was divided by the scale of its block becomes a code."""

    name: str  # as an option has it
    storage: torch.dtype  # of the codes
    shift: int  # how many of the lowest bits of fp16 are cut off
    top: int  # the exponent, as fp16 keeps it, that the largest value of a block gets

    @property
    def has_short_exponent(self) -> bool:
        """Whether bits between the sign and the exponent are left out as well."""
        return self.storage is torch.uint8 and self.shift < 8

    @property
    def largest(self) -> int:
        """The largest exponent of a scale, so that it and its inverse are normal; blocks with
        larger values are NaN."""
        return 2 * _BIAS - 16 + self.top


#: By the name of the option: 5 + 10, 5 + 2, 4 + 3 and 3 + 4 bits of exponent and mantissa.
CODES = {
    code.name: code
    for code in (
        BlockCode("float16", torch.int16, 0, 29),
        BlockCode("float8_e5m2", torch.uint8, 8, 29),
        BlockCode("float8_e4m3fn", torch.uint8, 7, 14),
        BlockCode("int8", torch.uint8, 6, 7),
    )
}


def encode(values: Tensor, code: BlockCode, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rounds fp32 values [blocks, 128], which are overwritten, to codes of that shape and exponents
    uint8 [blocks].

    `noise` is int16 of the same shape with random bits, to round at random; None to round to
    nearest.
    """
    largest = values.abs().amax(1).view(torch.int32).clamp_(max=_INF)
    # What lies above the largest code of an octave counts as the next octave, so that nothing is
    # rounded out of range.
    exponents = (largest + ((1 << (_MANTISSA - 10 + code.shift)) - 1)) >> _MANTISSA
    exponents = exponents.clamp_(_LEAST, _NAN)
    exponents = exponents.masked_fill_(exponents > code.largest, _NAN)
    values.mul_(_power(code.top - 15 + _BIAS + _BIAS - exponents.clamp(max=_NAN - 1)).unsqueeze(1))
    bits = values.to(torch.float16).view(torch.int16)
    if code.shift:
        last = 1 << code.shift
        bits.add_(last >> 1 if noise is None else noise.bitwise_and(last - 1)).bitwise_right_shift_(
            code.shift
        )
        if code.has_short_exponent:
            bits = (bits & _MAGNITUDE8).bitwise_or_((bits >> 8).bitwise_and_(-0x80))
    return bits.to(code.storage), exponents.to(torch.uint8)


def root_of(values: Tensor) -> Tensor:
    """The square root, rounded to nearest; see [Note: roots].

    A root in float64 that is an ulp off still rounds to the right fp32 number: no root of an fp32
    number is so near to the middle of two others.
    """
    return values.double().sqrt_().float() if values.device.type == CPU else values.sqrt()


def decode(codes: Tensor, exponents: Tensor, code: BlockCode) -> Tensor:
    """The fp32 values [blocks, 128] of what `encode` returned."""
    bits = codes.to(torch.int16)
    if code.has_short_exponent:
        bits = (
            (bits << 8)
            .bitwise_and_(_SIGN16)
            .bitwise_or_((bits & _MAGNITUDE8).bitwise_left_shift_(code.shift))
        )
    elif code.shift:
        bits.bitwise_left_shift_(code.shift)
    wide = exponents.to(torch.int32)
    scales = _power(wide + (15 - code.top)).masked_fill_(wide == _NAN, torch.nan)
    return bits.view(torch.float16).to(torch.float32).mul_(scales.unsqueeze(1))


def _power(exponents: Tensor) -> Tensor:
    """fp32 powers of two from exponents as fp32 keeps them, int32."""
    return (exponents << _MANTISSA).view(torch.float32)


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds fp32 up or down at random, by int32 noise from 0 to 2**16 - 1; inf and NaN stay."""
    bits = values.view(torch.int32)
    rounded = ((bits + noise) >> _HALF).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


def random_bits(start: int, numel: int, count: Tensor) -> Tensor:
    """31 random bits, int32 [numel], for neighbouring elements; the same whenever it is called with
    the same arguments.

    `count` is of updates, 0-D on the device of the result.
    Source: the constants of a 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
    """
    bits = torch.arange(numel, dtype=torch.int32, device=count.device).add_(_signed(start))
    bits.mul_(_signed(0x9E3779B1)).add_(count.to(torch.int32) * _signed(0xC2B2AE35))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    return bits.bitwise_xor_(_shifted(bits, 16)).bitwise_and_(0x7FFFFFFF)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shifts zeros in from the left, as unsigned numbers are."""
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
