"""The host's options for optimizer state on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from megatron_distopt.errors import ConfigError, refusal

#: The host's own optimizer over copies of params on the host, and what it updates them with.
_HYBRID, _OVER = "HybridDeviceOptimizer", (torch.optim.AdamW, torch.optim.SGD)

#: What of the state is pinned by options of the host. Ours pins what is copied, and nothing else.
_PINNED = ("pin_cpu_grads", "pin_cpu_params")


def host_state_of(host: Any) -> dict[str, float]:
    """The option for the state on the host; empty where the host leaves it to us.

    Copies down and up are always overlapped, and the kernel is torch's, so `overlap_cpu_optimizer_d2h_h2d` and
    `use_torch_optimizer_for_cpu_offload` change nothing.

    Args:
        host: the OptimizerConfig.

    Raises:
        ConfigError: what is copied is not to be pinned.
    """
    if not getattr(host, "optimizer_cpu_offload", False):
        return {}
    for name in _PINNED:
        if not getattr(host, name, True):
            rule = "be True with optimizer_cpu_offload, because gradients and params are copied from pinned memory"
            raise ConfigError(refusal(name, "False", rule, f"Drop --no-{name.replace('_', '-')}"))
    return {"offload_fraction": host.optimizer_offload_fraction}


def is_hosts_offloading(optimizer: Optimizer) -> bool:
    """Whether the host built its own offloading optimizer, which a factory that others copied does.

    Ours takes its place, with the Adam or SGD inside it.
    """
    kind = type(optimizer)
    is_hosts = kind.__name__ == _HYBRID and kind.__module__.startswith("megatron.core.")
    return is_hosts and optimizer.defaults["cpu_optimizer_cls"] in _OVER
