"""One reading of one contestant of step.py."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.machine import available_nbytes
from peers.report import failure
from peers.step_contestants import StepEntry
from peers.steppers import Stepper, StepSetting, set_grads, weights

#: Of any contestant: 18 of state; and the params that it is compared with, before and after.
_NEEDED_NBYTES = 24
#: Norms of the gradients of the first steps, after which params are compared. Clipping shows if only some are clipped.
FIRST_NORMS = (0.5, 4.0)
#: Of the change of the params. They are the same but for elements that were at the edge between two bf16 numbers, which
#: is about 1e-4. Without clipping it is 0.1; without weight decay, above 1e-3.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class StepReading:
    """One contestant in one round."""

    contestant: str  # its name
    numel: int  # elements of the model
    round: int  # repeats are rounds over all contestants
    seconds: tuple[float, ...] = ()  # of each timed step
    deviation: float | None = None  # of the first steps' change of the params from that of ours, relative, L2
    why_not: str = ""  # the reason, where it was not run


def read(entry: StepEntry, setting: StepSetting, number: int, repeats: int, reference: list[Tensor]) -> StepReading:
    """Builds a contestant, checks and times it, and drops it.

    Args:
        entry: of the contestant.
        setting: of the model.
        number: of the round.
        repeats: timed steps.
        reference: params after the first steps, of one size; ours fills it in the first round.
    """
    needed, free = _NEEDED_NBYTES * setting.numel, available_nbytes() - (1 << 30)
    if needed > free:
        why_not = f"not run: it needs about {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free"
        return StepReading(entry.name, setting.numel, number, why_not=why_not)
    measured: list[StepReading] = []
    why_not = failure(lambda: measured.append(_timed(entry.build(setting), entry.name, number, repeats, reference)))
    gc.collect()
    if why_not:
        return StepReading(entry.name, setting.numel, number, why_not=why_not)
    return measured[0]


def _timed(stepper: Stepper, name: str, number: int, repeats: int, reference: list[Tensor]) -> StepReading:
    try:
        for norm in FIRST_NORMS:
            set_grads(stepper, norm)
            stepper.step()
        off = deviation(stepper, name, reference) if number == 0 else None
        seconds = tuple(_one_step(stepper) for _ in range(repeats))
        return StepReading(name, stepper.setting.numel, number, seconds, off)
    finally:
        stepper.close()


def _one_step(stepper: Stepper) -> float:
    set_grads(stepper, FIRST_NORMS[-1])
    start = time.perf_counter()
    stepper.step()
    return time.perf_counter() - start


@torch.no_grad()
def deviation(stepper: Stepper, name: str, reference: list[Tensor]) -> float | None:
    """From ours, which comes first and whose params are kept; None where it failed."""
    params = [param.detach() for param in stepper.params]
    if not reference and name != "ours":
        return None
    if not reference:
        reference += [param.clone() for param in params]
    before = [param.detach() for param in weights(stepper.setting).parameters()]
    apart = sum(_square(param, other) for param, other in zip(params, reference, strict=True))
    change = sum(_square(other, start) for other, start in zip(reference, before, strict=True))
    return float((apart / change) ** 0.5)


def _square(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).square().sum())
