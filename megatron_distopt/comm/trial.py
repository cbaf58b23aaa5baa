"""Whether a backend can do what a step needs, found out on a few numbers before training."""

from __future__ import annotations

import torch

from megatron_distopt.comm.collectives import AS_THEY_ARE, Reduction, all_gather, carrier_of, reduce_scatter
from megatron_distopt.comm.groups import Group
from megatron_distopt.errors import ConfigError, refusal

__all__ = ["try_collectives"]

#: torch's backend of ranks that do not exist: its collectives send nothing.
_FAKE = "fake"


def try_collectives(device: torch.device, group: Group, how: Reduction = AS_THEY_ARE) -> None:
    """Collective: a reduce-scatter and an all-gather of one number a rank.

    Args:
        device: of what will travel.
        group: over which.
        how: grads will be added up.

    Raises:
        ConfigError: the backend does not have one of them, or gives something else.
    """
    if group.size == 1 or device.type == "meta" or carrier_of(device, group) == _FAKE:
        return
    numbers = torch.full((group.size,), float(how.divide_by), device=device)
    shard = numbers[group.rank : group.rank + 1]
    try:
        reduce_scatter(numbers, shard, group, how)
        all_gather(numbers, shard, group)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _missing(device, group, reason) from error
    if numbers.tolist() != [group.size] * group.size:
        raise _missing(device, group, f"ones of {group.size} ranks add up to {numbers.tolist()}")


def _missing(device: torch.device, group: Group, reason: str) -> ConfigError:
    got = f"{carrier_of(device, group)} on {device.type} ({reason})"
    rule = "carry a reduce-scatter and an all-gather of the model's tensors"
    remedy = "Write --distributed-backend nccl on GPUs, gloo on CPUs, or give init_process_group another backend"
    return ConfigError(refusal("backend", got, rule, remedy))
