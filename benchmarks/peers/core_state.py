"""megatron-core's optimizer with state in low precision, its own and ours: contestants of core_state.py."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.memory_reading import covered, reset_peak, status, storages
from peers.ratios import failure
from peers.step_contestants import Core
from peers.step_reading import FIRST_NORMS, deviation
from peers.steppers import Stepper, StepSetting, set_grads
from peers.te_adam import transformer_engine_from

__all__ = ["FP32", "StateEntry", "StateReading", "given_storages", "low_precision_entries", "measure", "take_time"]

FP32 = "fp32"
_BF16, _FP16, _FP8 = torch.bfloat16, torch.float16, torch.uint8
_AWARE: Mapping[str, Any] = {"use_precision_aware_optimizer": True}
#: Forms of state by the host's own fields. Its main params of bf16 params are remainders unless another dtype is asked.
STATES: Mapping[str, Mapping[str, Any]] = {
    FP32: {},
    "remainder": _AWARE,
    "remainder, bfloat16": {**_AWARE, "exp_avg_dtype": _BF16, "exp_avg_sq_dtype": _BF16},
    "remainder, float16": {**_AWARE, "exp_avg_dtype": _FP16, "exp_avg_sq_dtype": _FP16},
    "remainder, float8_e4m3fn": {**_AWARE, "exp_avg_dtype": _FP8, "exp_avg_sq_dtype": _FP8},
    "float16, float8_e4m3fn": {
        **_AWARE,
        "main_params_dtype": _FP16,
        "exp_avg_dtype": _FP8,
        "exp_avg_sq_dtype": _FP8,
    },
}
#: What it computes from the fields of a precision-aware optimizer, where its constructor sees them.
_COMPUTED = {"use_precision_aware_optimizer_no_fp8_or_ds_fp8": True}


@dataclass(frozen=True)
class StateEntry:
    """A contestant before it is built.

    Args:
        name: in results; ours begin with "ours".
        state: what it is asked to keep; contestants of one state are compared.
        build: it, from the setting.
        why_untimed: its time says nothing.
    """

    name: str
    state: str
    build: Callable[[StepSetting], Stepper]
    why_untimed: str = ""


@dataclass(frozen=True)
class StateReading:
    """What was read of a contestant.

    Args:
        name, state: see `StateEntry`.
        round: of the time; None for what is read once.
        ns: CPU time of a step, an element.
        figures: other figures, bytes an element where nothing else is said.
        why_not: the reason, where it was not run.
    """

    name: str
    state: str
    round: int | None = None
    ns: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    why_not: str = ""


class _OverStandIns(Core):
    """megatron-core's own with TransformerEngine's FusedAdam over stand-ins of its kernels."""

    def __init__(self, setting: StepSetting, folder: Path | None, fields: Mapping[str, Any]) -> None:
        with transformer_engine_from(folder):
            super().__init__(setting, fields=fields)


class _OnHost(Core):
    """megatron-core's own with its state on the host, where the params are there as well."""

    def __init__(self, setting: StepSetting) -> None:
        super().__init__(setting, fields={**_AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0})

    def step(self) -> None:
        try:
            super().step()
        except KeyError as error:  # whose text is all values of the param
            raise RuntimeError(
                "HybridDeviceOptimizer looks for a copy of each param, and makes none on a CPU"
            ) from error


def low_precision_entries(te_folder: Path | None) -> list[StateEntry]:
    """Ours first in every state, and of all in fp32.

    Args:
        te_folder: see `transformer_engine_from`.
    """
    entries = []
    for state, fields in STATES.items():
        name = "ours" if state == FP32 else f"ours, {state}"
        own = {**fields, **(_COMPUTED if fields else {})}
        entries.append(StateEntry(name, state, partial(Core, kind="ours", fields=own)))
        entries.append(StateEntry(f"megatron-core, {state}", state, partial(Core, fields=fields)))
        if state == FP32:
            entries.append(StateEntry("megatron-core, fp32, fused Adam", state, partial(Core, is_fused=True)))
        else:
            build, why = partial(_OverStandIns, folder=te_folder, fields=fields), "its kernels are stand-ins"
            entries.append(StateEntry(f"megatron-core, {state}, stand-in of its kernels", state, build, why))
    return [*entries, StateEntry("megatron-core, on the host", "on the host", _OnHost)]


def take_time(entry: StateEntry, setting: StepSetting, number: int, repeats: int) -> StateReading:
    """The median of some steps of a fresh contestant, in CPU time of this process: others may use the machine."""
    found: list[float] = []

    def act() -> None:
        stepper = entry.build(setting)
        try:
            _warm_up(stepper)
            found.extend(_seconds(stepper) for _ in range(repeats))
        finally:
            stepper.close()

    why_not = entry.why_untimed or failure(act)
    gc.collect()
    ns = None if why_not else statistics.median(found) * 1e9 / setting.numel
    return StateReading(entry.name, entry.state, number, ns, why_not=why_not)


def _seconds(stepper: Stepper) -> float:
    set_grads(stepper, FIRST_NORMS[-1])
    start = time.process_time()
    stepper.step()
    return time.process_time() - start


def _warm_up(stepper: Stepper) -> None:
    for norm in FIRST_NORMS:
        set_grads(stepper, norm)
        stepper.step()


def measure(entry: StateEntry, setting: StepSetting, reference: list[Tensor]) -> StateReading:
    """Bytes of state between steps, how many more a step needs, and how far the first steps went from ours in fp32."""
    figures: dict[str, float] = {}

    def act() -> None:
        known = storages()
        stepper = entry.build(setting)
        try:
            _warm_up(stepper)
            figures.update(_figures(stepper, known))
            apart = deviation(stepper, "ours" if entry.name == "ours" else "", reference)
            figures.update({} if apart is None else {"apart": apart})
        finally:
            stepper.close()

    why_not = failure(act)
    gc.collect()
    return StateReading(entry.name, entry.state, figures={} if why_not else figures, why_not=why_not)


def _figures(stepper: Stepper, known: Mapping[int, int]) -> dict[str, float]:
    held = covered(item for item in storages().items() if item[0] not in known)
    nbytes = held - covered(given_storages(stepper))
    set_grads(stepper, FIRST_NORMS[-1])
    before = reset_peak()
    stepper.step()
    more, numel = status("VmHWM") - before, stepper.setting.numel
    return {"state": nbytes / numel, "more in a step": more / numel}


def given_storages(stepper: Stepper) -> Sequence[tuple[int, int]]:
    """Address and bytes of what every contestant has: model params and gradients."""
    tensors = [*stepper.params, *stepper.grads()]
    return [(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors]
