"""Gradients as numbers of 8 bits, in which nodes send their sums to each other.

[Note: 8 bits] A block of 128 neighbouring elements has one scale, a power of two, in which its values are from -127 to
127. They are rounded up or down at random, by the place of the element, the step and the node: the expectation is the
sum, to 1/512 of a scale, and a run can be repeated. A block with inf or NaN arrives as NaN. A block of which an element
belongs to a param that is not rounded, or to two params, is sent in fp32, in the same message.

[Note: shuffled steps] What is added before rounding down is one of 256 steps from 0 to 1, each as often as any other in
a table of 65,536, which is read from a place that step and node decide at random: reading costs next to nothing.
Elements so many places apart share an entry of the table, another one in each step of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import torch
from torch import Tensor

from megatron_distopt.comm.pairwise import AsNumbers
from megatron_distopt.device import CPU
from megatron_distopt.layout.buckets import BLOCK_NUMEL, BufferLayout

#: Bits of fp32: of its mantissa, where its exponent counts from, and the exponent and the bits of infinity.
_MANTISSA, _BIAS, _NAN, _INF = 23, 127, 255, 0x7F800000
#: Of a code: bits of a number without its sign. Smaller exponents are not used for scales.
_BITS, _LEAST = 7, 20
#: Elements, so that what is computed on the way from values to codes stays in the cache.
_CACHED_NUMEL = 1024 * BLOCK_NUMEL
#: See [Note: shuffled steps], and a factor by which nodes differ.
_TABLE_BITS, _NODE_FACTOR = 16, 0x3D4D51CB


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
        self._runs, self._begin = runs, Random(step + node * _NODE_FACTOR).getrandbits(_TABLE_BITS)

    def nbytes(self, owner: int, chunk: slice) -> int:
        return sum(nbytes for *_, nbytes in self._parts(owner, chunk))

    def write(self, values: Tensor, owner: int, chunk: slice) -> Tensor:
        message: list[Tensor] = []
        for part, place, _ in self._parts(owner, chunk):
            if place is None:
                message.append(values[part].view(torch.uint8))
            else:
                start = (place + self._begin) % (1 << _TABLE_BITS)
                noise = _shuffled_steps(values.device)[start : start + part.stop - part.start]
                message += _encode(values[part].view(-1, BLOCK_NUMEL), noise.view(-1, BLOCK_NUMEL))
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
    """The exponents of scales, and codes, 1-D uint8, of fp32 values [blocks, 128]; by noise of this shape in [0, 1)."""
    largest = values.abs().amax(1).view(torch.int32).clamp_(max=_INF)
    # What lies above 127 counts as the next octave, so that nothing is rounded out of range.
    wide = ((largest + ((1 << (_MANTISSA - _BITS + 1)) - 1)) >> _MANTISSA).clamp_(_LEAST, _NAN)
    inverse = _power(_BIAS + _BIAS + _BITS - 1 - wide).unsqueeze(1)
    codes = torch.addcmul(noise, values, inverse).floor_().to(torch.int8)  # of NaN it has no meaning and is not read
    return wide.to(torch.uint8), codes.view(torch.uint8).view(-1)


def _decode(sent: Tensor, into: Tensor) -> None:
    """Writes the values of exponents and codes into fp32 [blocks, 128]."""
    exponents, codes = torch.split(sent, [len(into), into.numel()])
    wide = exponents.to(torch.int32)
    scales = _power(wide - (_BITS - 1)).masked_fill_(wide == _NAN, torch.nan)
    into.copy_(codes.view(torch.int8).view_as(into)).mul_(scales.unsqueeze(1))


@cache
def _shuffled_steps(device: torch.device) -> Tensor:
    """fp32, as many as a part needs from anywhere in the table; see [Note: shuffled steps]."""
    shuffled = torch.randperm(1 << _TABLE_BITS, generator=torch.Generator(CPU).manual_seed(_NODE_FACTOR), device=CPU)
    table = shuffled.remainder_(256).to(torch.float32).add_(0.5).mul_(1 / 256)
    return table.repeat(1 + -(-_CACHED_NUMEL // len(table))).to(device)


def _power(exponents: Tensor) -> Tensor:
    """fp32 powers of two from exponents as fp32 keeps them, int32."""
    return (exponents << _MANTISSA).view(torch.float32)
