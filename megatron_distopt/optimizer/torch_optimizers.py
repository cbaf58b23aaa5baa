"""torch's own optimizers, given as instances: the same update by a fused kernel where the user chose none."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.optimizer import blocked_adam
from megatron_distopt.optimizer.accelerator import CPU, has_torch_fused
from megatron_distopt.optimizer.inner import Groups, InnerChoice

__all__ = ["IMPLEMENTATION", "fused_instance"]

#: Options of torch's param groups that choose a kernel and not a result.
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")

#: By class, the name of the source, and the class that rounds into the model param on a CPU.
_FUSED: dict[type[Optimizer], tuple[str, type[Optimizer]]] = {
    torch.optim.AdamW: ("torch_fused", blocked_adam.AdamW),
    torch.optim.Adam: ("torch_fused", blocked_adam.Adam),
    torch.optim.SGD: ("torch_sgd", torch.optim.SGD),
}


def fused_instance(instance: Optimizer, config: DistOptConfig, device_type: str) -> InnerChoice | None:
    """The fused kernel in place of a class of torch's own whose user chose no kernel.

    Args:
        instance: of any class; its defaults are kept.
        config: `adam` may name another source, which is then for others to find.
        device_type: of the main params.

    Returns:
        None where the instance is to be used itself.
    """
    known = _FUSED.get(type(instance))
    others = [option for option in IMPLEMENTATION if option != "fused"]
    has_chosen = any(group.get(option) for group in instance.param_groups for option in others)
    has_refused = any(group.get(option) is False for group in instance.param_groups for option in ("fused", "foreach"))
    if known is None or has_chosen or has_refused or config.adam != "auto" or not has_torch_fused(device_type):
        return None
    name, on_cpu = known
    chosen = on_cpu if device_type == CPU else type(instance)
    accepted = inspect.signature(chosen).parameters
    options = {key: value for key, value in instance.defaults.items() if key in accepted and key not in IMPLEMENTATION}
    defaults = tuple(f"{key}={value!r}" for key, value in sorted(instance.defaults.items()))
    return InnerChoice(name, partial(_build, chosen, options), (f"{type(instance).__name__} was given",), defaults)


def _build(chosen: type[Optimizer], options: dict[str, Any], groups: Groups) -> Optimizer:
    plain = [{key: value for key, value in group.items() if key not in IMPLEMENTATION} for group in groups]
    return chosen(plain, **options, fused=True)  # type: ignore[call-arg]
