"""Gradients as numbers of 8 bits, in which nodes send their sums to each other.

[Note: 8 bits] A block of 128 neighbouring elements has one scale, a power of two, in which its
values are from -127 to
127. They are rounded up or down at random, by the place of the element, the step and the node: the
expectation is the sum, to 1/512 of a scale, and a run can be repeated. A block with inf or NaN
arrives as NaN. A block of which an element belongs to a param that is not rounded, or to two
params, is sent in fp32, in the same message.

[Note: shuffled steps] What is added before rounding down is one of 256 steps from 0 to 1, each as
often as any other in a table of 65,536, which is read from a place that step and node decide at
random: reading costs next to nothing. Elements so many places apart share an entry of the table,
another one in each step of training."""

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

#: Bits of fp32: of its mantissa, where its exponent counts from, and the exponent and the bits of
#: infinity.
_MANTISSA, _BIAS, _NAN, _INF = 23, 127, 255, 0x7F800000
#: Of a code: bits of a number without its sign. Smaller exponents are not used for scales.
_BITS, _LEAST = 7, 20
#: See [Note: shuffled steps]. One table less than there are is coded at a time: on a CPU one, in
#: its cache, on a device 64, so that launches do not take longest. A factor by which nodes differ.
_TABLE_NUMEL, _DEVICE_TABLES, _NODE_FACTOR = 65_536, 65, 0x3D4D51CB


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring elements of a shard that are sent alike."""

    start: int
    stop: int
    # of the first one in the buffer without padding; None where they are sent in fp32
    place: int | None


def runs_of(layout: BufferLayout, bucket: int, coded: frozenset[str]) -> list[list[Run]]:
    """By shard of a bucket, the runs that it consists of; `coded` are names of params that may be
    rounded, if any."""
    if not coded:
        return []
    own, numel = (
        layout.buckets[bucket].in_buffer,
        layout.buckets[bucket].in_buffer.numel // layout.num_shards,
    )
    runs = [[Run(0, 0, None)] for _ in range(layout.num_shards)]
    for slot in (slot for slot in layout.slots_of_bucket[bucket] if slot.name in coded):
        for shard in layout.buckets[bucket].holders(slot.in_buffer, layout.num_shards):
            first, end = (
                each - own.start - shard * numel
                for each in (slot.in_buffer.start, slot.in_buffer.stop)
            )
            start = -(-max(first, 0) // BLOCK_NUMEL) * BLOCK_NUMEL
            stop = min(end, numel) // BLOCK_NUMEL * BLOCK_NUMEL
            if start < stop:
                place = layout.places[slot.name] + start - first
                runs[shard] += [Run(runs[shard][-1].stop, start, None), Run(start, stop, place)]
    return [[*of_shard, Run(of_shard[-1].stop, numel, None)] for of_shard in runs]


class AsCodes(AsNumbers):
    """Sums as codes, see [Note: 8 bits]: run by run the exponents of scales and the codes, or
    values in fp32.

    `runs` are those of each owner; random bits differ by `step` and by the `node` that sends.
    """

    unit, rounds_own = BLOCK_NUMEL, True

    def __init__(self, runs: Sequence[Sequence[Run]], step: int, node: int) -> None:
        super().__init__(torch.int8)
        self._runs, self._begin = runs, Random(step + node * _NODE_FACTOR).randrange(_TABLE_NUMEL)

    def nbytes(self, owner: int, chunk: slice) -> int:
        return sum(nbytes for *_, nbytes in self._parts(owner, chunk))

    def write(self, values: Tensor, owner: int, chunk: slice) -> Tensor:
        message = values.new_empty(self.nbytes(owner, chunk), dtype=torch.uint8)
        for part, start, sent in self._pieces(message, owner, chunk):
            if start is None:
                sent.copy_(values[part].view(torch.uint8))
            else:
                exponents, codes = _exponents_and_codes(sent)
                exponents.copy_(_code(values[part].view_as(codes), start, codes))
        return message

    def read(self, message: Tensor, owner: int, chunk: slice) -> Tensor:
        values = message.new_empty(chunk.stop - chunk.start, dtype=torch.float32)
        for part, start, sent in self._pieces(message, owner, chunk):
            if start is None:
                values[part].view(torch.uint8).copy_(sent)
            else:
                exponents, codes = _exponents_and_codes(sent)
                torch.mul(
                    codes, _scales(exponents.to(torch.int32)), out=values[part].view_as(codes)
                )
        return values

    def _pieces(
        self, message: Tensor, owner: int, chunk: slice
    ) -> Iterator[tuple[slice, int | None, Tensor]]:
        """Slices of a chunk; where in the table their steps begin, None for fp32; their bytes of a
        message."""
        parts = list(self._parts(owner, chunk))
        pieces = torch.split(message, [nbytes for *_, nbytes in parts])
        return ((part, start, sent) for (part, start, _), sent in zip(parts, pieces, strict=True))

    def _parts(self, owner: int, chunk: slice) -> Iterator[tuple[slice, int | None, int]]:
        """Slices of a chunk, which begins with a block; where in the table their steps begin; the
        bytes they take."""
        for run in self._runs[owner]:
            first, end = max(run.start, chunk.start), min(run.stop, chunk.stop)
            part, numel = slice(first - chunk.start, end - chunk.start), end - first
            start = (
                None
                if run.place is None
                else (self._begin + run.place + first - run.start) % _TABLE_NUMEL
            )
            if numel > 0:
                yield part, start, 4 * numel if start is None else numel + numel // BLOCK_NUMEL


def _exponents_and_codes(sent: Tensor) -> tuple[Tensor, Tensor]:
    """Of bytes, uint8 [blocks, 1] and int8 [blocks, 128]."""
    num_blocks = len(sent) // (1 + BLOCK_NUMEL)
    exponents, codes = torch.split(sent, [num_blocks, num_blocks * BLOCK_NUMEL])
    return exponents.view(-1, 1), codes.view(torch.int8).view(-1, BLOCK_NUMEL)


def _code(values: Tensor, start: int, into: Tensor) -> Tensor:
    """Writes the codes of fp32 values [blocks, 128], with steps from there on; returns exponents,
    int32 [blocks, 1]."""
    steps = _shuffled_steps(values.device)[start : start - _TABLE_NUMEL].view(-1, BLOCK_NUMEL)
    parts = torch.split(values, len(steps))
    largest = (
        torch.cat([part.abs().amax(1, keepdim=True) for part in parts])
        .view(torch.int32)
        .clamp_(max=_INF)
    )
    # What lies above 127 counts as the next octave, so that nothing is rounded out of range.
    exponents = ((largest + ((1 << (_MANTISSA - _BITS + 1)) - 1)) >> _MANTISSA).clamp_(_LEAST, _NAN)
    factors = ((_BIAS + _BIAS + _BITS - 1 - exponents) << _MANTISSA).view(torch.float32)
    pieces = zip(
        parts, torch.split(factors, len(steps)), torch.split(into, len(steps)), strict=True
    )
    for part, factor, codes in pieces:  # codes of NaN have no meaning, and are not read
        codes.copy_(torch.addcmul(steps[: len(part)], part, factor).floor_())
    return exponents


def _scales(exponents: Tensor) -> Tensor:
    scales = ((exponents - (_BITS - 1)) << _MANTISSA).view(torch.float32)
    return scales.masked_fill_(exponents == _NAN, torch.nan)


@cache
def _shuffled_steps(device: torch.device) -> Tensor:
    """fp32, for a part of the values from anywhere in the table; see [Note: shuffled steps]."""
    shuffled = torch.randperm(
        _TABLE_NUMEL, generator=torch.Generator(CPU).manual_seed(_NODE_FACTOR), device=CPU
    )
    table = shuffled.remainder_(256).to(torch.float32).add_(0.5).mul_(1 / 256)
    return table.repeat(2 if device.type == "cpu" else _DEVICE_TABLES).to(device)
