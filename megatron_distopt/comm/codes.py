"""Gradients as numbers of 8 bits, in which nodes send their sums to each other.

[Note: 8 bits] A block of 128 neighbouring elements has one scale, a power of two, in which its
values are from -127 to 127. They are rounded up or down at random, by the place of the element, the
step and the node: the expectation is the sum, to 1/512 of a scale, and a run can be repeated. A
block with inf or NaN arrives as NaN. A block with elements of a param that is not rounded, or of
two params, is sent in fp32, in the same message.

[Note: shuffled steps] Rounding up or down at random is rounding down after a random step from 0 to
1 was added. The steps are read from a table of 65,536, in which each of 256 steps occurs equally
often, from an offset that depends on the step of the training and on the node. Reading costs next
to nothing. Elements whose distance is a multiple of the table's length share a step, another one in
each step of the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import torch
from torch import Tensor

from megatron_distopt.buffers.blocks import EXPONENT_BIAS, NAN_EXPONENT, exponents_of, power_of_two
from megatron_distopt.comm.pairwise import AsNumbers
from megatron_distopt.device import CPU
from megatron_distopt.layout.buckets import BLOCK_NUMEL, BufferLayout

#: Bits of a code after its sign and its first bit, which every code of the largest octave has.
_MANTISSA_BITS = 6
#: Elements of the table, see [Note: shuffled steps], and of how many different steps.
_TABLE_NUMEL, _NUM_STEPS = 65_536, 256
#: So many tables are coded at a time, less one: on a CPU one, which stays in its cache; on a device
#: 64, where launches would take longest.
_CPU_TABLES, _DEVICE_TABLES = 2, 65
#: By which the offsets of nodes differ; also the seed of the table.
_NODE_FACTOR = 0x3D4D51CB
_FP32_NBYTES = 4


@dataclass(frozen=True, slots=True)
class SentStretch:
    """Neighbouring elements of a shard that are sent alike."""

    start: int  # in the shard
    stop: int
    # of its first element in the buffer without padding; None where the stretch is sent in fp32
    place: int | None


def stretches_of(
    layout: BufferLayout, bucket: int, coded: frozenset[str]
) -> list[list[SentStretch]]:
    """By shard of a bucket, the stretches that it consists of.

    Args:
        layout: of the grad buffer.
        bucket: its number.
        coded: names of the params that may be rounded; without any the result is empty.
    """
    if not coded:
        return []
    in_buffer = layout.buckets[bucket].in_buffer
    shard_numel = in_buffer.numel // layout.num_shards
    of_shards = [[SentStretch(0, 0, None)] for _ in range(layout.num_shards)]
    for slot in layout.slots_of_bucket[bucket]:
        if slot.name not in coded:
            continue
        for shard in layout.buckets[bucket].holders(slot.in_buffer, layout.num_shards):
            shard_start = in_buffer.start + shard * shard_numel
            first = slot.in_buffer.start - shard_start  # may lie before the shard
            end = slot.in_buffer.stop - shard_start  # or behind it
            # Whole blocks of this param alone.
            start = -(-max(first, 0) // BLOCK_NUMEL) * BLOCK_NUMEL
            stop = min(end, shard_numel) // BLOCK_NUMEL * BLOCK_NUMEL
            if start < stop:
                stretches = of_shards[shard]
                stretches.append(SentStretch(stretches[-1].stop, start, None))
                stretches.append(SentStretch(start, stop, layout.places[slot.name] + start - first))
    for stretches in of_shards:
        stretches.append(SentStretch(stretches[-1].stop, shard_numel, None))
    return of_shards


@dataclass(frozen=True, slots=True)
class _Part:
    """What lies of a stretch in one chunk."""

    in_chunk: slice
    offset: int | None  # of its steps in the table; None where it is sent in fp32

    @property
    def numel(self) -> int:
        return int(self.in_chunk.stop - self.in_chunk.start)

    @property
    def nbytes(self) -> int:
        """Of its message: an exponent for each block and a code for each element, or fp32."""
        if self.offset is None:
            return _FP32_NBYTES * self.numel
        return self.numel + self.numel // BLOCK_NUMEL


class AsCodes(AsNumbers):
    """Sums as codes, see [Note: 8 bits]: stretch by stretch the exponents of scales and the codes,
    or values in fp32.

    Args:
        stretches: of the shard of each owner.
        step: of the training.
        node: that sends.
    """

    unit, rounds_own = BLOCK_NUMEL, True

    def __init__(self, stretches: Sequence[Sequence[SentStretch]], step: int, node: int) -> None:
        super().__init__(torch.int8)
        self._stretches = stretches
        random = Random(step + node * _NODE_FACTOR)
        self._offset = random.randrange(_TABLE_NUMEL)

    def nbytes(self, owner: int, chunk: slice) -> int:
        return sum(part.nbytes for part in self._parts(owner, chunk))

    def write(self, values: Tensor, owner: int, chunk: slice) -> Tensor:
        message = values.new_empty(self.nbytes(owner, chunk), dtype=torch.uint8)
        for part, sent in self._pieces(message, owner, chunk):
            if part.offset is None:
                sent.copy_(values[part.in_chunk].view(torch.uint8))
            else:
                exponents, codes = _exponents_and_codes(sent)
                of_part = values[part.in_chunk].view_as(codes)
                exponents.copy_(_encode(of_part, part.offset, codes))
        return message

    def read(self, message: Tensor, owner: int, chunk: slice) -> Tensor:
        values = message.new_empty(chunk.stop - chunk.start, dtype=torch.float32)
        for part, sent in self._pieces(message, owner, chunk):
            if part.offset is None:
                values[part.in_chunk].view(torch.uint8).copy_(sent)
            else:
                exponents, codes = _exponents_and_codes(sent)
                into = values[part.in_chunk].view_as(codes)
                torch.mul(codes, _scales(exponents.to(torch.int32)), out=into)
        return values

    def _pieces(self, message: Tensor, owner: int, chunk: slice) -> Iterator[tuple[_Part, Tensor]]:
        """The parts of a chunk, each with its bytes of the message."""
        parts = self._parts(owner, chunk)
        pieces = torch.split(message, [part.nbytes for part in parts])
        return zip(parts, pieces, strict=True)

    def _parts(self, owner: int, chunk: slice) -> list[_Part]:
        """Of a chunk, which begins with a block."""
        parts = []
        for stretch in self._stretches[owner]:
            first = max(stretch.start, chunk.start)
            end = min(stretch.stop, chunk.stop)
            if first >= end:
                continue
            offset = None
            if stretch.place is not None:
                offset = (self._offset + stretch.place + first - stretch.start) % _TABLE_NUMEL
            parts.append(_Part(slice(first - chunk.start, end - chunk.start), offset))
        return parts


def _exponents_and_codes(sent: Tensor) -> tuple[Tensor, Tensor]:
    """Of bytes, uint8 [blocks, 1] and int8 [blocks, 128]."""
    num_blocks = len(sent) // (1 + BLOCK_NUMEL)
    exponents = sent[:num_blocks].view(-1, 1)
    codes = sent[num_blocks:].view(torch.int8)
    return exponents, codes.view(-1, BLOCK_NUMEL)


def _encode(values: Tensor, offset: int, into: Tensor) -> Tensor:
    """Writes the codes of fp32 values [blocks, 128] and returns the exponents, int32 [blocks, 1].

    Args:
        values: of whole blocks.
        offset: of their steps in the table.
        into: int8 [blocks, 128].
    """
    table = _shuffled_steps(values.device)
    steps = table[offset : offset - _TABLE_NUMEL].view(-1, BLOCK_NUMEL)
    parts = torch.split(values, len(steps))
    largest = torch.cat([part.abs().amax(1, keepdim=True) for part in parts])
    exponents = exponents_of(largest, _MANTISSA_BITS)
    factors = power_of_two(2 * EXPONENT_BIAS + _MANTISSA_BITS - exponents)
    start = 0
    for part in parts:
        end = start + len(part)
        # Codes of NaN have no meaning, and are not read.
        codes = torch.addcmul(steps[: len(part)], part, factors[start:end])
        into[start:end] = codes.floor_()
        start = end
    return exponents


def _scales(exponents: Tensor) -> Tensor:
    scales = power_of_two(exponents - _MANTISSA_BITS)
    return scales.masked_fill_(exponents == NAN_EXPONENT, torch.nan)


@cache
def _shuffled_steps(device: torch.device) -> Tensor:
    """fp32, for a part of the values from anywhere in the table; see [Note: shuffled steps]."""
    generator = torch.Generator(CPU).manual_seed(_NODE_FACTOR)
    shuffled = torch.randperm(_TABLE_NUMEL, generator=generator, device=CPU)
    steps = shuffled.remainder_(_NUM_STEPS).to(torch.float32)
    table = steps.add_(0.5).mul_(1 / _NUM_STEPS)
    num_tables = _CPU_TABLES if device.type == CPU else _DEVICE_TABLES
    return table.repeat(num_tables).to(device)
