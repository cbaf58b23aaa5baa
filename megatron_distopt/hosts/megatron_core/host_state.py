"""The host's options for optimizer state on the host."""

from __future__ import annotations

from typing import Any

from megatron_distopt.errors import ConfigError, refusal

__all__ = ["host_state_of"]

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
