"""The state of an inner optimizer: read, restored and cut, in the form that its class wants."""

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
    """Whether torch itself provides the class, or what it inherits from; or one that keeps state as
    torch's do."""
    return isinstance(inner, InParts) or any(map(is_of_torch, type(inner).__mro__))


def state_of(inner: Optimizer, main: Tensor) -> dict[str, Any]:
    """What the inner optimizer keeps of a main param; empty before the first step, and where owners
    keep it."""
    # a state that refuses others is read past its methods
    found: dict[str, Any] = dict.get(inner.state, main, {})
    return found


def moments_of(inner: Optimizer, main: Tensor) -> dict[str, Tensor]:
    """What it keeps for every element, by key."""
    state = state_of(inner, main)
    return {
        key: value
        for key, value in state.items()
        if torch.is_tensor(value) and value.shape == main.shape
    }


def moment_to_fill(inner: Optimizer, main: Tensor, kind: str, dtype: torch.dtype) -> Tensor | None:
    """Memory for a moment that is about to be loaded from one of a dtype; all of it has to be
    filled.

    Returns:
        Zeros in the form of the inner optimizer where it decides, or else the present moment where
        it has the dtype; None where neither is there.
    """
    if isinstance(inner, LowPrecisionAdam):
        return inner.new_moment(main, kind)
    known = moments_of(inner, main).get(kind)
    return known if known is not None and known.dtype == dtype else None


def count_updates(inner: Optimizer) -> int | None:
    """How often it has updated; None for one that does not count, or has not begun.

    torch counts in the state of each param, apex and others in the param groups.
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
    """Gives a main param, which is in `group`, its state back, in the form that the class of
    `inner` wants it.

    Moments are as large as `main` and not copied. `step` counts updates; None for a class that does
    not.
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
    """Adds a count of zero to moments of Adam that others have made without one, as a host's
    functions do."""
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
    """Replaces a main param in `group` by parts, in order, that are views of some of its elements,
    state included."""
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
            # A moment is cut; a count of updates is each part's own from now on.
            if torch.is_tensor(value):
                is_moment = value.shape == main.shape
                of_part[key] = part_of(value, span) if is_moment else value.clone()
        stored = stored_of(part)
        if isinstance(stored, RemainderValues) and "exp_avg_sq" in state:
            of_part["exp_avg_sq"] = LowPrecisionTensor(stored.second)
        inner.state[part] = of_part


def counts_in_groups(choice: InnerChoice, inner: Optimizer) -> bool:
    """Whether updates are counted once for a param group, as apex does, and not for each param, as
    torch does."""
    return "step" in choice.writes or (choice.is_adam and not is_torchs(inner))


def restore_group(inner: Optimizer, group: dict[str, Any], step: int | None) -> None:
    """The part of `restore` that concerns a whole param group, also one without a param on this
    rank."""
    if step is not None and not is_torchs(inner):
        group["step"] = step
