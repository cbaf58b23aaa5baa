"""What `deterministic=True` checks before training starts: docs/deterministic.md says why each of it is needed.

The package's own steps are the same to the bit whenever they are repeated at the same parallel sizes. What can differ
is around them: operators of the model, libraries of the device, and the algorithm of a collective.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from megatron_distopt.comm import Group, carrier_of
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer.accelerator import CUDA, repeatable_settings

#: Backends that add up in an order that does not depend on timing. Of the others it is not known.
_IN_ORDER = ("gloo", "nccl")
#: Sums in the switches of the network, whose order NCCL does not promise.
_IN_SWITCHES = "NVLS"
_INSTEAD = "leave deterministic out; --distopt-log-digests and megatron-distopt diff then say whether runs were equal"


def check_deterministic(
    config: DistOptConfig, device: torch.device, group: Group, environ: Mapping[str, str] | None = None
) -> None:
    """Refuses with `deterministic=True` what would let a run differ from itself.

    Args:
        config: merged.
        device: of the params.
        group: over which gradients are reduced.
        environ: `os.environ` where None.

    Raises:
        ConfigError: the first such thing, with what to type.
    """
    if not config.deterministic:
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        is_on = torch.are_deterministic_algorithms_enabled()
        got = "it only warns" if is_on else "off"
        remedy = "Call torch.use_deterministic_algorithms(True) at the beginning of the script"
        raise ConfigError(refusal("torch.use_deterministic_algorithms", got, "be on with deterministic", remedy))
    if device.type not in (CPU, CUDA) or (device.type == CUDA and torch.version.hip is not None):
        got = f"{device.type}{' of AMD' if device.type == CUDA else ''}"
        rule = "be the CPU or an NVIDIA GPU with deterministic: of others it is not known what repeats"
        raise ConfigError(refusal("device", got, rule, f"Train on one of these, or {_INSTEAD}"))
    environ = os.environ if environ is None else environ
    if device.type == CUDA:
        _check_settings(environ)
    if group.size > 1:
        _check_collectives(carrier_of(device, group), environ)


def _check_settings(environ: Mapping[str, str]) -> None:
    for setting in repeatable_settings(environ):
        if setting.found not in setting.allowed:
            rule = f"be {' or '.join(setting.allowed)} with deterministic"
            raise ConfigError(refusal(setting.name, setting.found, rule, setting.remedy))


def _check_collectives(carrier: str, environ: Mapping[str, str]) -> None:
    if carrier not in _IN_ORDER:
        rule = f"be {' or '.join(_IN_ORDER)} with deterministic: of others it is not known in which order they add up"
        raise ConfigError(refusal("backend", carrier, rule, f"Use one of these, or {_INSTEAD}"))
    algorithm = environ.get("NCCL_ALGO", "").upper()
    is_excluded = algorithm.startswith("^") and _IN_SWITCHES in algorithm
    if carrier == "nccl" and not is_excluded and (not algorithm or _IN_SWITCHES in algorithm or algorithm[0] == "^"):
        got = algorithm or "not set"
        rule = f"name an algorithm without {_IN_SWITCHES} with deterministic, so that NCCL adds up in one order"
        remedy = "Write NCCL_ALGO=Ring in the environment of all ranks"
        raise ConfigError(refusal("NCCL_ALGO", got, rule, remedy))
