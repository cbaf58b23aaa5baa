"""The block that rank 0 logs once: what is active and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_distopt.buffers import ShardedBuffer, dtype_name
from megatron_distopt.comm import Group, Reduction, described
from megatron_distopt.device import CPU
from megatron_distopt.optimizer.accelerator import find_accelerator, stats_dtype
from megatron_distopt.optimizer.inner import InParts
from megatron_distopt.optimizer.loss_scale import ConstantLossScale
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from megatron_distopt.optimizer.sharded import ShardedOptimizer, measure_memory
from megatron_distopt.patch_points import repairs
from megatron_distopt.version import VERSION


def describe(
    host: str,
    patch_points: Sequence[object],
    optimizers: Sequence[ShardedOptimizer],
    device: torch.device,
    *more: str,
) -> str:
    """What is active and why, in several lines. `patch_points` were replaced or called; `more` are
    lines of the host."""
    plan = optimizers[0].plan
    accelerator = find_accelerator(plan.config.accelerator)
    lines = [
        f"megatron_distopt {VERSION} is active in {host} ({', '.join(map(str, patch_points))})",
        f"  device     {device.type} (accelerator {accelerator.device_type}, named by "
        f"{accelerator.named_by})",
        f"  inner      {plan.choice.name}" + "".join(f"; {reason}" for reason in plan.choice.why),
        f"  decay      {plan.config.decay}",
        f"  nonfinite  {plan.config.nonfinite}{_when_known(optimizers[0])}",
        *(f"  {line}" for line in more),
        *(f"  host fix   {fix}" for fix in repairs),
    ]
    for optimizer in optimizers:
        lines += [f"  buffer     {_describe_buffer(buffer)}" for buffer in optimizer.buffers]
        memory = measure_memory(optimizer)
        nbytes = {
            "params": memory.param_nbytes,
            "grads": memory.grad_nbytes,
            "main params": memory.main_nbytes,
        }
        if plan.choice.is_adam:
            on_device = Precision.of(optimizer.config).nbytes_of_moments
            widths = (
                (8 if flat.on_host else on_device) * flat.main.numel()
                for flat in optimizer.flat_params
            )
            nbytes["moments"] = round(sum(widths))
        if optimizer.averages is not None:
            nbytes["averages"] = memory.average_nbytes
        short = sum(
            flat.grad.numel() for flat in optimizer.flat_params if flat.grad.dtype != torch.float32
        )
        if short:
            nbytes["fp32 copies of grads in a step"] = 4 * short
        amounts = (f"{what} {_with_unit(each)}" for what, each in nbytes.items())
        lines.append(f"  bytes      {', '.join(amounts)}")
        lines += [f"  owners     {line}" for line in _describe_owners(optimizer)]
        if optimizer.config.offload_fraction:
            lines.append(f"  host state {_describe_host_state(optimizer)}")
    return "\n".join(lines)


def _describe_host_state(optimizer: ShardedOptimizer) -> str:
    if optimizer.device.type == CPU:
        return "all of it, because the params are on the CPU; offload_fraction has no effect"
    moved = [flat.main.numel() for flat in optimizer.flat_params if flat.on_host is not None]
    total = sum(flat.main.numel() for flat in optimizer.flat_params)
    staged = measure_memory(optimizer).staging_nbytes
    where = f"of {sum(moved):,} of {total:,} elements of this rank, in fp32"
    return f"{where}, with {_with_unit(staged)} of pinned memory"


def _describe_owners(optimizer: ShardedOptimizer) -> Iterator[str]:
    """What is sent to one rank to be updated, because the border between two shards cuts it."""
    inner = optimizer.inner
    if not isinstance(inner, InParts):
        return
    for plan in inner.owners:
        if not plan.owners or plan.layout.num_shards == 1:
            continue
        num_cut = sum(owner.round is not None for owner in plan.owners)
        what = "params" if optimizer.plan.choice.updates_whole_params else "matrices"
        yield (
            f"{num_cut:,} of {len(plan.owners):,} {what} lie in several shards and are updated on "
            f"one rank each; the busiest rank computes {plan.imbalance:.2f} times the average"
        )


def sharded_over(device: torch.device, data: Group, how: Reduction) -> str:
    """Over how many ranks the optimizer is sharded, and how they communicate. Called after the
    first collective."""
    backend = f" by {described(device, data, how)}" if data.size > 1 else ""
    return f"optimizer sharded over {data.size}{backend}"


def _when_known(optimizer: ShardedOptimizer) -> str:
    """Whether the CPU waits for the check of a step, see optimizer/deferred.py. Empty if the params
    are on the CPU."""
    if optimizer.defers_check:
        return ", known one step later"
    if optimizer.device.type == CPU:
        return ""
    can_defer = stats_dtype(optimizer.device) is torch.float64 and isinstance(
        optimizer.loss_scale, ConstantLossScale
    )
    return ", and every step waits for the check" + (
        "; with adam=torch_fused no step waits" if can_defer else ""
    )


def _describe_buffer(buffer: ShardedBuffer) -> str:
    layout = buffer.layout
    dtypes = f"params {dtype_name(buffer.param.dtype)}, grads {dtype_name(buffer.grad.dtype)}"
    held = [slot.in_buffer.numel for slot in layout.slots if buffer.holds(slot.name)]
    where = f"{len(layout.buckets)} bucket(s), 1/{layout.num_shards} a rank"
    return f"{dtypes}, {len(held)} params of {sum(held):,} elements in {where}"


def _with_unit(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.1f} KiB"
