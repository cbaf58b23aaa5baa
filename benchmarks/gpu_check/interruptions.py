"""Does a run survive here what interrupts it? Gradients that are not finite, and an end from which
it is resumed."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from gpu_check.checks import Check, Found, Place, WrongError
from gpu_check.comparing import (
    ROUNDED_TO_16_BITS,
    STEPS,
    config_of,
    is_exact,
    numbered,
    require,
    require_close,
    require_equal,
    same_adam,
    sharded,
    train_given,
    values_of,
)
from gpu_check.machine import rank_counts
from gpu_check.models import Given, grads_of
from megatron_distopt import DistOptConfig
from megatron_distopt.errors import NonFiniteGradError


def nonfinite(place: Place) -> Found:
    """A gradient that is not a number on one rank: what each policy promises."""
    _left_out(place, config_of(nonfinite="skip"), torch.bfloat16)
    scale = {"loss_scale": "dynamic", "initial_loss_scale": 64.0, "hysteresis": 1}
    dynamic = _left_out(place, config_of(**scale), torch.float16) if _has_half(place) else None
    require(
        dynamic in (None, 32.0),
        f"the dynamic loss scale is {dynamic} after one overflow at 64, not 32",
    )
    _raised(place)
    _logged(place)
    return Found(
        f"skip, raise and log{', dynamic loss scale' if dynamic else '; the device has no fp16'}"
    )


def _has_half(place: Place) -> bool:
    try:
        torch.ones(2, dtype=torch.float16, device=place.device).mul_(2)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _poisoned(
    place: Place, config: DistOptConfig, dtype: torch.dtype
) -> tuple[Any, Given, list[Tensor]]:
    """After a good step and one with a NaN on the last rank; and the params between them."""
    model = Given(dtype).to(place.device)
    optimizer = sharded(model, config)
    _backward(optimizer, model, 0, place, poison=False)
    optimizer.step()
    before = values_of(model)
    _backward(optimizer, model, 1, place, poison=place.rank == place.size - 1)
    return optimizer, model, before


def _backward(optimizer: Any, model: Given, step: int, place: Place, poison: bool) -> None:
    optimizer.zero_grad()
    grads = grads_of(step, place.rank, place.device)
    if poison:
        grads["weight"][3, 5] = math.nan
    optimizer.scale_loss(model(grads)).backward()


def _left_out(place: Place, config: DistOptConfig, dtype: torch.dtype) -> float:
    """The bad step changes no param, and the next good one changes them; returns the loss scale in
    between."""
    optimizer, model, before = _poisoned(place, config, dtype)
    optimizer.step()
    require_equal(
        values_of(model),
        before,
        list(model.held),
        f"after a step that is to be skipped ({config.nonfinite})",
    )
    scale = float(optimizer.scale_loss(torch.ones((), device=place.device)))
    _backward(optimizer, model, 2, place, poison=False)
    optimizer.step()
    after = values_of(model)
    require(not torch.equal(after[0], before[0]), "a good step after a skipped one changes nothing")
    require(
        all(bool(each.isfinite().all()) for each in after),
        "a NaN came into the params after a skipped step",
    )
    optimizer.release()
    return scale


def _raised(place: Place) -> None:
    """At once, or at the next step where the host does not wait for the device; params stay as they
    were."""
    optimizer, model, before = _poisoned(place, config_of(nonfinite="raise"), torch.bfloat16)
    try:
        optimizer.step()
        require_equal(
            values_of(model),
            before,
            list(model.held),
            "after a step whose error comes one step later",
        )
        _backward(optimizer, model, 2, place, poison=False)
        optimizer.step()
    except NonFiniteGradError as error:
        require("weight" in str(error), f"the error does not name the param with the NaN: {error}")
        require_equal(values_of(model), before, list(model.held), "after a step that raised")
        optimizer.release()
        return
    raise WrongError("a NaN in a gradient raised no error in its own step and none in the next")


def _logged(place: Place) -> None:
    optimizer, model, _ = _poisoned(place, config_of(nonfinite="log"), torch.bfloat16)
    optimizer.step()
    after = dict(zip(model.held, values_of(model), strict=True))
    require(
        bool(after["weight"].isnan().any()),
        "nonfinite='log' did not update with a NaN, as it promises",
    )
    optimizer.release()


# Checkpoints


def resume(place: Place) -> Found:
    """Saved by all ranks and loaded by each smaller number of them, which go on as if there had
    been no end."""
    wanted, start = _train_and_save(place)
    sizes = rank_counts(place.size)
    for size in sizes:
        group = None if size == place.size else dist.new_group(list(range(size)))
        if place.rank < size:
            values = _loaded(place, group)
            how = f"after {place.size} ranks saved and {size} resumed"
            if is_exact(size) and is_exact(place.size):
                require_equal(values, wanted, numbered(values), how)
            require_close(values, wanted, start, ROUNDED_TO_16_BITS, f"params {how}")
        dist.barrier()
    return Found(
        f"saved by {place.size} and resumed by {', '.join(map(str, sizes))}, equal to a run that "
        "did not end"
    )


def _train_and_save(place: Place) -> tuple[list[Tensor], list[Tensor]]:
    """Params at the end of a run that saves in its middle, and at its start."""
    model, optimizer = _of_mean(place, None)
    start = values_of(model)
    for step in range(STEPS):
        _train_mean(optimizer, model, step, place)
    optimizer.save(place.folder / "checkpoint")
    for step in range(STEPS, 2 * STEPS):
        _train_mean(optimizer, model, step, place)
    optimizer.release()
    return values_of(model), start


def _loaded(place: Place, group: Any) -> list[Tensor]:
    model, optimizer = _of_mean(place, group)
    optimizer.load(place.folder / "checkpoint")
    for step in range(STEPS, 2 * STEPS):
        _train_mean(optimizer, model, step, place)
    optimizer.release()
    return values_of(model)


def _of_mean(place: Place, group: Any) -> tuple[Given, Any]:
    model = Given(torch.bfloat16).to(place.device)
    return model, sharded(model, config_of(adam=same_adam(place)[0]), group)


def _train_mean(optimizer: Any, model: Given, step: int, place: Place) -> None:
    """All ranks have the same gradients, so that their mean does not depend on how many they
    are."""
    optimizer.zero_grad()
    model(grads_of(step, 0, place.device)).backward()
    optimizer.step()


def state_dict(place: Place) -> Found:
    """`state_dict` and `load_state_dict` of torch's format, through a copy."""
    model = Given(torch.bfloat16).to(place.device)
    optimizer = sharded(model, config_of())
    for step in range(STEPS):
        train_given(optimizer, model, step, place)
    kept, weights = _copied(optimizer.state_dict()), _copied(model.state_dict())
    for step in range(STEPS, 2 * STEPS):
        train_given(optimizer, model, step, place)
    wanted = values_of(model)
    optimizer.release()
    model = Given(torch.bfloat16).to(place.device)
    model.load_state_dict(weights)
    optimizer = sharded(model, config_of())
    optimizer.load_state_dict(kept)
    for step in range(STEPS, 2 * STEPS):
        train_given(optimizer, model, step, place)
    require_equal(values_of(model), wanted, list(model.held), "after load_state_dict")
    optimizer.release()
    return Found(f"{STEPS} steps after load_state_dict equal to the bit to a run without it")


def _copied(state: Any) -> Any:
    """All tensors in it as they are now."""
    return tree_map(
        lambda each: each.detach().clone() if isinstance(each, Tensor) else copy.copy(each), state
    )


CHECKS = (
    Check("nonfinite", "NaNs are skipped, raised or logged as asked", nonfinite),
    Check("resume", "checkpoints resume at every number of ranks", resume, limit=90),
    Check("state_dict", "torch's state_dict resumes", state_dict),
)
