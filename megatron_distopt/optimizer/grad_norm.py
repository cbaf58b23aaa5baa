"""Gradient statistics over all ranks: norm, zeros and whether everything is finite, with one small
all-reduce.

[Note: excluded from the norm] The statistics are those of the gradient of one copy of the whole
model. Over data-parallel ranks every element has one owner. But tensor-parallel ranks duplicate
some params (a norm weight, a bias after a row-parallel layer), and pipeline stages share an
embedding. All ranks except the one that the host names exclude such a param
(`FlatParamKey.excluded_from_norm`).

[Note: large and infinite] The square of an fp32 number above 1.8e19 is infinite in fp32. On a CPU
the sum is read, which costs nothing there, and computed again in float64 if it is not finite. On
other devices reading it would make the CPU wait, so each element is squared in float64 at once,
which still reads only 4 bytes. Devices without float64 treat such a large gradient as infinite, and
`nonfinite_params` says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_distopt.comm import Group, all_gather_objects, sum_over
from megatron_distopt.device import CPU
from megatron_distopt.errors import NonFiniteGradError
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.main_params import FlatParam

_log = logging.getLogger("megatron_distopt")

#: How many elements are summed in fp32 at a time. `dot` sums sequentially in a few lanes, so its
#: error grows with the piece: 9e-7 of the sum of squares for 2**20, and 2e-8 for 2**16, which takes
#: a seventh more time.
_PIECE_NUMEL = 1 << 16
#: The same for devices without float64, whose kernels sum in a tree and whose launches cost more.
_PIECE_NUMEL_OF_DEVICES = 1 << 26
#: torch's sum of squares of many tensors in a wider dtype. Older releases have only the root of it,
#: or neither.
_POWSUM: Callable[..., Sequence[Tensor]] | None = getattr(torch, "_foreach_powsum", None)
_HAS_WIDE_NORM = "dtype" in str(torch.ops.aten._foreach_norm.Scalar._schema)


class GradStats(NamedTuple):
    """Statistics of the gradient as it is in the grad buffers, not yet divided by loss scale and
    data-parallel size."""

    sum_of_squares: float  # over the elements that this rank does not exclude
    # how many of those elements are exactly zero; None if they were not counted
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
    """This rank's contribution: the sum of squares, the number of zeros, and 1 if something is not
    finite.

    Returns:
        [3], float64 if the device has it, so that sums of exactly representable squares are exact
            in any order.
    """
    if device.type != CPU:
        return local_numbers(flat_params, grads, device, count_zeros=count_zeros)[0]
    included = duplicated = 0.0
    num_zeros = 0
    for flat, grad in zip(flat_params, grads, strict=True):
        # `dot` reads the gradient once and allocates nothing; a float64 norm would copy it first.
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
    """The same without waiting for the device, also for a deferred check.

    Returns:
        What `local_stats` returns, and [len(flat_params)] of that dtype: 1 for each flat param
        whose gradient is not finite.
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
    """Collective: returns the sums of `stats`, 1-D, over the group. `extra` is summed in place in
    the same all-reduce."""
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

    If there is none, those that count as infinite, see [Note: large and infinite].
    """
    parts = [
        (shard.name, flat.cut(flat.grad, shard))
        for flat in flat_params
        for shard in flat.plan.shards
    ]
    infinite = [name for name, part in parts if not torch.isfinite(part).all()]
    large = (
        f"{name} (finite, but above 1.8e19)"
        for name, part in parts
        if not torch.isfinite(part.dot(part))
    )
    return infinite or list(large)


def report_nonfinite(
    names: Sequence[str], group: Group, *, raises: bool, reduce_dtype: str | None, when: str = ""
) -> None:
    """Collective: raises an error or logs a warning that says on which ranks and of which params
    the gradient is not finite.

    Raises:
        NonFiniteGradError: on all ranks, if `raises`.
    """
    found = enumerate(all_gather_objects(names, group))
    places = [f"rank {group.global_rank(rank)}: {_some(each)}" for rank, each in found if each]
    where = _some(places, separator="; ") + when
    if reduce_dtype == "float16":
        where += "; gradients are sent as float16, whose largest number is 65,504"
    if raises:
        first = ""
        if reduce_dtype == "float16":
            first = "Leave reduce_dtype='float16' out, or write 'bfloat16'. "
        raise NonFiniteGradError(
            f"The gradient is inf or nan on {where}. {first}Look at those params first, or set "
            "MEGATRON_DISTOPT_NONFINITE=skip to skip such steps or =log to update anyway."
        )
    if group.rank == 0:
        _log.warning(
            "The gradient is inf or nan on %s. The params are updated anyway, because nonfinite is "
            "'log'.",
            where,
        )


def _some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest


def _sums_unseen(grads: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The sum of squares of each gradient, without waiting for the device; see [Note: large and
    infinite]."""
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
