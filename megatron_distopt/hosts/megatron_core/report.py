"""The block that rank 0 logs once: what is active and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron_distopt.buffers import ShardedBuffer, dtype_name
from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.megatron_core.facts import SEAM
from megatron_distopt.hosts.megatron_core.optimizer import DistributedOptimizer
from megatron_distopt.optimizer import find_accelerator, measure_memory
from megatron_distopt.version import VERSION

__all__ = ["announce", "describe"]

_log = logging.getLogger("megatron_distopt")


def announce(text: str) -> None:
    """Logs at INFO; in a program that set up no logging at all, to stderr all the same."""
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
        _log.setLevel(logging.INFO)
    _log.info("%s", text)


def describe(optimizers: Sequence[DistributedOptimizer], config: DistOptConfig) -> str:
    """Several lines for a person.

    Args:
        optimizers: of this rank.
        config: with what the host said.
    """
    device = optimizers[0].get_loss_scale().device
    accelerator = find_accelerator(config.accelerator)
    choice = optimizers[0].sharded.plan.choice
    lines = [
        f"megatron_distopt {VERSION} is active in megatron-core ({SEAM})",
        f"  device     {device.type} (accelerator {accelerator.device_type}, named by {accelerator.named_by})",
        f"  inner      {choice.name}" + "".join(f"; {reason}" for reason in choice.why),
        f"  nonfinite  {config.nonfinite}",
    ]
    for optimizer in optimizers:
        lines += [f"  buffer     {_describe_buffer(buffer)}" for buffer in optimizer.sharded.buffers]
        memory = measure_memory(optimizer.sharded)
        params, grads = _mebibytes(memory.param_nbytes), _mebibytes(memory.grad_nbytes)
        lines.append(f"  bytes      params {params}, grads {grads}, main params {_mebibytes(memory.main_nbytes)}")
    return "\n".join(lines)


def _describe_buffer(buffer: ShardedBuffer) -> str:
    layout = buffer.layout
    dtypes = f"params {dtype_name(buffer.param.dtype)}, grads {dtype_name(buffer.grad.dtype)}"
    sizes = f"{layout.numel:,} elements in {len(layout.buckets)} bucket(s), 1/{layout.num_shards} a rank"
    return f"{dtypes}, {len(layout.slots)} params, {sizes}"


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
