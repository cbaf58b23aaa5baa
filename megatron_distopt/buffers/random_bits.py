"""Random numbers that are a function of an element and a count, so that what is rounded by them can be repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_distopt.layout.buckets import BLOCK_NUMEL

_COUNT_FACTOR = 0xC2B2AE35


def random_bits(start: int, numel: int, count: Tensor) -> Tensor:
    """31 random bits, int32 [numel], for neighbouring elements; the same whenever it is called with the same arguments.

    `count` is of updates, 0-D on the device of the result.
    """
    places = torch.arange(numel, dtype=torch.int32, device=count.device).add_(_signed(start))
    return _hashed(places, count.to(torch.int32) * _signed(_COUNT_FACTOR)).bitwise_and_(0x7FFFFFFF)


def random_bytes(start: int, numel: int, count: int, device: torch.device) -> Tensor:
    """8 random bits, uint8 [numel / 128, 128], for each element of neighbouring blocks, from the place of the block."""
    places = torch.arange(numel, dtype=torch.int32, device=device).view(-1, BLOCK_NUMEL)[:, : BLOCK_NUMEL // 4]
    return _hashed(places.add(_signed(start)), _signed(count * _COUNT_FACTOR)).view(torch.uint8)


def _hashed(places: Tensor, count: Tensor | int) -> Tensor:
    """32 random bits for each of `places`, int32, which is overwritten.

    Source: the constants of a 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
    """
    bits = places.mul_(_signed(0x9E3779B1)).add_(count)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    return bits.bitwise_xor_(_shifted(bits, 16))


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shifts zeros in from the left, as unsigned numbers are."""
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
