"""Reads, restores and cuts the state of an inner optimizer, in the form that its class uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from megatron_distopt.layout import Span
from megatron_distopt.optimizer.inner import InnerChoice, InParts, is_of_torch
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    LowPrecisionTensor,
    part_of,
    stored_of,
)
from megatron_distopt.optimizer.low_precision.stored_values import RemainderValues


def is_torchs(inner: Optimizer) -> bool:
    """Whether the class is torch's, inherits from one of torch's, or keeps state in the same
    form."""
    return isinstance(inner, InParts) or any(map(is_of_torch, type(inner).__mro__))


def state_of(inner: Optimizer, main: Tensor) -> dict[str, Any]:
    """The state of a main param; empty before the first step, and if owners of whole params keep
    it."""
    # dict.get, because the state of WholeParams refuses its own methods
    found: dict[str, Any] = dict.get(inner.state, main, {})
    return found


def moments_of(inner: Optimizer, main: Tensor) -> dict[str, Tensor]:
    """The state that it keeps for every element, by key."""
    state = state_of(inner, main)
    return {
        key: value
        for key, value in state.items()
        if torch.is_tensor(value) and value.shape == main.shape
    }


def moment_to_fill(inner: Optimizer, main: Tensor, kind: str, dtype: torch.dtype) -> Tensor | None:
    """Memory for a moment that is about to be loaded from a moment of `dtype`. The caller must fill
    all of it.

    Returns:
        Zeros in the inner optimizer's own form, if it has one. Otherwise the present moment, if it
        has that dtype. Otherwise None.
    """
    if isinstance(inner, LowPrecisionAdam):
        return inner.new_moment(main, kind)
    known = moments_of(inner, main).get(kind)
    return known if known is not None and known.dtype == dtype else None


def count_updates(inner: Optimizer) -> int | None:
    """The number of updates; None for an optimizer that does not count them or has made none.

    torch counts in the state of each param, apex and others count in the param groups.
    """
    holders = list[Mapping[str, Any]](inner.param_groups)
    for group in inner.param_groups:
        holders += [state_of(inner, main) for main in group["params"]]
    return max((int(holder["step"]) for holder in holders if "step" in holder), default=None)


def restore(
    inner: Optimizer,
    group: dict[str, Any],
    main: Tensor,
    moments: Mapping[str, Tensor],
    step: int | None,
) -> None:
    """Restores the state of a main param in `group`, in the form that the class of `inner` uses.

    Moments have the size of `main` and are not copied. `step` is the number of updates; None for a
    class that does not count them.
    """
    state: dict[str, Any] = dict(moments)
    if step is not None and is_torchs(inner):
        state["step"] = _count(group, main, step)
    if step is not None and type(inner).__module__.startswith("deepspeed."):
        state["step"] = step
    inner.state.pop(main, None)
    if state:
        inner.state[main] = state
    if isinstance(inner, LowPrecisionAdam):
        inner.take_moments(main)


def _count(group: Mapping[str, Any], main: Tensor, step: int) -> Tensor:
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(float(step), device=main.device if on_device else None)


def begin_counts(inner: Optimizer) -> None:
    """Adds a missing count of zero to moments of Adam. Functions of a host make moments without
    one."""
    if not isinstance(inner, (Adam, AdamW)):
        return
    for group in inner.param_groups:
        for main in group["params"]:
            state = inner.state.get(main)
            if state and "step" not in state:
                state["step"] = _count(group, main, 0)


def split_state(
    inner: Optimizer, group: dict[str, Any], main: Tensor, parts: Mapping[Span, Tensor]
) -> None:
    """Replaces a main param in `group` with parts, which are views of some of its elements in
    order, and splits its state."""
    members = list[Tensor]()
    for each in group["params"]:
        members += parts.values() if each is main else [each]
    group["params"][:] = members
    state = inner.state.pop(main, {})
    if not state:
        return
    for span, part in parts.items():
        of_part = dict(state)
        for key, value in state.items():
            # A moment is cut. Each part has its own count of updates from now on.
            if torch.is_tensor(value):
                is_moment = value.shape == main.shape
                of_part[key] = part_of(value, span) if is_moment else value.clone()
        stored = stored_of(part)
        if isinstance(stored, RemainderValues) and "exp_avg_sq" in state:
            of_part["exp_avg_sq"] = LowPrecisionTensor(stored.second)
        inner.state[part] = of_part


def counts_in_groups(choice: InnerChoice, inner: Optimizer) -> bool:
    """Whether updates are counted in the param group, as in apex, and not for each param, as in
    torch."""
    return "step" in choice.writes or (choice.is_adam and not is_torchs(inner))


def restore_group(inner: Optimizer, group: dict[str, Any], step: int | None) -> None:
    """Restores the count of a whole param group, which may have no params on this rank."""
    if step is not None and not is_torchs(inner):
        group["step"] = step
