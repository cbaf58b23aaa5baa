"""What ranks tell each other in every step, beside the gradient statistics and in the same all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HEAD_NUMEL", "Census", "CensusSums", "active_params"]

#: Rounds are told modulo this, so that sums of squares over thousands of ranks are exact in fp32 as well.
_MODULUS = 64
#: Numbers in front of the flags.
HEAD_NUMEL = 5


@dataclass(frozen=True)
class Census:
    """What one rank says.

    Args:
        round: of gradients, see `Grads.num_rounds`.
        complaints: things that have to be raised on all ranks.
        newcomers: params that were frozen or new, and have a gradient now.
        begun: modules whose buffers have begun to change.
        present: by param, whether this rank has a gradient of it.
        is_dropped: whether the round ends without a step.
    """

    round: int
    complaints: int
    newcomers: int
    begun: int
    present: Sequence[bool]
    is_dropped: bool = False

    def packed(self, like: Tensor) -> Tensor:
        """1-D, of the dtype and device of `like`; to be summed over ranks."""
        number = (2 * self.round + self.is_dropped) % _MODULUS
        head = [number, number**2, self.complaints, self.newcomers, self.begun]
        packed = torch.ones(HEAD_NUMEL + len(self.present), dtype=like.dtype, device=like.device)
        packed[:HEAD_NUMEL].copy_(torch.tensor(head, dtype=like.dtype), non_blocking=True)
        if not all(self.present):
            packed[HEAD_NUMEL:].copy_(torch.tensor(self.present, dtype=like.dtype))
        return packed


class CensusSums:
    """What all ranks said together.

    Args:
        head: the first `HEAD_NUMEL` sums of what `Census.packed` returned.
        num_ranks: that said it.
    """

    def __init__(self, head: Sequence[float], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._head = [int(value) for value in head]

    @property
    def is_one_round(self) -> bool:
        """Whether all ranks are in the same one: a mean of squares that is the square of the mean."""
        total, squares = self._head[:2]
        return self.num_ranks * squares == total**2

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
        """Whether there is nothing to be done beside the step."""
        return self.is_one_round and not any(self._head[2:])


def active_params(sums: Tensor) -> list[bool]:
    """By param, whether any rank has a gradient of it; waits for the device.

    Args:
        sums: of what `Census.packed` returned.
    """
    return [value > 0 for value in sums[HEAD_NUMEL:].tolist()]
