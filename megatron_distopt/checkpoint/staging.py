"""Memory that a background save copies the state into, so that training can go on.

[Note: waves] The buffer has two halves. While one is being written the other is filled, and as soon as the last part of
the state is copied training goes on. A state that fits into the buffer is copied at the speed of memory; a larger one
is copied in waves, each waiting for the half that it needs.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megatron_distopt.checkpoint.contribution import Written
from megatron_distopt.layout import Box

__all__ = ["Staging", "room_for", "split"]

#: Tensors of every dtype may begin there.
_ALIGNMENT_NBYTES = 64


@dataclass(frozen=True)
class _Wave:
    """Tensors in the buffer, and the halves that are free again once they are written."""

    halves: tuple[int, ...]
    tensors: list[Written]


class Staging:
    """A buffer of a fixed size that one thread fills and another empties, see [Note: waves].

    Args:
        nbytes: of the whole buffer, rounded up.
        pinned: whether a device copies into it.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._half_nbytes = _aligned(max(-(-nbytes // 2), 1))
        self._memory = torch.empty(2 * self._half_nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._memory.fill_(0)  # a page costs its time when it is touched first: now, and not in every save
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (0, 1):
            self._free.put(number)
        self._waves: queue.SimpleQueue[_Wave | BaseException | None] = queue.SimpleQueue()
        self._is_discarded = False

    @property
    def nbytes(self) -> int:
        """Of the whole buffer."""
        return 2 * self._half_nbytes

    def fill(self, tensors: Sequence[Written]) -> None:
        """Copies everything; returns as soon as the last tensor is in the buffer, or nobody empties it any more.

        Args:
            tensors: of the live state.

        Raises:
            Exception: a copy failed; `drain` raises it, too.
        """
        fits = room_for(tensors) <= self.nbytes
        try:
            for wave in [list(tensors)] if fits else self._in_waves(tensors):
                halves = tuple(self._free.get() for _ in range(2 if fits else 1))
                if self._is_discarded:
                    return
                self._waves.put(_Wave(halves, list(self._copied(wave, min(halves) * self._half_nbytes))))
        except BaseException as error:
            self._waves.put(error)
            raise
        self._waves.put(None)

    def _in_waves(self, tensors: Sequence[Written]) -> Iterator[list[Written]]:
        """Each fits into a half."""
        wave: list[Written] = []
        left_nbytes = self._half_nbytes
        for each in (part for whole in tensors for part in split(whole, self._half_nbytes)):
            nbytes = room_for([each])
            if nbytes > left_nbytes:
                yield wave
                wave, left_nbytes = [], self._half_nbytes
            wave.append(each)
            left_nbytes -= nbytes
        yield wave

    def _copied(self, tensors: Iterable[Written], start: int) -> Iterator[Written]:
        for each in tensors:
            flat = self._memory[start : start + _nbytes(each.tensor)].view(each.tensor.dtype)
            yield replace(each, tensor=flat.view(each.tensor.shape).copy_(each.tensor))
            start += _aligned(_nbytes(each.tensor))

    def drain(self) -> Iterator[Written]:
        """What was copied, in order, until all is given out; memory is free again when its last tensor was taken.

        To be gone through to its end, or `discard` must follow: a thread that fills would wait for ever.

        Raises:
            Exception: the thread that fills could not copy.
        """
        while (wave := self._waves.get()) is not None:
            if isinstance(wave, BaseException):
                raise wave
            yield from wave.tensors
            for half in wave.halves:
                self._free.put(half)

    def discard(self) -> None:
        """Lets a thread that fills return, now or later, where nobody writes any more. Drop the buffer afterwards."""
        self._is_discarded = True
        for half in (0, 1):  # it may wait for one, or for both
            self._free.put(half)


def room_for(tensors: Iterable[Written]) -> int:
    """Bytes of a buffer that holds all of them at once."""
    return sum(_aligned(_nbytes(each.tensor)) for each in tensors)


def split(written: Written, most_nbytes: int) -> Iterator[Written]:
    """The same elements in boxes of at most so many bytes.

    Args:
        written: one tensor.
        most_nbytes: at least one element.
    """
    shape = tuple(written.tensor.shape)
    if _nbytes(written.tensor) <= most_nbytes:
        yield written
        return
    dim = next(dim for dim, numel in enumerate(shape) if numel > 1)
    row_nbytes = prod(shape[dim + 1 :]) * written.tensor.element_size()
    step = max(most_nbytes // row_nbytes, 1)
    for start in range(0, shape[dim], step):
        numel = min(step, shape[dim] - start)
        offsets, sizes = list(written.box.offsets), list(written.box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, numel
        box = Box(tuple(offsets), tuple(sizes))
        yield from split(replace(written, box=box, tensor=written.tensor.narrow(dim, start, numel)), most_nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
