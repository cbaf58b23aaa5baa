"""Estimates, before anything is allocated, of the memory of one rank and of the bytes that its collectives send.

`optimizer.measure_memory` reads the same bytes off tensors; tests/cli/test_plan_figures.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields
from enum import Enum

from megatron_distopt.layout.buckets import BufferLayout
from megatron_distopt.layout.shards import owned_shards, plan_flat_params

__all__ = ["Collective", "Footprint", "Kind", "Widths", "collectives_of", "estimate_footprint", "stats_collective"]

#: Elements with one scale, where the state is kept in codes.
_BLOCK_NUMEL = 128
#: Every flat param has a tensor of its own in which its updates are counted: one fp32.
_STEP_NBYTES = 4
#: An fp32 copy of a 16-bit gradient lives from the statistics to the update.
_FP32_NBYTES = 4
#: Sum of squares, zeros and whether something is not finite, each a float64.
_STATS_NBYTES = 3 * 8


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes an element of each kind of tensor.

    Args:
        param: of the param buffer.
        grad: of the grad buffer.
        main: of main params of their own; 0 where the model param is its own main param.
        moments: of all that the inner optimizer keeps for an element.
        reduce: of a gradient while it is communicated; 0 for as many as in the grad buffer.
        main_scales, moment_scales: of how many tensors that are kept for an element there is a scale of one byte for
            every block of 128.
    """

    param: int
    grad: int
    main: int
    moments: int = 8
    reduce: int = 0
    main_scales: int = 0
    moment_scales: int = 0


@dataclass(frozen=True)
class Footprint:
    """What one rank holds, in bytes, padding included.

    Args:
        param_nbytes, grad_nbytes: buffers; every rank holds them whole.
        main_nbytes, moment_nbytes: of the flat params that the rank owns, the counters of updates included.
        undistributed_nbytes: main params and moments of a rank that holds the state of all params.
        backward_nbytes: for a moment in backward: the largest gradient before it is added to the buffer.
        step_nbytes: for the length of a step: fp32 copies of 16-bit gradients.
        num_flat_params: tensors that the inner optimizer updates.
    """

    param_nbytes: int = 0
    grad_nbytes: int = 0
    main_nbytes: int = 0
    moment_nbytes: int = 0
    undistributed_nbytes: int = 0
    backward_nbytes: int = 0
    step_nbytes: int = 0
    num_flat_params: int = 0

    @property
    def lasting_nbytes(self) -> int:
        """What stays allocated between steps."""
        return self.param_nbytes + self.grad_nbytes + self.main_nbytes + self.moment_nbytes

    def plus(self, other: Footprint) -> Footprint:
        """The footprint of two buffers together. Only one gradient at a time is outside of them."""
        added = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Footprint(**{**added, "backward_nbytes": max(self.backward_nbytes, other.backward_nbytes)})


def estimate_footprint(layout: BufferLayout, rank: int, widths: Widths, key_of: Callable[[str], Hashable]) -> Footprint:
    """What `rank` holds for one grad buffer and its param buffer.

    Args:
        layout: of both.
        rank: in the data-parallel group.
        widths: bytes an element.
        key_of: from a param's name; neighbours with equal keys are one flat param.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 96), ParamSpec("b", 32)], num_shards=2)
    >>> held = estimate_footprint(layout, 0, Widths(param=2, grad=4, main=4), lambda name: 0)
    >>> held.param_nbytes, held.grad_nbytes, held.main_nbytes, held.moment_nbytes
    (320, 640, 320, 644)
    """
    flat_params = plan_flat_params(owned_shards(layout, rank), key_of)
    owned = sum(flat.in_buffer.numel for flat in flat_params)
    blocks = sum(-(-flat.in_buffer.numel // _BLOCK_NUMEL) for flat in flat_params)
    numels = [slot.in_buffer.numel for slot in layout.slots]
    scales = (widths.main_scales + widths.moment_scales) / _BLOCK_NUMEL
    return Footprint(
        param_nbytes=layout.numel * widths.param,
        grad_nbytes=layout.numel * widths.grad,
        main_nbytes=owned * widths.main + blocks * widths.main_scales,
        moment_nbytes=owned * widths.moments + blocks * widths.moment_scales + len(flat_params) * _STEP_NBYTES,
        undistributed_nbytes=round(sum(numels) * (widths.main + widths.moments + scales)),
        backward_nbytes=max(numels) * widths.param,
        step_nbytes=owned * _FP32_NBYTES if widths.grad < _FP32_NBYTES else 0,
        num_flat_params=len(flat_params),
    )


class Kind(Enum):
    """The kinds of collectives of a step."""

    #: Sums the gradients of all ranks into the shards of their owners.
    REDUCE_SCATTER = "reduce-scatter"
    #: Sends the owners' params to all ranks.
    ALL_GATHER = "all-gather"
    #: Adds up three numbers of all ranks: norm, zeros, found-inf.
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step.

    Args:
        kind: which collective.
        nbytes: of the whole tensor, in the dtype in which it travels.
        num_ranks: that take part.
        bucket: index; None of the statistics.
    """

    kind: Kind
    nbytes: int
    num_ranks: int
    bucket: int | None = None

    @property
    def sent_nbytes(self) -> int:
        """Bytes that each rank sends, and receives. A ring and a direct exchange between all pairs send the same.

        >>> Collective(Kind.REDUCE_SCATTER, 1000, 4).sent_nbytes, Collective(Kind.ALL_REDUCE, 24, 2).sent_nbytes
        (750, 24)
        """
        once = self.nbytes * (self.num_ranks - 1) // self.num_ranks
        return 2 * once if self.kind is Kind.ALL_REDUCE else once

    @property
    def num_hops(self) -> int:
        """Number of messages that wait for each other: around a ring, or up and down a tree for a small all-reduce.

        >>> Collective(Kind.ALL_GATHER, 1000, 4).num_hops, Collective(Kind.ALL_REDUCE, 24, 4).num_hops
        (3, 4)
        """
        is_tree = self.kind is Kind.ALL_REDUCE
        return 2 * (self.num_ranks - 1).bit_length() if is_tree else self.num_ranks - 1


def collectives_of(layout: BufferLayout, widths: Widths) -> Iterator[Collective]:
    """A reduce-scatter and an all-gather a bucket, in buffer order; none on one rank.

    Args:
        layout: of one grad buffer and its param buffer.
        widths: bytes an element.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 128)], num_shards=2)
    >>> [each.nbytes for each in collectives_of(layout, Widths(param=2, grad=4, main=4, reduce=2))]
    [256, 256]
    """
    for kind, width in ((Kind.REDUCE_SCATTER, widths.reduce or widths.grad), (Kind.ALL_GATHER, widths.param)):
        for bucket in layout.buckets if layout.num_shards > 1 else ():
            yield Collective(kind, bucket.in_buffer.numel * width, layout.num_shards, bucket.index)


def stats_collective(num_ranks: int) -> Iterator[Collective]:
    """The all-reduce of the statistics; none on one rank.

    Args:
        num_ranks: that hold a part of the model.
    """
    if num_ranks > 1:
        yield Collective(Kind.ALL_REDUCE, _STATS_NBYTES, num_ranks)
