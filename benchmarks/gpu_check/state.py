"""Is what is kept beside the params right here? Averages, state in low precision and on the host,
saves meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from peers.forms import LOW_PRECISION
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpu_check.checks import Check, Found, Place, SkipError
from gpu_check.comparing import (
    ROUNDED_TO_16_BITS,
    STEPS,
    config_of,
    numbered,
    require,
    require_close,
    require_equal,
    same_adam,
    sharded,
    train_given,
    values_of,
)
from gpu_check.machine import CPU
from gpu_check.models import BUCKET_SIZE, Given

_DECAY = 0.9
#: Of the change in a few steps: main params of bf16 lose 0.2 of it, and a code that is read wrongly
#: loses all.
_ROUNDED_STATE = 0.4


def _made(place: Place, dtype: torch.dtype, **options: Any) -> tuple[Given, Any]:
    model = Given(dtype).to(place.device)
    return model, sharded(model, config_of(**options))


def _trained(place: Place, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    model, optimizer = _made(place, dtype, **options)
    for step in range(STEPS):
        train_given(optimizer, model, step, place)
    values = values_of(model)
    optimizer.release()
    return values


def averages(place: Place) -> Found:
    """Of fp32 params against torch's AveragedModel after every step; of bf16 params out of the
    model again."""
    model, optimizer = _made(place, torch.float32, ema_decay=_DECAY)
    averaged = AveragedModel(
        Given(torch.float32).to(place.device), multi_avg_fn=get_ema_multi_avg_fn(_DECAY)
    )
    for step in range(STEPS):
        train_given(optimizer, model, step, place)
        averaged.update_parameters(model)
        with optimizer.averaged_params():
            inside = values_of(model)
        require_equal(
            inside, values_of(averaged.module), list(model.held), f"averaged, after step {step}"
        )
    optimizer.release()
    model, optimizer = _made(place, torch.bfloat16, ema_decay=_DECAY)
    for step in range(STEPS):
        train_given(optimizer, model, step, place)
        before = values_of(model)
        with optimizer.averaged_params():
            inside = values_of(model)
        require_equal(
            values_of(model), before, list(model.held), f"after averaged_params(), step {step}"
        )
    require(
        not torch.equal(inside[0], before[0]), "averaged_params() leaves the params as they are"
    )
    require_equal(
        before,
        _trained(place, torch.bfloat16),
        list(model.held),
        "from a training without averages",
    )
    optimizer.release()
    return Found(
        f"fp32 equal to the bit to AveragedModel after each of {STEPS} steps; bf16 in and out again"
    )


def low_precision(place: Place) -> Found:
    """Every form of main params and moments against fp32 state: remainders to the bit, others to
    what they round."""
    start = values_of(Given(torch.bfloat16).to(place.device))
    wanted = _trained(place, torch.bfloat16)
    names, found = numbered(wanted), {}
    for name, options in LOW_PRECISION.items():
        place.say(name)
        values = _trained(place, torch.bfloat16, **options)
        require_equal(
            values, _trained(place, torch.bfloat16, **options), names, f"in a second run, {name}"
        )
        if name == "remainder":
            require_equal(values, wanted, names, "from main params in fp32, kept as remainders")
        found[name] = require_close(values, wanted, start, _ROUNDED_STATE, name)
    said = ", ".join(f"{name} {apart:.1e}" for name, apart in found.items())
    return Found(f"apart after {STEPS} steps: {said}; each twice to the bit", {"apart": found})


def offload(place: Place) -> Found:
    """State on the host, all of it and half, with overlap and without, against state on the
    device."""
    if place.device.type == CPU:
        raise SkipError("the state is on the host anyhow")
    start = values_of(Given(torch.bfloat16).to(place.device))
    name = same_adam(place)[0]
    wanted = _trained(place, torch.bfloat16, adam=name, bucket_size=BUCKET_SIZE)
    found = []
    for fraction in (0.5, 1.0):
        for overlap in (False, True):
            options = {
                "offload_fraction": fraction,
                "overlap_grad_reduce": overlap,
                "bucket_size": BUCKET_SIZE,
            }
            values = _trained(place, torch.bfloat16, adam=name, **options)
            # The CPU's kernel rounds otherwise than the device's.
            what = f"with {fraction:g} of the state on the host, overlap_grad_reduce={overlap}"
            found.append(require_close(values, wanted, start, ROUNDED_TO_16_BITS, what))
    return Found(
        f"half and all of the state, with overlap and without: apart by at most {max(found):.1e}"
    )


def background_save(place: Place) -> Found:
    """Saved in the background while steps go on, with averages: the files hold what was true when
    it began."""
    options = {"async_save": True, "ema_decay": _DECAY}
    model, optimizer = _made(place, torch.bfloat16, **options)
    folder = place.folder / "background"
    for step in range(STEPS):
        train_given(optimizer, model, step, place)
    optimizer.save(folder)
    saved = values_of(model)
    with optimizer.averaged_params():
        averaged = values_of(model)
    for step in range(STEPS, 2 * STEPS):
        train_given(optimizer, model, step, place)
    optimizer.finish_saving()
    wanted = values_of(model)
    optimizer.release()
    model, optimizer = _made(place, torch.bfloat16, **options)
    optimizer.load(folder)
    names = list(model.held)
    require_equal(values_of(model), saved, names, "after the load of a save in the background")
    with optimizer.averaged_params():
        require_equal(
            values_of(model),
            averaged,
            names,
            "averaged, after the load of a save in the background",
        )
    for step in range(STEPS, 2 * STEPS):
        train_given(optimizer, model, step, place)
    require_equal(values_of(model), wanted, names, "from the run that trained on while it saved")
    optimizer.release()
    return Found(f"params and averages of the save, and {STEPS} steps after it, equal to the bit")


CHECKS = (
    Check("averages", "averages of params equal torch's AveragedModel", averages),
    Check("low_precision", "state in low precision trains as it rounds", low_precision, limit=120),
    Check("offload", "state on the host trains as on the device", offload, limit=90),
    Check(
        "background_save",
        "a save in the background holds what was true when it began",
        background_save,
    ),
)
