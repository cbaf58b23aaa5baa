"""Whether grads of the step before are still in the grad buffers when the next ones are reduced.

[Note: used grads] After a step each rank's shard holds sums, which may be divided, and the rest of the buffer what
this rank alone has contributed. Gradients that are added to that make no sum of anything. The fork's training loop
zeroes the buffers before each step; its own optimizer uses them for params meanwhile. So the first and the last element
of each are made infinite after a step: whoever zeroes the buffer, by whatever call, takes that away, and whatever
finite is added to it does not. A test of them stays on the device, and what it finds is told to all ranks with the
statistics of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_distopt.errors import LayoutError, refusal


class UsedGrads:
    """See [Note: used grads].

    Args:
        grads: the grad buffers of this rank, 1-D.
        like: says the dtype and device of what `look` finds.
    """

    def __init__(self, grads: Sequence[Tensor], like: Tensor) -> None:
        self._grads = [grad for grad in grads if grad.numel() > 1]
        self._nothing = like.new_zeros(1)
        #: 1-D [1], above 0 where `look` found such grads.
        self.found = self._nothing.clone()

    @torch.no_grad()
    def mark(self) -> None:
        """The grads were used."""
        for grad in self._grads:
            grad[:1].fill_(math.inf)
            grad[-1:].fill_(-math.inf)

    @torch.no_grad()
    def look(self) -> None:
        """Before the grads of a step are reduced; the CPU does not wait."""
        used = [(grad[:1] == math.inf) & (grad[-1:] == -math.inf) for grad in self._grads]
        self.found = torch.cat(used).any().to(self._nothing.dtype).view(1) if used else self._nothing.clone()

    @staticmethod
    def check(found: Tensor) -> None:
        """Raises for what an earlier `look` has found; waits for the device.

        Raises:
            LayoutError
        """
        if found.item() > 0:
            got, rule = "added to those of the step before", "begin at zero in every step"
            remedy = (
                "Call zero_grad_buffer() of every model chunk, and optimizer.zero_grad(), before the first backward"
            )
            raise LayoutError(refusal("gradients", got, rule, remedy))
