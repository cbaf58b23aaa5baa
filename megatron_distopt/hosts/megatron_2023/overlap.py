"""Which communication is overlapped in this fork, and in which buckets.

The fork's own DistributedDataParallel has neither overlap nor buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from megatron_distopt.comm import Group, shares_memory
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.base import check_bucket_size
from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan
from megatron_distopt.layout import ParamSpec, default_bucket_size, lay_out

__all__ = ["NO_OVERLAP", "OverlapPlan", "in_buckets", "num_microbatches_of", "plan_overlap"]

#: Where a fork keeps the number of microbatches of a step.
_COUNT, _COUNTED_IN = "get_num_microbatches", ("megatron", "megatron.global_vars")


@dataclass(frozen=True)
class OverlapPlan:
    """What was decided.

    Args:
        grads: whether their reduction is overlapped with backward.
        params: whether their gather is overlapped with the next forward pass.
        bucket_size: from the elements of a buffer to those of a bucket; None for one bucket a buffer.
        why_not: the reason why grads are not overlapped, for the start-up block.
    """

    grads: bool
    params: bool
    bucket_size: Callable[[int], int] | None
    why_not: str = ""

    def __str__(self) -> str:
        grads = "overlapped with backward" if self.grads else f"after backward ({self.why_not})"
        return f"grads {grads}, params {'overlapped with' if self.params else 'before'} the next forward"


NO_OVERLAP = OverlapPlan(grads=False, params=False, bucket_size=None)


def num_microbatches_of() -> Callable[[], int] | None:
    """The fork's function; None where it has none."""
    for name in _COUNTED_IN:
        found: Callable[[], int] | None = getattr(import_module(name), _COUNT, None)
        if found is not None:
            return found
    return None


def plan_overlap(
    config: DistOptConfig, data: Group, buffers: Sequence[BufferPlan], device: torch.device, args: object
) -> OverlapPlan:
    """Decides by the options and by what this fork allows.

    Args:
        config: merged.
        data: the ranks over which dense params are sharded.
        buffers: each of one bucket, as the fork has them.
        device: of all params.
        args: of the fork.

    Raises:
        ConfigError: an option asks for what this fork does not allow.
    """
    check_bucket_size(config, data.size, "--distopt-bucket-size 40000000")
    _check_readers(config, args)
    why_not = _why_not(config, data, buffers, device, args)
    grads = config.overlap_grad_reduce if config.overlap_grad_reduce is not None else not why_not
    params = config.overlap_param_gather and data.size > 1
    has_buckets = grads or params or config.bucket_size is not None
    return OverlapPlan(grads, params, _bucket_size(config, data) if has_buckets else None, why_not)


def _check_readers(config: DistOptConfig, args: object) -> None:
    """Refuses flags of the fork under which its training loop reads params outside of a forward pass."""
    readers = {
        "--log-params-norm": bool(getattr(args, "log_params_norm", False)),
        "--vision-pretraining-type dino": getattr(args, "vision_pretraining_type", None) == "dino",
    }
    for flag, is_set in readers.items():
        if config.overlap_param_gather and is_set:
            rule = "be off where the fork reads params outside of a forward pass"
            remedy = f"Drop --distopt-overlap-param-gather, or {flag}"
            raise ConfigError(refusal("overlap_param_gather", f"set together with {flag}", rule, remedy))


def _why_not(
    config: DistOptConfig, data: Group, buffers: Sequence[BufferPlan], device: torch.device, args: object
) -> str:
    """The reason why overlapping grads with backward is not safe or gains nothing; empty where it does gain."""
    if num_microbatches_of() is None:
        if config.overlap_grad_reduce:
            got = "unknown: the fork has no get_num_microbatches"
            rule = "be known where grads are overlapped with backward"
            remedy = "Write --distopt-overlap-grad-reduce no, or give the fork that function"
            raise ConfigError(refusal("number of microbatches", got, rule, remedy))
        return "the number of microbatches is unknown"
    numel_of, dense = _bucket_size(config, data), [each.layout.numel for each in buffers if not each.is_ours]
    reasons = {
        "asked for": config.overlap_grad_reduce is False,
        "one data-parallel rank": data.size == 1,
        "gradients are added up by a kernel of the fork": bool(getattr(args, "gradient_accumulation_fusion", False)),
        "all grads fit into one bucket": all(numel_of(numel) >= numel for numel in dense),
        # Copies that the processors make while they compute are not hidden, and cost more than copies afterwards.
        "its ranks share memory": shares_memory(device, data),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _bucket_size(config: DistOptConfig, data: Group) -> Callable[[int], int]:
    return lambda numel: config.bucket_size or default_bucket_size(numel, data.size)


def in_buckets(plan: BufferPlan, overlap: OverlapPlan, late: Collection[str]) -> BufferPlan:
    """Cuts a buffer into buckets; params keep the fork's order, which is roughly that of backward.

    Args:
        plan: of one bucket.
        overlap: says how large the buckets are.
        late: params to whose gradients the fork adds after backward; they get buckets of their own, at the end.
    """
    if overlap.bucket_size is None or plan.is_ours:
        return plan
    # Experts have a place in the fork's buffer and a buffer of their own.
    slots = [slot for slot in plan.layout.slots if slot.name in plan.params]
    specs = [ParamSpec(slot.name, slot.in_buffer.numel) for slot in slots]
    layout = lay_out(
        [spec for spec in specs if spec.name not in late],
        last=[spec for spec in specs if spec.name in late],
        num_shards=plan.group.size,
        bucket_size=overlap.bucket_size(plan.layout.numel),
    )
    return dataclasses.replace(plan, layout=layout)
