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

from megatron_distopt.buffers.blocks import EXPONENT_BIAS, NAN_EXPONENT, exponents_of, power_of_two
from megatron_distopt.device import CPU

_HALF_BITS = 16  # of an fp32 number
#: Of a code of 16 bits its sign, and of one of 8 bits all but its sign.
_SIGN16, _MAGNITUDE8 = -0x8000, 0x7F
#: fp16 has so many bits of mantissa, and its exponents count from there.
_FP16_MANTISSA_BITS, _FP16_BIAS = 10, 15


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
        return 2 * EXPONENT_BIAS - 16 + self.top


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
    exponents = exponents_of(values.abs().amax(1), _FP16_MANTISSA_BITS - code.shift)
    exponents = exponents.masked_fill_(exponents > code.largest, NAN_EXPONENT)
    finite = exponents.clamp(max=NAN_EXPONENT - 1)
    factors = power_of_two(code.top - _FP16_BIAS + 2 * EXPONENT_BIAS - finite)
    bits = values.mul_(factors.unsqueeze(1)).to(torch.float16).view(torch.int16)
    if code.shift:
        last = 1 << code.shift
        bits.add_(last >> 1 if noise is None else noise.bitwise_and(last - 1))
        bits.bitwise_right_shift_(code.shift)
        if code.has_short_exponent:
            sign = (bits >> 8).bitwise_and_(-0x80)
            bits = (bits & _MAGNITUDE8).bitwise_or_(sign)
    return bits.to(code.storage), exponents.to(torch.uint8)


def root_of(values: Tensor) -> Tensor:
    """The square root, rounded to nearest; see [Note: roots].

    A root in float64 that is an ulp off still rounds to the right fp32 number: no root of an fp32
    number is so near to the middle of two others.
    """
    if values.device.type == CPU:
        return values.double().sqrt_().float()
    return values.sqrt()


def decode(codes: Tensor, exponents: Tensor, code: BlockCode) -> Tensor:
    """The fp32 values [blocks, 128] of what `encode` returned."""
    bits = codes.to(torch.int16)
    if code.has_short_exponent:
        magnitude = (bits & _MAGNITUDE8).bitwise_left_shift_(code.shift)
        bits = (bits << 8).bitwise_and_(_SIGN16).bitwise_or_(magnitude)
    elif code.shift:
        bits.bitwise_left_shift_(code.shift)
    wide = exponents.to(torch.int32)
    scales = power_of_two(wide + (_FP16_BIAS - code.top))
    scales = scales.masked_fill_(wide == NAN_EXPONENT, torch.nan)
    return bits.view(torch.float16).to(torch.float32).mul_(scales.unsqueeze(1))


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds fp32 up or down at random, by int32 noise from 0 to 2**16 - 1; inf and NaN stay."""
    bits = values.view(torch.int32)
    rounded = ((bits + noise) >> _HALF_BITS).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


def random_bits(start: int, numel: int, count: Tensor) -> Tensor:
    """31 random bits, int32 [numel], for neighbouring elements; the same whenever it is called with
    the same arguments.

    `count` is of updates, 0-D on the device of the result.
    Source: the constants of a 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
    """
    bits = torch.arange(numel, dtype=torch.int32, device=count.device).add_(_signed(start))
    bits.mul_(_signed(0x9E3779B1))
    bits.add_(count.to(torch.int32) * _signed(0xC2B2AE35))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits.bitwise_xor_(_shifted(bits, shift))
        bits.mul_(_signed(factor))
    bits.bitwise_xor_(_shifted(bits, 16))
    return bits.bitwise_and_(0x7FFFFFFF)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shifts zeros in from the left, as unsigned numbers are."""
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
