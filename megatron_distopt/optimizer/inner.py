"""The inner optimizer, as the sharded step sees it: what was chosen, and one step of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Build", "Groups", "InnerChoice", "step_divided"]

Groups = list[dict[str, Any]]
Build = Callable[[Groups], Optimizer]


@dataclass(frozen=True)
class InnerChoice:
    """The inner optimizer that was chosen.

    Args:
        name: of the source, e.g. "torch_fused".
        build: from param groups of main params.
        why: how it came to that; one line for each better source that was passed over.
        defaults: of an optimizer that brings its own, for comparison between ranks.
    """

    name: str
    build: Build
    why: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()


def step_divided(inner: Optimizer, grads: Sequence[Tensor], divisor: float) -> None:
    """One step of the inner optimizer with every gradient divided by `divisor` (loss scale, average and clip in one).

    torch's fused kernels divide while they read the gradient anyway; for the others it is a pass of its own. Where
    torch's kernels divide they write the quotient back, so `grads` hold it afterwards either way.

    Args:
        grads: the `.grad` of all params of the inner optimizer.
    """
    if divisor == 1.0 or not grads:
        inner.step()
    elif _divides_itself(inner):
        inner.grad_scale = torch.full((), divisor, dtype=torch.float32, device=grads[0].device)  # type: ignore[attr-defined]
        try:
            inner.step()
        finally:
            del inner.grad_scale  # type: ignore[attr-defined]
    else:
        torch._foreach_div_(list(grads), divisor)
        inner.step()


def _divides_itself(inner: Optimizer) -> bool:
    """Whether `inner.grad_scale` is read. Others set torch's flag for it too and mean a keyword of `step`."""
    is_torchs = type(inner).__module__.startswith("torch.optim.")
    return is_torchs and all(group.get("fused") for group in inner.param_groups)
