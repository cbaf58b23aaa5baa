"""The forms of one flat param's state during an update, and how computed values are rounded into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.optimizer.kept import Blocks, Kept, Remainder
from megatron_distopt.optimizer.native import Out, memory, random_bits


@dataclass(frozen=True, eq=False)
class Forms:
    """A flat param that is updated in this step.

    Args:
        number: among all of them, for random bits.
        group: index of its param group.
        main, first, second: the forms of its state.
        grad: fp32 1-D.
        step: its count of updates.
        model: what the main param is rounded into, if it does not write it by itself.
    """

    number: int
    group: int
    main: Kept
    first: Kept
    second: Kept
    grad: Tensor
    step: Tensor
    model: Tensor | None

    @property
    def device(self) -> torch.device:
        """Where it is updated."""
        return self.grad.device

    @property
    def kepts(self) -> tuple[Kept, Kept, Kept]:
        """Those of main param and moments."""
        return self.main, self.first, self.second

    @property
    def phases(self) -> frozenset[int]:
        """Values of the first block that belong to others, of each form in blocks; more than one has no kernel."""
        return frozenset(kept.phase for kept in self.kepts if isinstance(kept, Blocks))

    @property
    def rounded(self) -> Tensor | None:
        """The model param that an update writes, if any."""
        return self.main.model if isinstance(self.main, Remainder) else self.model

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the state, and the model param."""
        parts = [part for kept in self.kepts for part in kept.parts]
        return parts if self.rounded is None else [*parts, self.rounded]

    @property
    def is_rounded_at_random(self) -> bool:
        """Whether anything of it is."""
        return self.main.is_rounded_at_random or self.second.is_rounded_at_random

    def write(self, start: int, stop: int, main: Tensor, first: Tensor, second: Tensor, out: Out = memory) -> None:
        """Rounds some values into the forms, and those of the main param into the model param.

        Args:
            start, stop: which.
            main, first, second: fp32 [stop - start]; may be overwritten.
            out: see `Kept.read`.
        """
        noise = None
        if self.is_rounded_at_random:
            noise = random_bits(start, stop - start, self.step.to(self.device), self.number, out)
        _update(self.first, start, stop, first, None)
        _update(self.second, start, stop, second, noise)  # before the main param, which may write its signs
        _update(self.main, start, stop, main, None if noise is None else noise.bitwise_right_shift_(15))
        if self.model is not None:
            # What is kept is rounded, not what was computed, so that a checkpoint gives the same model param.
            self.model[start:stop].copy_(self.main.read(start, stop, out))


def _update(kept: Kept, start: int, stop: int, values: Tensor, noise: Tensor | None) -> None:
    if not kept.is_read_in_place:
        kept.update(start, stop, values, noise if kept.is_rounded_at_random else None)
