"""Gradient statistics over all ranks: norm, zeros and whether everything is finite, with one small
all-reduce.

[Note: excluded from the norm] The statistics are those of the gradient of one copy of the whole
model. Over data-parallel ranks every element has one owner. Over tensor-parallel ranks a duplicated
param (a norm weight, a bias after a row-parallel layer), and over pipeline stages a shared
embedding, exists more than once; all ranks but the one that the host names exclude it
(`FlatParamKey.excluded_from_norm`).

[Note: large and infinite] The square of an fp32 number above 1.8e19 is infinite in fp32. On a CPU
the sum is looked at, which costs nothing there, and is made again in float64 where it is not
finite. Elsewhere a look would make the CPU wait for the device; there each element is squared in
float64 in the first place, in the same single read of 4 bytes. Devices without float64 take so
large a gradient for an infinite one, and `nonfinite_params` says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_distopt.comm import Group, exchange, sum_over
from megatron_distopt.device import CPU
from megatron_distopt.errors import NonFiniteGradError
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.main_params import FlatParam

_log = logging.getLogger("megatron_distopt")

#: Elements that are added up in fp32 at a time. `dot` adds them one after the other in a few lanes,
#: so its error grows with the piece: 9e-7 of the sum of squares for 2**20, 2e-8 for 2**16, which
#: costs a seventh more time.
_PIECE_NUMEL = 1 << 16
#: The same where there is no float64: a kernel adds up in a tree of its own, and launches cost
#: more.
_PIECE_NUMEL_OF_DEVICES = 1 << 26
#: Torch's sum of squares of many tensors in another dtype than theirs; older releases have only its
#: root, or neither.
_POWSUM: Callable[..., Sequence[Tensor]] | None = getattr(torch, "_foreach_powsum", None)
_HAS_WIDE_NORM = "dtype" in str(torch.ops.aten._foreach_norm.Scalar._schema)


class GradStats(NamedTuple):
    """Of the gradient as it stands in the grad buffers (not yet divided by loss scale and
    data-parallel size)."""

    sum_of_squares: float  # over the elements that this rank does not exclude
    # of those elements, how many are exactly zero; None where they were not asked for
    num_zeros: int | None
    num_nonfinite_ranks: int  # ranks on which something was inf or nan

    @property
    def is_finite(self) -> bool:
        return self.num_nonfinite_ranks == 0

    def norm(self, divisor: float) -> float:
        """L2 norm of the gradient divided by `divisor`."""
        return math.sqrt(self.sum_of_squares) / divisor


def local_stats(
    flat_params: Sequence[FlatParam],
    grads: Sequence[Tensor],
    device: torch.device,
    *,
    count_zeros: bool,
) -> Tensor:
    """What this rank contributes: sum of squares, zeros, 1 if something is not finite.

    Returns:
        [3], float64 where the device has it: sums of exactly representable squares stay exact in
            any order.
    """
    if device.type != CPU:
        return local_numbers(flat_params, grads, device, count_zeros=count_zeros)[0]
    included = duplicated = 0.0
    num_zeros = 0
    for flat, grad in zip(flat_params, grads, strict=True):
        # `dot` reads the gradient once and allocates nothing; a norm in float64 would copy it
        # first.
        sum_of_squares = float(_in_pieces(grad, _PIECE_NUMEL, torch.float64).item())
        if not math.isfinite(sum_of_squares):
            sum_of_squares = float(grad.double().square().sum().item())
        if flat.plan.key.excluded_from_norm:
            duplicated += sum_of_squares
            continue
        included += sum_of_squares
        if count_zeros:
            num_zeros += grad.numel() - flat.plan.padding_numel - int(torch.count_nonzero(grad))
    is_finite = math.isfinite(included + duplicated)
    return torch.tensor([included, num_zeros, not is_finite], dtype=torch.float64, device=device)


def local_numbers(
    flat_params: Sequence[FlatParam],
    grads: Sequence[Tensor],
    device: torch.device,
    *,
    count_zeros: bool,
) -> tuple[Tensor, Tensor]:
    """The same without a look at any of it, for a device and for a deferred check.

    Returns:
        What `local_stats` returns, and [len(flat_params)] of that dtype: 1 where the gradient of
        one is not finite.
    """
    sums = _sums_unseen(grads, device)
    zero = torch.zeros((), dtype=stats_dtype(device), device=device)
    included = [
        number for number, flat in enumerate(flat_params) if not flat.plan.key.excluded_from_norm
    ]
    duplicated = [
        number for number, flat in enumerate(flat_params) if flat.plan.key.excluded_from_norm
    ]
    total, others = (
        torch.stack([zero, *(sums[number] for number in of)]).sum() for of in (included, duplicated)
    )
    zeros = zero
    for number in included if count_zeros else ():
        numel = grads[number].numel() - flat_params[number].plan.padding_numel
        zeros = zeros + (numel - torch.count_nonzero(grads[number]))
    nonfinite = (~torch.isfinite(total + others)).to(zero.dtype)
    stats = torch.stack([total, zeros, nonfinite])
    return stats, (~torch.isfinite(torch.stack(sums))).to(stats.dtype) if sums else stats[:0]


def sum_with(stats: Tensor, extra: Tensor | None, group: Group) -> Tensor:
    """Collective: the sums of `stats`, 1-D, over the group; `extra`, added up in the same
    all-reduce, gets its own."""
    if group.size == 1:
        return stats
    if extra is None:
        sum_over(stats, group)
        return stats
    both = torch.cat([stats, extra])
    sum_over(both, group)
    extra.copy_(both[stats.numel() :])
    return both[: stats.numel()]


def nonfinite_params(flat_params: Sequence[FlatParam]) -> list[str]:
    """Names of the params whose gradient on this rank holds inf or nan; slow, for error messages.

    Where there is none, of those that count as infinite, see [Note: large and infinite].
    """
    parts = [
        (shard.name, flat.cut(flat.grad, shard))
        for flat in flat_params
        for shard in flat.plan.shards
    ]
    infinite = [name for name, part in parts if not torch.isfinite(part).all()]
    large = (
        f"{name} (finite, and above 1.8e19)"
        for name, part in parts
        if not torch.isfinite(part.dot(part))
    )
    return infinite or list(large)


def report_nonfinite(
    names: Sequence[str], group: Group, *, raises: bool, reduce_dtype: str | None, when: str = ""
) -> None:
    """Collective: says on which ranks the gradient is not finite, and of which params.

    Raises:
        NonFiniteGradError: on all ranks.
    """
    found = enumerate(exchange(names, group))
    places = [f"rank {group.global_rank(rank)}: {_some(each)}" for rank, each in found if each]
    where = _some(places, separator="; ") + when
    if reduce_dtype == "float16":
        where += ", where gradients are sent as float16, which ends at 65,504"
    if raises:
        first = ""
        if reduce_dtype == "float16":
            first = "Leave reduce_dtype='float16' out, or write 'bfloat16'. "
        raise NonFiniteGradError(
            f"The gradient is inf or nan on {where}. {first}Look at those params first; "
            "MEGATRON_DISTOPT_NONFINITE=skip leaves such steps out, =log goes on with them."
        )
    if group.rank == 0:
        _log.warning(
            "gradient is inf or nan on %s; the update goes on because nonfinite='log'", where
        )


def _some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest


def _sums_unseen(grads: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same of each without a look, see [Note: large and infinite]."""
    dtype = stats_dtype(device)
    has_wide = device.type != CPU and dtype is torch.float64 and (_POWSUM or _HAS_WIDE_NORM)
    if not has_wide:
        numel = _PIECE_NUMEL if device.type == CPU else _PIECE_NUMEL_OF_DEVICES
        return [_in_pieces(grad, numel, dtype) for grad in grads]
    if not grads:
        return []
    if _POWSUM is not None:
        return list(_POWSUM(list(grads), 2, torch.float64))
    return list(torch.stack(list(torch._foreach_norm(list(grads), 2, torch.float64))).square())


def _in_pieces(grad: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    if grad.numel() <= numel:
        return torch.dot(grad, grad).to(dtype)
    return (
        torch.stack([torch.dot(piece, piece) for piece in torch.split(grad, numel)]).to(dtype).sum()
    )
