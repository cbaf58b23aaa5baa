"""torch's fused Adam on a CPU, block by block, so that a main param is rounded while it is still in the cache.

[Note: blocks] Rounding in a sweep of its own reads every main param from memory once more: 4 of 38 or 42 bytes an
element. Here the same kernel gets a block at a time, and the block is rounded before the next one. A block is cut at
multiples of what the kernel's vectors hold, so every bit is as without (tests/optimizer/test_blocked_adam.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.optimizer.inner import RoundsItself

#: Elements of a block for each thread: a smaller one costs more in calls than it saves, a larger one leaves the cache.
_BLOCK_NUMEL = 1 << 19

#: What the blocks leave to torch.
_UNUSUAL = ("amsgrad", "capturable", "differentiable", "maximize")


class _Piece(NamedTuple):
    """A stretch of one main param with what belongs to it; all but `step` are 1-D and as long as `main`."""

    main: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    step: Tensor
    model: Tensor | None


class _InBlocks(RoundsItself, Optimizer):
    """Mixed into one of torch's fused optimizers: rounds the main params in the sweep that updates them."""

    #: See `inner.READS_TENSORS`.
    reads_tensors = True
    _kernel: Callable[..., None]
    #: What the kernel does; a param group may ask for the other.
    _is_decoupled: bool

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As torch's, then the rounding; in blocks from the second step on, when all state is there."""
        if closure is None and self._models and all(map(self._is_usual, self.param_groups)):
            for group in self.param_groups:
                self._sweep(group)
            return None
        loss = super().step(closure)
        for main, model in self._models.items():
            if main.grad is not None:
                model.copy_(main)
        return loss

    def _is_usual(self, group: Mapping[str, Any]) -> bool:
        is_as_built = group.get("decoupled_weight_decay", self._is_decoupled) == self._is_decoupled
        is_plain = is_as_built and not any(group[option] for option in _UNUSUAL)
        return is_plain and all(self.state.get(main) for main in _updated(group))

    def _sweep(self, group: Mapping[str, Any]) -> None:
        mains, (beta1, beta2) = _updated(group), group["betas"]
        if not mains:
            return
        found_inf, steps = getattr(self, "found_inf", None), [self.state[main]["step"] for main in mains]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options |= {"beta1": beta1, "beta2": beta2, "grad_scale": getattr(self, "grad_scale", None)}
        options["found_inf"] = found_inf
        torch._foreach_add_(steps, 1)
        numel = _BLOCK_NUMEL * torch.get_num_threads()
        for block in _blocks((piece for main in mains for piece in self._pieces(main, numel)), numel):
            parts, grads, firsts, seconds, counts, models = map(list, zip(*block, strict=True))
            type(self)._kernel(parts, grads, firsts, seconds, [], counts, **options)
            for part, model in zip(parts, models, strict=True):
                if model is not None:
                    model.copy_(part)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _pieces(self, main: Tensor, numel: int) -> Iterator[_Piece]:
        """Cuts a main param into pieces of at most `numel` elements."""
        state, model, grad = self.state[main], self._models.get(main), main.grad
        whole: list[Any] = [main, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], model]
        if main.numel() <= numel:
            yield _Piece._make(whole)
            return
        parts = [repeat(each) if each is None or each.dim() == 0 else torch.split(each, numel) for each in whole]
        yield from map(_Piece._make, zip(*parts, strict=False))


class AdamW(_InBlocks, torch.optim.AdamW):
    """torch's AdamW(fused=True) in blocks; what its name says to others stays true."""

    _kernel = staticmethod(torch._fused_adamw_)
    _is_decoupled = True


class Adam(_InBlocks, torch.optim.Adam):
    """torch's Adam(fused=True) in blocks."""

    _kernel = staticmethod(torch._fused_adam_)
    _is_decoupled = False


def _updated(group: Mapping[str, Any]) -> list[Tensor]:
    return [main for main in group["params"] if main.grad is not None]


def _blocks(pieces: Iterable[_Piece], numel: int) -> Iterator[list[_Piece]]:
    """Puts small pieces together, until a block for one call of the kernel has at least `numel` elements."""
    block: list[_Piece] = []
    held = 0
    for piece in pieces:
        block.append(piece)
        held += piece.main.numel()
        if held >= numel:
            yield block
            block, held = [], 0
    if block:
        yield block
