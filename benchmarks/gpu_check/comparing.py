"""What the checks of correctness have in common: the optimizer, a step with given gradients, and
comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gpu_check.checks import Place, WrongError
from gpu_check.models import ADAM, Given, grads_of, groups_of, relative_change
from megatron_distopt import DistOptConfig, distribute

STEPS = 6
CLIP_GRAD = 0.5
#: fp32 rounds the norm and the coefficient of clipping, on both sides in another order.
ROUNDED = 1e-5
#: A bf16 param that lies between two numbers may be rounded to the other one.
ROUNDED_TO_16_BITS = 2e-3


def config_of(**options: Any) -> DistOptConfig:
    return DistOptConfig(accelerator="torch", **{**ADAM, **options})


def _fused(place: Place) -> bool:
    """Whether torch has a fused Adam for the device."""
    utils = import_module("torch.utils._foreach_utils")
    return place.device.type in utils._get_fused_kernels_supported_devices()


def same_adam(place: Place) -> tuple[str, dict[str, bool]]:
    """The same kernel for us and for torch, element by element: its name with us, and torch's
    option."""
    return (
        ("torch_fused", {"fused": True}) if _fused(place) else ("torch_foreach", {"foreach": True})
    )


def is_exact(size: int) -> bool:
    """Whether a mean over the ranks is."""
    return size & (size - 1) == 0


def require(holds: bool, text: str) -> None:
    """
    Raises:
        WrongError: with the text, where it does not hold.
    """
    if not holds:
        raise WrongError(text)


def values_of(module: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def require_equal(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], names: Sequence[str], when: str
) -> None:
    """
    Raises:
        WrongError: a bit differs; with the first name, and how many elements.
    """
    for one, other, name in zip(ours, theirs, names, strict=True):
        if not torch.equal(one, other):
            differ = one != other
            largest = float((one.float() - other.float()).abs().max())
            text = (
                f"{int(differ.sum())} of {one.numel()} elements of {name} differ {when}, by at "
                f"most {largest:.3g}"
            )
            raise WrongError(text)


def numbered(values: Sequence[Tensor]) -> list[str]:
    return [f"param {number}" for number in range(len(values))]


def sharded(model: Given, config: DistOptConfig, group: Any = None) -> Any:
    """Ours over the params of a model and the ranks of a process group; all where that is None."""
    return distribute(model, config, param_groups=groups_of(dict(model.held)), process_group=group)


def train_given(optimizer: Any, model: Given, step: int, place: Place) -> None:
    optimizer.zero_grad()
    model(grads_of(step, place.rank, place.device)).backward()
    optimizer.step()


def require_close(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    start: Sequence[Tensor],
    allowed: float,
    what: str,
) -> float:
    apart = relative_change(ours, theirs, start)
    require(
        apart <= allowed,
        f"{what}: {apart:.3g} of the change from the reference, at most {allowed:g} is rounding",
    )
    return apart
