"""torch's fused Adam on a CPU, block by block: a main param is rounded and averaged while it is
still in the cache.

[Note: blocks] Rounding in a sweep of its own reads every main param from memory once more: 4 of 38
or 42 bytes an element. Here the same kernel gets a block at a time, and the block is rounded and
averaged before the next one. A block is cut at multiples of what the kernel's vectors hold, so
every bit is as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_distopt.optimizer.inner import FlatOptimizer

#: Elements of a block for each thread: a smaller one costs more in calls than it saves, a larger
#: one leaves the cache.
_BLOCK_NUMEL = 1 << 20

#: What the blocks leave to torch.
_UNUSUAL = ("amsgrad", "capturable", "differentiable", "maximize")


class _AdamArgs(NamedTuple):
    """A stretch of one main param with what belongs to it; all but `step` are 1-D and as long as
    `main`."""

    main: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    step: Tensor
    model: Tensor | None
    average: Tensor | None

    def cut(self, numel: int) -> Iterator[_AdamArgs]:
        """Pieces of at most `numel` elements."""
        if self.main.numel() <= numel:
            yield self
            return
        parts = [
            repeat(tensor) if tensor is None or tensor.dim() == 0 else torch.split(tensor, numel)
            for tensor in self
        ]
        yield from map(_AdamArgs._make, zip(*parts, strict=False))


class _InBlocks(FlatOptimizer):
    """Mixed into one of torch's fused optimizers: rounds the main params in the sweep that updates
    them."""

    rounds_itself = reads_tensors = True
    _kernel: Callable[..., None]
    _is_decoupled: bool  # what the kernel does; a param group may ask for the other

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """As torch's, then the rounding; in blocks from the second step on, when all state is
        there."""
        pieces = self._pieces(
            {id(main): main.grad for group in self.param_groups for main in group["params"]}
        )
        if pieces is not None:
            self._update(
                pieces, getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            )
            return
        super().step()
        for main, model in self._models.items():
            if main.grad is not None:
                model.copy_(main)

    def update_with(
        self,
        mains: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        divisor: float | Tensor,
        found_inf: Tensor | None,
    ) -> bool:
        """`step` with gradients as values, which `inner.update_mains` describes.

        For a small model, what torch does around the kernel (the profiler's range, hooks, grouping
        of tensors by device) takes longer than the kernel itself. False where nothing was done,
        because torch's own `step` has to make the state, or does more than this.
        """
        pieces = self._pieces({id(main): grad for main, grad in zip(mains, grads, strict=True)})
        if pieces is None:
            return False
        if isinstance(divisor, Tensor):
            scale: Tensor | None = divisor
        else:
            scale = None if divisor == 1.0 else torch.full((), divisor, dtype=torch.float32)
        self._update(pieces, scale, found_inf)
        return True

    def _pieces(self, grad_of: Mapping[int, Tensor | None]) -> list[list[_AdamArgs]] | None:
        """By param group, all main params that have a gradient; None where torch's own `step` is
        needed."""
        pieces = []
        for group in self.param_groups:
            is_as_built = (
                group.get("decoupled_weight_decay", self._is_decoupled) == self._is_decoupled
            )
            if not is_as_built or any(group[option] for option in _UNUSUAL):
                return None
            of_group = []
            for main in group["params"]:
                grad = grad_of.get(id(main))
                if grad is not None:
                    state = self.state.get(main)
                    if not state:
                        return None
                    moments = state["exp_avg"], state["exp_avg_sq"], state["step"]
                    of_group.append(
                        _AdamArgs(
                            main, grad, *moments, self._models.get(main), self.due[0].get(main)
                        )
                    )
            pieces.append(of_group)
        return pieces

    def _update(
        self,
        pieces: Sequence[Sequence[_AdamArgs]],
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        numel = _BLOCK_NUMEL * torch.get_num_threads()
        for group, whole in zip(self.param_groups, pieces, strict=True):
            if not whole:
                continue
            options = {
                key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")
            }
            options["beta1"], options["beta2"] = group["betas"]
            steps = [piece.step for piece in whole]
            torch._foreach_add_(steps, 1)
            for block in _blocks(whole, numel):
                mains, grads, firsts, seconds, counts, models, averages = map(
                    list, zip(*block, strict=True)
                )
                given = {"grad_scale": divisor, "found_inf": found_inf}
                type(self)._kernel(mains, grads, firsts, seconds, [], counts, **options, **given)
                for main, model, average in zip(mains, models, averages, strict=True):
                    if model is not None:
                        model.copy_(main)
                    if average is not None:
                        average.lerp_(main, self.due[1])
            for piece in whole:
                self.due[0].pop(piece.main, None)
            if found_inf is not None:
                torch._foreach_sub_(steps, [found_inf] * len(steps))


class AdamW(_InBlocks, torch.optim.AdamW):
    """torch's AdamW(fused=True) in blocks; what its name says to others stays true."""

    _kernel = staticmethod(torch._fused_adamw_)
    _is_decoupled = True


class Adam(_InBlocks, torch.optim.Adam):
    """torch's Adam(fused=True) in blocks."""

    _kernel = staticmethod(torch._fused_adam_)
    _is_decoupled = False


def _blocks(whole: Iterable[_AdamArgs], numel: int) -> Iterator[list[_AdamArgs]]:
    """Cuts large main params and puts small ones together: at least `numel` elements for one call
    of the kernel."""
    block, block_numel = list[_AdamArgs](), 0
    for piece in (part for main in whole for part in main.cut(numel)):
        block.append(piece)
        block_numel += piece.main.numel()
        if block_numel >= numel:
            yield block
            block, block_numel = [], 0
    if block:
        yield block
