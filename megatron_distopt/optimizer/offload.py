"""State on the host: some buckets keep their main params and moments in CPU memory and are updated
there.

[Note: state on the host] A fraction of the state of 16-bit params is kept in CPU memory, by whole
buckets: those whose gradients arrive first in backward. Model params and gradients stay in the
device's buffers, every element has one main param, and the gradient statistics are measured on the
device. A step

1. queues copies of the gradients to the CPU, bucket by bucket, on a stream of their own;
2. queues the update of the state on the device;
3. waits for the numbers of the step (divisor and non-finite flag), if the check is deferred and
   they are on the device;
4. for each bucket waits for its gradients, updates it with the CPU's kernel, and queues the copy of
   the rounded params to the device on another stream;
5. makes the current stream wait for those copies, so that the all-gather sends the new params.

So copies in both directions, the CPU's kernel and the device's update run at the same time. The CPU
waits once for each bucket; a step without state on the host does not wait. Tensors that are copied
are pinned. Main params and moments are not, because only the CPU uses them. They are fp32, whatever
the form of the state on the device. An fp32 param is its own main param in the param buffer on the
device, and its state stays there, too: a main param in CPU memory would be a second copy of it.

Results are bit-identical to those without offload if the kernel is the same and the state is exact
(tests/sim/programs.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU, fence, mark, new_stream, on_stream
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout import BufferLayout, choose_buckets
from megatron_distopt.optimizer.deferred import HostCopy
from megatron_distopt.optimizer.inner import Build, Groups, InnerChoice
from megatron_distopt.optimizer.inner_options import option_values, without_implementation
from megatron_distopt.optimizer.inner_step import update_mains
from megatron_distopt.optimizer.main_params import FlatParam, MainGrads, OnHost


def buckets_on_host(
    layouts: Sequence[tuple[BufferLayout, torch.dtype]], fraction: float, device: torch.device
) -> list[frozenset[int]]:
    """The buckets whose state is kept in CPU memory, by buffer; the same on all ranks that share
    the layouts.

    Args:
        layouts: the layouts of the buffers with the dtypes of their params, in the order in which
            gradients arrive.
        fraction: the fraction of the elements of 16-bit params that the buckets must reach.
        device: the device of the params. If it is the CPU, no buckets are chosen, because all state
            is in CPU memory already.
    """
    eligible = {
        number: layout for number, (layout, dtype) in enumerate(layouts) if dtype != torch.float32
    }
    taken = fraction if device.type != CPU else 0.0
    chosen = choose_buckets(list(eligible.values()), taken)
    by_buffer = dict(zip(eligible, chosen, strict=True))
    return [by_buffer.get(number, frozenset()) for number in range(len(layouts))]


def host_nbytes(
    layouts: Sequence[tuple[BufferLayout, torch.dtype]],
    fraction: float,
    device: torch.device,
    state_nbytes: int = 12,
) -> int:
    """Bytes of CPU memory for one rank: `state_nbytes` for each element, and pinned memory for
    gradients and new params."""
    total = 0
    for (layout, dtype), buckets in zip(
        layouts, buckets_on_host(layouts, fraction, device), strict=True
    ):
        for bucket in buckets:
            numel = layout.buckets[bucket].in_buffer.numel // layout.num_shards
            total += (
                state_nbytes * numel
                + pinned_nbytes(4 * numel)
                + pinned_nbytes(dtype.itemsize * numel)
            )
    return total


def check_offload(
    layouts: Sequence[tuple[BufferLayout, torch.dtype]],
    config: DistOptConfig,
    device: torch.device,
    choice: InnerChoice | None = None,
) -> None:
    """Checks, before anything is allocated, that the state can be kept in CPU memory.

    Raises:
        ConfigError: if the inner optimizer, given by `choice`, has no kernel for it, if all params
            are fp32, or if the machine has too little memory for the state of its ranks.
    """
    fraction = config.offload_fraction
    if fraction == 0.0 or device.type == CPU or not layouts:
        return
    others: dict[Feature, str] = {}
    if choice is not None and choice.on_host is None:
        others[Feature.NO_HOST_KERNEL] = choice.name
    if all(dtype == torch.float32 for _, dtype in layouts):
        others[Feature.ONLY_FP32_PARAMS] = "a model with only fp32 params"
    check_compatible(config, others)
    num_ranks, available = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _available_nbytes()
    state_nbytes = 12 if config.ema_decay is None else 16
    needed = num_ranks * host_nbytes(layouts, fraction, device, state_nbytes)
    if needed > available:
        fitting = greatest_fraction(
            lambda other: num_ranks * host_nbytes(layouts, other, device, state_nbytes) <= available
        )
        raise ConfigError(
            f"offload_fraction={fraction} needs {needed:,} bytes on this machine for {num_ranks} "
            f"rank(s), but only {available:,} bytes are available. Write "
            f"offload_fraction={fitting}."
        )


def greatest_fraction(fits: Callable[[float], bool]) -> float:
    """The greatest multiple of 0.01 that fits. Tries all of them, because buckets are whole.

    >>> greatest_fraction(lambda fraction: fraction <= 0.3)
    0.3
    >>> greatest_fraction(lambda fraction: fraction < 2)
    1.0
    """
    greatest = 0.0
    for hundredth in range(101):
        fraction = hundredth / 100
        if fits(fraction):
            greatest = fraction
    return greatest


def pinned_nbytes(nbytes: int) -> int:
    """Bytes that a pinned tensor takes: torch's allocator on CUDA and ROCm rounds up to powers of
    two.

    >>> pinned_nbytes(4096), pinned_nbytes(4097), pinned_nbytes(0)
    (4096, 8192, 0)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _available_nbytes() -> int:
    """Bytes of memory that could be allocated now, within the machine's memory and the container's
    limit."""
    meminfo, limit = _numbers_in("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    known = [meminfo["MemAvailable:"] << 10] if "MemAvailable:" in meminfo else []
    if limit.exists() and limit.read_text().strip().isdigit():
        used = _numbers_in("/sys/fs/cgroup/memory.stat").get("anon", 0)
        known.append(int(limit.read_text()) - used)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(known, default=free), 0)


