"""What ranks tell each other in every step, in the all-reduce of the gradient statistics."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["COMMON_NUMEL", "HEAD_NUMEL", "Census", "CensusSums", "active_params", "mark_of"]

#: Rounds are told modulo this, so that sums of squares over thousands of ranks are exact in fp32 as well.
_MODULUS = 64
#: Numbers that all ranks sum; the same with those that only ranks with the same params sum. Flags by param follow.
COMMON_NUMEL, HEAD_NUMEL = 5, 7


def mark_of(is_kept: Sequence[bool]) -> int:
    """A number below 64 that says which gradients were kept: 0 for none, and seldom the same for others."""
    return 1 + zlib.crc32(bytes(is_kept)) % (_MODULUS - 1) if any(is_kept) else 0


@dataclass(frozen=True)
class Census:
    """What one rank says.

    Args:
        round: of gradients, see `Grads.num_rounds`.
        complaints: things that have to be raised on all ranks.
        newcomers: params that were frozen or new, and have a gradient now.
        begun: modules whose buffers have begun to change.
        kept: which gradients of the round before it began with, see `mark_of`.
        present: by param, whether this rank has a gradient of it.
        is_dropped: whether the round ends without a step.
    """

    round: int
    complaints: int
    newcomers: int
    begun: int
    kept: int
    present: Sequence[bool]
    is_dropped: bool = False

    def packed(self, like: Tensor) -> Tensor:
        """1-D, of the dtype and device of `like`; to be summed over ranks."""
        number = (2 * self.round + self.is_dropped) % _MODULUS
        head = [number, number**2, self.complaints, self.newcomers, self.begun, self.kept, self.kept**2]
        return torch.tensor([*head, *self.present], dtype=like.dtype).to(like.device, non_blocking=True)


class CensusSums:
    """What all ranks said together.

    Args:
        head: the first `HEAD_NUMEL` sums of what `Census.packed` returned.
        num_ranks: that said it.
        num_sharing: of these that have the same params.
    """

    def __init__(self, head: Sequence[float], num_ranks: int, num_sharing: int) -> None:
        self.num_ranks, self.num_sharing = num_ranks, num_sharing
        self._head = [int(value) for value in head]

    @property
    def is_one_round(self) -> bool:
        """Whether all ranks are in the same one."""
        return _is_same(self._head[:2], self.num_ranks)

    @property
    def keeps_the_same(self) -> bool:
        """Whether all ranks have kept the same gradients."""
        return _is_same(self._head[COMMON_NUMEL:], self.num_sharing)

    @property
    def complaints(self) -> int:
        """Of all ranks."""
        return self._head[2]

    @property
    def newcomers(self) -> int:
        """Of all ranks."""
        return self._head[3]

    @property
    def begun(self) -> int:
        """Of all ranks."""
        return self._head[4]

    @property
    def is_usual(self) -> bool:
        """Whether nothing has to be done but the step."""
        return self.is_one_round and self.keeps_the_same and not any(self._head[2:COMMON_NUMEL])


def _is_same(sums: Sequence[int], number: int) -> bool:
    """Whether ranks have summed equal numbers, and their squares: a mean of squares is the square of the mean."""
    total, squares = sums
    return number * squares == total**2


def active_params(sums: Tensor) -> list[bool]:
    """By param, whether any rank has a gradient of it; waits for the device.

    Args:
        sums: of what `Census.packed` returned.
    """
    return [value > 0 for value in sums[HEAD_NUMEL:].tolist()]
