"""What `deterministic=True` checks before training starts: docs/deterministic.md says why each of it is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from megatron_distopt.comm import Group, carrier_of
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.accelerator import CUDA

_INSTEAD = "leave deterministic out: --distopt-log-digests and megatron-distopt diff then say whether runs were equal"


def check_deterministic(
    config: DistOptConfig, device: torch.device, group: Group, environ: Mapping[str, str] = os.environ
) -> None:
    """Refuses with `deterministic=True` what would let a run differ from itself.

    Raises:
        ConfigError: the first such thing, with what to type.
    """
    if not config.deterministic:
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        raise ConfigError(
            "deterministic needs deterministic operators in the model, and torch does not enforce them. Call "
            "torch.use_deterministic_algorithms(True) at the beginning of the script."
        )
    is_amd = device.type == CUDA and torch.version.hip is not None
    if device.type not in (CPU, CUDA) or is_amd:
        raise ConfigError(
            f"deterministic is known to hold on the CPU and on NVIDIA GPUs, and the device is "
            f"{device.type}{' of AMD' if is_amd else ''}. Train on one of these, or {_INSTEAD}."
        )
    # Of an NVIDIA GPU; source: torch's notes on reproducibility, and cuBLAS's on results.
    workspace = environ.get("CUBLAS_WORKSPACE_CONFIG", "not set")
    if device.type == CUDA and workspace not in (":4096:8", ":16:8"):
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG is {workspace}, and deterministic needs :4096:8 or :16:8. Write "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment of all ranks."
        )
    if device.type == CUDA and torch.backends.cudnn.benchmark:
        raise ConfigError(
            "torch.backends.cudnn.benchmark is True, and deterministic needs False. Write "
            "torch.backends.cudnn.benchmark = False."
        )
    carrier = carrier_of(device, group) if group.size > 1 else "gloo"
    if carrier not in ("gloo", "nccl"):
        raise ConfigError(
            f"deterministic needs a backend that adds up in a known order, gloo or nccl, and this one is {carrier}. "
            f"Use one of these, or {_INSTEAD}."
        )
    algorithm = environ.get("NCCL_ALGO", "").upper()
    # Sums in the switches of the network (NVLS) have an order that NCCL does not promise.
    is_fixed = algorithm.startswith("^") == ("NVLS" in algorithm) and algorithm
    if carrier == "nccl" and not is_fixed:
        raise ConfigError(
            f"NCCL_ALGO is {algorithm or 'not set'}, and deterministic needs an algorithm without NVLS, so that NCCL "
            "adds up in one order. Write NCCL_ALGO=Ring in the environment of all ranks."
        )
