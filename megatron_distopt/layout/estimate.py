"""Computes what one rank will hold and send, before anything is allocated.

`optimizer.measure_memory` reads the same bytes off tensors; tests/cli/test_plan_figures.py and
tests/sim/test_offload.py compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import astuple, dataclass
from itertools import groupby

from megatron_distopt.layout.buckets import BLOCK_NUMEL, BufferLayout
from megatron_distopt.layout.shards import owned_shards, plan_flat_params

#: Bytes for an element of main params of 16-bit params and of moments, by form, without scales.
MAIN_NBYTES = {"float32": 4, "remainder": 2, "bfloat16": 0}
MOMENT_NBYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
#: The form that has a scale of one byte for each block of elements.
WITH_SCALES = "int8"
_FP32_NBYTES = 4
#: Every flat param that Adam updates counts its updates in an fp32 tensor of one element.
_COUNTER_NBYTES = 4
#: The sum of squares, the number of zeros and whether something is not finite, each a float64.
_STATISTICS_NBYTES = 3 * 8


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes for an element of each kind of tensor."""

    param: int  # param buffer
    grad: int  # grad buffer
    main: int  # main params; 0 if the model param is its own main param
    moments: int = 8  # both moments together
    reduce: int = 0  # a gradient that is communicated; 0 for as many as in the grad buffer
    moment_scales: int = 0  # how many of the two moments have scales
    average: int = 0  # averages of main params


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one rank holds, padding included."""

    param_nbytes: int = 0  # the param buffer, which every rank holds whole
    grad_nbytes: int = 0  # the grad buffer, which every rank holds whole
    main_nbytes: int = 0  # main params of this rank, on any device
    moment_nbytes: int = 0  # moments of this rank and counts of updates, on any device
    average_nbytes: int = 0  # averages of this rank, on any device
    host_nbytes: int = 0  # the main params, moments and averages that are in CPU memory
    # pinned CPU memory, to copy gradients to the CPU and params back
    staging_nbytes: int = 0
    step_nbytes: int = 0  # on the device during a step: fp32 copies of 16-bit gradients
    num_flat_params: int = 0  # tensors that the inner optimizer updates

    @property
    def lasting_nbytes(self) -> int:
        """Bytes that stay allocated on the device between steps."""
        state_nbytes = self.main_nbytes + self.moment_nbytes + self.average_nbytes
        return self.param_nbytes + self.grad_nbytes + state_nbytes - self.host_nbytes

    def plus(self, other: Footprint) -> Footprint:
        return Footprint(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def footprint_of(
    layout: BufferLayout,
    rank: int,
    widths: Widths,
    key_of: Callable[[str], Hashable],
    on_host: Collection[int] = (),
) -> Footprint:
    """What a rank of the data-parallel group holds for one grad buffer and its param buffer.

    Args:
        layout: the layout of both buffers.
        rank: the rank in the group.
        widths: bytes for an element of the tensors on the device; state in CPU memory is fp32.
        key_of: takes a param's name; neighbours with equal keys are one flat param.
        on_host: indices of the buckets whose state is in CPU memory, see `choose_buckets`.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 96), ParamSpec("b", 32)], num_shards=2)
    >>> held = footprint_of(layout, 0, Widths(param=2, grad=4, main=4), lambda name: 0)
    >>> held.param_nbytes, held.grad_nbytes, held.main_nbytes, held.moment_nbytes
    (320, 640, 320, 644)
    """
    flat_params = plan_flat_params(owned_shards(layout, rank), key_of)
    form_of_host = Widths(widths.param, widths.grad, main=_FP32_NBYTES, average=widths.average)
    found = Counter(
        param_nbytes=layout.numel * widths.param, grad_nbytes=layout.numel * widths.grad
    )
    for bucket, members in groupby(flat_params, key=lambda flat: flat.bucket):
        in_bucket, form = list(members), form_of_host if bucket in on_host else widths
        for flat in in_bucket:
            numel = flat.in_buffer.numel
            num_blocks = -(-numel // BLOCK_NUMEL)
            main = numel * form.main
            moments = numel * form.moments + num_blocks * form.moment_scales + _COUNTER_NBYTES
            found.update(
                num_flat_params=1,
                main_nbytes=main,
                moment_nbytes=moments,
                average_nbytes=numel * form.average,
            )
            if bucket in on_host:
                found["host_nbytes"] += main + moments + numel * form.average
            if widths.grad < _FP32_NBYTES:
                found["step_nbytes"] += numel * _FP32_NBYTES
        if bucket in on_host:
            # The pinned tensors of a bucket span the padding between its flat params.
            staged = in_bucket[-1].in_buffer.stop - in_bucket[0].in_buffer.start
            found["staging_nbytes"] += staged * (_FP32_NBYTES + widths.param)
    return Footprint(**found)


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends in a step by collectives of one kind; it receives as much."""

    count: int
    nbytes: int

    def plus(self, other: Sent | None) -> Sent:
        return self if other is None else Sent(self.count + other.count, self.nbytes + other.nbytes)


def sent_for(layout: BufferLayout, widths: Widths) -> dict[str, Sent]:
    """What one rank sends for a grad buffer and its param buffer, by kind of collective: a
    reduce-scatter and an all-gather for each bucket.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> sent_for(lay_out([ParamSpec("a", 128)], num_shards=2), Widths(param=2, grad=4, main=4))
    {'reduce-scatter': Sent(count=1, nbytes=256), 'all-gather': Sent(count=1, nbytes=128)}
    """
    others = layout.numel - layout.shard_numel
    count = len(layout.buckets) if layout.num_shards > 1 else 0
    return {
        "reduce-scatter": Sent(count, others * (widths.reduce or widths.grad)),
        "all-gather": Sent(count, others * widths.param),
    }


def sent_for_statistics(num_ranks: int) -> Sent:
    """What one rank sends in the all-reduce of norm, zeros and found-inf over all ranks of the
    model.

    >>> sent_for_statistics(2), sent_for_statistics(1)
    (Sent(count=1, nbytes=24), Sent(count=0, nbytes=0))
    """
    return Sent(int(num_ranks > 1), 2 * (_STATISTICS_NBYTES * (num_ranks - 1) // num_ranks))