def _numbers_in(path: str) -> dict[str, int]:
    """The numbers in a file of the kernel, by the word before them; empty if there is no such
    file."""
    numbers = dict[str, int]()
    for line in Path(path).read_text().splitlines() if Path(path).exists() else ():
        name, number, *_ = *line.split(), "", ""
        if number.isdigit():
            numbers[name] = int(number)
    return numbers


#: A flat param with its pinned tensors.
_Member = tuple[FlatParam, OnHost]


@dataclass(frozen=True, eq=False)
class GradsToHost:
    """Gradients that are being copied to the CPU, and their divisor."""

    # by bucket, its flat params with their pinned tensors, and a call that waits for the gradients
    buckets: Sequence[tuple[Sequence[_Member], Callable[[], None]]]
    divisor: float | Tensor  # of the gradients, if it is known already
    numbers: HostCopy | None  # divisor and non-finite flag, if these are being copied as well
    groups: Groups  # options of the param groups before the device's update
    grads: Sequence[Tensor]  # the gradients on the device


class HostUpdates:
    """Updates the flat params whose state is in CPU memory; see [Note: state on the host].

    Args:
        inner: the inner optimizer of all flat params; its state and options are used.
        build: makes the same optimizer for params in CPU memory.
        device: the device of the model params.
    """

    def __init__(self, inner: Optimizer, build: Build, device: torch.device) -> None:
        self._inner, self._build, self._device = inner, build, device
        self._down, self._up = new_stream(device), new_stream(device)
        self._on_host: Optimizer | None = None

    def copy_grads(
        self,
        flat_params: Sequence[FlatParam],
        grads: MainGrads,
        divisor: float | Tensor,
        found_inf: Tensor | None,
    ) -> GradsToHost:
        """Queues the copies of the gradients of flat params in CPU memory, without waiting."""
        numbers = None
        if isinstance(divisor, Tensor) or found_inf is not None:
            known = divisor if isinstance(divisor, Tensor) else self._scalar(divisor)
            skips = self._scalar(0.0) if found_inf is None else found_inf
            numbers = HostCopy(torch.stack([known, skips]))
        pairs = zip(flat_params, grads, strict=True)
        chosen = [
            (flat, flat.on_host, grad) for flat, grad in pairs if flat.on_host and grad is not None
        ]
        measured, buckets = fence(self._device), []
        with on_stream(self._down, self._device):
            measured()
            for _, members in groupby(
                chosen, key=lambda member: (_address(member[0].model), member[0].plan.bucket)
            ):
                bucket = list(members)
                _copy_all([(host.arrived, grad) for _, host, grad in bucket])
                updated = [(flat, host) for flat, host, _ in bucket]
                buckets.append((updated, mark(self._device)))
        groups = [_options_on_cpu(group) for group in self._inner.param_groups]
        return GradsToHost(buckets, divisor, numbers, groups, [grad for _, _, grad in chosen])

    def update(self, on_the_way: GradsToHost) -> None:
        """Updates bucket by bucket as the gradients arrive, and makes the current stream wait for
        the new params."""
        divisor, found_inf = (
            on_the_way.numbers.values if on_the_way.numbers else (float(on_the_way.divisor), 0.0)
        )
        if found_inf or not on_the_way.buckets:
            return
        inner = self._prepared(on_the_way)
        for bucket, arrived in on_the_way.buckets:
            arrived()
            for number, (group, options) in enumerate(
                zip(inner.param_groups, on_the_way.groups, strict=True)
            ):
                members = [flat.main for flat, _ in bucket if flat.plan.key.group == number]
                group.update({**options, "params": members})
            arrivals = [host.arrived for _, host in bucket]
            update_mains(inner, [flat.main for flat, _ in bucket], arrivals, divisor)
            for flat, host in bucket:
                host.model.copy_(flat.main)
            with on_stream(self._up, self._device):
                _copy_all([(flat.model, host.model) for flat, host in bucket])
        with on_stream(self._up, self._device):
            uploaded = fence(self._device)
        uploaded()
        if divisor != 1.0:  # the device's own kernel leaves divided gradients, too
            torch._foreach_div_(list(on_the_way.grads), self._scalar(divisor))

    def _scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=self._device)

    def _prepared(self, on_the_way: GradsToHost) -> Optimizer:
        """The optimizer for params in CPU memory, built again if there are more param groups."""
        members = [pair for bucket, _ in on_the_way.buckets for pair in bucket]
        known = 0 if self._on_host is None else len(self._on_host.param_groups)
        if self._on_host is None or known != len(on_the_way.groups):
            groups: Groups = [
                {
                    **options,
                    "params": [flat.main for flat, _ in members if flat.plan.key.group == number],
                }
                for number, options in enumerate(on_the_way.groups)
            ]
            self._on_host = self._build(groups)
        self._on_host.state = self._inner.state  # other code may have assigned another one
        return self._on_host


def _options_on_cpu(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options in the form that the CPU's kernels take. Waits for a tensor of a device."""
    options = option_values(without_implementation(group))
    for key, value in options.items():
        if isinstance(value, Tensor) and value.device.type != CPU:
            options[key] = value.item()
    return options


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Queues a copy of the second tensor of every pair into the first, 1-D. Pairs that are
    neighbours in both memories are copied at once."""
    stretches: list[list[tuple[Tensor, Tensor]]] = []
    for pair in pairs:
        if not (stretches and all(map(_follows, pair, stretches[-1][-1]))):
            stretches.append([])
        stretches[-1].append(pair)
    for stretch in stretches:
        numel = sum(into.numel() for into, _ in stretch)
        into, source = (
            tensor.as_strided((numel,), (1,), tensor.storage_offset()) for tensor in stretch[0]
        )
        into.copy_(source, non_blocking=True)


def _follows(tensor: Tensor, other: Tensor) -> bool:
    is_same = _address(tensor) == _address(other)
    return is_same and int(tensor.storage_offset()) == other.storage_offset() + other.numel()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
