"""Gradients as numbers of 8 bits, in which nodes send their sums to each other.

[Note: 8 bits] A block of 128 neighbouring elements has one scale, a power of two, in which its values are from -127 to
127. They are rounded up or down at random, by the place of the element, the step and the node: the expectation is the
sum, to 1/512 of a scale, and a run can be repeated. A block with inf or NaN arrives as NaN. A block of which an element
belongs to a param that is not rounded, or to two params, is sent in fp32, in the same message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.buffers.random_bits import random_bytes
from megatron_distopt.comm.pairwise import AsNumbers
from megatron_distopt.layout.buckets import BLOCK_NUMEL, BufferLayout

#: Bits of fp32: of its mantissa, where its exponent counts from, and the exponent and the bits of infinity.
_MANTISSA, _BIAS, _NAN, _INF = 23, 127, 255, 0x7F800000
#: Of a code: bits of a number without its sign, and what is added to it. Smaller exponents are not used for scales.
_BITS, _OFFSET, _LEAST = 7, 128.0, 20
#: Elements, so that what is computed on the way from values to codes stays in the cache.
_CACHED_NUMEL = 1024 * BLOCK_NUMEL
#: An odd number, by which the random bits of nodes differ.
_NODE_FACTOR = 0x3D4D51CB


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring elements of a shard that are sent alike."""

    start: int
    stop: int
    place: int | None  # of the first one in the buffer without padding; None where they are sent in fp32


def runs_of(layout: BufferLayout, bucket: int, coded: frozenset[str]) -> list[list[Run]]:
    """By shard of a bucket, the runs that it consists of; `coded` are names of params that may be rounded, if any."""
    if not coded:
        return []
    own, numel = layout.buckets[bucket].in_buffer, layout.buckets[bucket].in_buffer.numel // layout.num_shards
    runs = [[Run(0, 0, None)] for _ in range(layout.num_shards)]
    for slot in (slot for slot in layout.slots_of_bucket[bucket] if slot.name in coded):
        for shard in layout.buckets[bucket].holders(slot.in_buffer, layout.num_shards):
            first, end = (each - own.start - shard * numel for each in (slot.in_buffer.start, slot.in_buffer.stop))
            start = -(-max(first, 0) // BLOCK_NUMEL) * BLOCK_NUMEL
            stop = min(end, numel) // BLOCK_NUMEL * BLOCK_NUMEL
            if start < stop:
                place = layout.places[slot.name] + start - first
                runs[shard] += [Run(runs[shard][-1].stop, start, None), Run(start, stop, place)]
    return [[*of_shard, Run(of_shard[-1].stop, numel, None)] for of_shard in runs]


class AsCodes(AsNumbers):
    """Sums as codes, see [Note: 8 bits]: run by run the exponents of scales and the codes, or values in fp32.

    `runs` are those of each owner; random bits differ by `step` and by the `node` that sends.
    """

    unit, rounds_own = BLOCK_NUMEL, True

    def __init__(self, runs: Sequence[Sequence[Run]], step: int, node: int) -> None:
        super().__init__(torch.int8)
        self._runs, self._count = runs, step + node * _NODE_FACTOR

    def nbytes(self, owner: int, chunk: slice) -> int:
        return sum(nbytes for *_, nbytes in self._parts(owner, chunk))

    def write(self, values: Tensor, owner: int, chunk: slice) -> Tensor:
        message: list[Tensor] = []
        for part, place, _ in self._parts(owner, chunk):
            if place is None:
                message.append(values[part].view(torch.uint8))
            else:
                noise = random_bytes(place, part.stop - part.start, self._count, values.device)
                message += _encode(values[part].view(-1, BLOCK_NUMEL), noise)
        return torch.cat(message)

    def read(self, message: Tensor, owner: int, chunk: slice) -> Tensor:
        parts = list(self._parts(owner, chunk))
        values = message.new_empty(chunk.stop - chunk.start, dtype=torch.float32)
        for (part, place, _), sent in zip(parts, torch.split(message, [each[2] for each in parts]), strict=True):
            if place is None:
                values[part].view(torch.uint8).copy_(sent)
            else:
                _decode(sent, values[part].view(-1, BLOCK_NUMEL))
        return values

    def _parts(self, owner: int, chunk: slice) -> Iterator[tuple[slice, int | None, int]]:
        """Slices of a chunk, which begins with a block; the places of their first elements; the bytes they take."""
        for run in self._runs[owner]:
            end = min(run.stop, chunk.stop)
            for start in range(max(run.start, chunk.start), end, _CACHED_NUMEL):
                numel = min(_CACHED_NUMEL, end - start)
                part = slice(start - chunk.start, start - chunk.start + numel)
                if run.place is None:
                    yield part, None, 4 * numel
                else:
                    yield part, run.place + start - run.start, numel + numel // BLOCK_NUMEL


def _encode(values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The exponents of scales, and codes, 1-D uint8, of fp32 values [blocks, 128]; by noise, uint8."""
    largest = values.abs().amax(1).view(torch.int32).clamp_(max=_INF)
    # What lies above 127 counts as the next octave, so that nothing is rounded out of range.
    wide = ((largest + ((1 << (_MANTISSA - _BITS + 1)) - 1)) >> _MANTISSA).clamp_(_LEAST, _NAN)
    inverse = _power(_BIAS + _BIAS + _BITS - 1 - wide).unsqueeze(1)
    # Positive numbers are cut off, which is rounding down; the conversion of NaN has no meaning and is not read.
    shifted = noise.to(torch.float32).add_(_OFFSET * 256 + 0.5).mul_(1 / 256)
    return wide.to(torch.uint8), shifted.addcmul_(values, inverse).to(torch.uint8).view(-1)


def _decode(sent: Tensor, into: Tensor) -> None:
    """Writes the values of exponents and codes into fp32 [blocks, 128]."""
    exponents, codes = torch.split(sent, [len(into), into.numel()])
    wide = exponents.to(torch.int32)
    scales = _power(wide - (_BITS - 1)).masked_fill_(wide == _NAN, torch.nan)
    torch.mul(into.copy_(codes.view_as(into)).sub_(_OFFSET), scales.unsqueeze(1), out=into)


def _power(exponents: Tensor) -> Tensor:
    """fp32 powers of two from exponents as fp32 keeps them, int32."""
    return (exponents << _MANTISSA).view(torch.float32)
