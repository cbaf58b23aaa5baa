"""One step of the inner optimizer. Every gradient is divided once, by the product of loss scale,
number of ranks and clipping."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from megatron_distopt.device import CPU
from megatron_distopt.optimizer.inner import is_of_torch
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam


def update_mains(
    inner: Optimizer,
    mains: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    divisor: float | Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Does what `step_divided` does, but takes the gradients as values and calls no hooks of the
    user.

    During the call, torch's classes find the gradients in `.grad`. The gradient of a main param
    that is not updated is None.
    """
    if _call_kernel(inner, mains, grads, divisor, found_inf):
        return
    for main, grad in zip(mains, grads, strict=True):
        main.grad = grad
    try:
        with without_step_hooks(inner):
            step_divided(inner, [grad for grad in grads if grad is not None], divisor, found_inf)
    finally:
        for main in mains:
            main.grad = None


def step_divided(
    inner: Optimizer,
    grads: Sequence[Tensor],
    divisor: float | Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """One step of the inner optimizer with every gradient divided by `divisor`.

    torch's fused kernels divide while they read the gradient; for other optimizers this takes a
    pass of its own. torch's kernels write the quotient back, so in both cases `grads` hold it
    afterwards.

    `divisor` and `found_inf` are fp32 0-D on the device of the grads, which are the `.grad` of all
    params. If `found_inf` is 1, nothing is changed, not even the count of updates. It may be given
    only to an optimizer that `skips_by_itself`.
    """
    if _has_some_momentum(inner):  # make this step without the fused kernel and its division
        for group in inner.param_groups:
            group["fused"] = False
        try:
            step_divided(inner, grads, divisor)
        finally:
            for group in inner.param_groups:
                group["fused"] = True
        return
    given: dict[str, Tensor] = {} if found_inf is None else {"found_inf": found_inf}
    scale = _scale_of(divisor, grads[0].device) if grads else None
    if scale is not None:
        if _divides_itself(inner):
            given["grad_scale"] = scale
        else:
            torch._foreach_div_(list(grads), divisor)
    for name, tensor in given.items():  # torch's fused kernels find them in attributes
        setattr(inner, name, tensor)
    try:
        inner.step()
    finally:
        for name in given:
            delattr(inner, name)


def _scale_of(divisor: float | Tensor, device: torch.device) -> Tensor | None:
    """A divisor in the form that the fused kernels take; None if it is 1."""
    if isinstance(divisor, Tensor):
        return divisor
    return None if divisor == 1.0 else torch.full((), divisor, dtype=torch.float32, device=device)


def _call_kernel(
    inner: Optimizer,
    mains: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    divisor: float | Tensor,
    found_inf: Tensor | None,
) -> bool:
    """Does bit for bit what `step_divided` does with torch's fused Adam on a CPU.

    In a small model, torch's work around the kernel (hooks, the profiler's range, sorting tensors
    by device) takes longer than the kernel itself.

    Returns:
        False if nothing was done: torch's own `step` has to create the state, does more, or was
        replaced by other code.
    """
    if type(inner) not in (Adam, AdamW) or "step" in vars(inner):
        return False
    grad_of = {id(main): grad for main, grad in zip(mains, grads, strict=True)}
    calls = []
    for group in inner.param_groups:
        is_usual = not (group["amsgrad"] or group["maximize"] or group["capturable"])
        if not group["fused"] or not is_usual or group["differentiable"]:
            return False
        params = [main for main in group["params"] if grad_of.get(id(main)) is not None]
        states = [inner.state.get(main, {}) for main in params]
        if not all(states) or (params and params[0].device.type != CPU):
            return False
        if params:
            calls.append((group, params, states))
    scale = _scale_of(divisor, torch.device(CPU))
    for group, params, states in calls:
        is_decoupled = group.get("decoupled_weight_decay", type(inner) is AdamW)
        kernel: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        beta1, beta2 = group["betas"]
        kernel(
            params,
            [grad_of[id(main)] for main in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
    return True


_WHEN = ("pre", "post")


@contextmanager
def without_step_hooks(optimizer: Optimizer | None = None) -> Iterator[None]:
    """Within it, the user's step hooks on all optimizers and on this one are not called.

    torch calls them in the `step` of every optimizer, even if another optimizer steps it as a part
    of its own.
    """
    of_torch: Any = sys.modules["torch.optim.optimizer"]
    places = [(of_torch, f"_global_optimizer_{when}_hooks") for when in _WHEN]
    if optimizer is not None:
        places += [(optimizer, f"_optimizer_step_{when}_hooks") for when in _WHEN]
    hooks = [getattr(*place) for place in places]
    if not any(hooks):  # as in nearly every step
        yield
        return
    try:
        for place in places:
            setattr(*place, {})
        yield
    finally:
        for place, found in zip(places, hooks, strict=True):
            setattr(*place, found)


def _has_some_momentum(inner: Optimizer) -> bool:
    """Whether torch's fused SGD would fail: either all params must have momentum, or none."""
    if not isinstance(inner, torch.optim.SGD) or not _divides_itself(inner):
        return False
    for group in inner.param_groups:
        updated = [param for param in group["params"] if param.grad is not None]
        has_momentum = {bool(inner.state.get(param)) for param in updated}
        if group["momentum"] and len(has_momentum) > 1:
            return True
    return False


def _divides_itself(inner: Optimizer) -> bool:
    """Whether `inner` reads `inner.grad_scale`. Classes of others set torch's flag for it, too, but
    mean a keyword of `step`."""
    reads = is_of_torch(type(inner)) or isinstance(inner, LowPrecisionAdam)
    return reads and all(group.get("fused") for group in inner.param_groups)


def skips_by_itself(inner: Optimizer) -> bool:
    """Whether `inner.found_inf` makes a step change nothing.

    torch's fused SGD reads it, too, but if it skips the first step, its momentum buffers stay
    uninitialized.
    """
    return _divides_itself(inner) and isinstance(inner, (Adam, AdamW))
