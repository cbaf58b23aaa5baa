"""The host's options for the precision of the optimizer state, and how the host is kept from serving them itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_distopt.buffers import dtype_name
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.megatron_core.capabilities import with_values

#: What the options of the host that are torch dtypes mean; its 8-bit state is fp8.
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "float8_e4m3fn",
}


def precision_of(host: Any) -> dict[str, str]:
    """The options for the precision of the state; empty where the host leaves them to us.

    Raises:
        ConfigError: a dtype that the host's own optimizer does not know either.
    """
    if not getattr(host, "use_precision_aware_optimizer", False):
        return {}
    dtypes = {name: getattr(host, name) for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            names = ", ".join(map(dtype_name, _DTYPES))
            remedy = f"Write --{name.replace('_', '-')} fp32"
            raise ConfigError(refusal(name, dtype_name(dtype), f"be one of {names}", remedy))
    precision = {name: _DTYPES[dtype] for name, dtype in dtypes.items()}
    # The host's own remainders are of bf16 params as well.
    if precision["main_params_dtype"] == "float32" and host.bf16 and getattr(host, "store_param_remainders", False):
        precision["main_params_dtype"] = "remainder"
    return precision


def in_full_precision(config: Any) -> AbstractContextManager[None]:
    """In the block the host builds an inner optimizer as if all state were fp32 and on the device: ours replaces it.

    Args:
        config: the host's OptimizerConfig.
    """
    names = (
        "use_precision_aware_optimizer",
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        "optimizer_cpu_offload",
    )
    return with_values(config, dict.fromkeys(names, False))
