"""Estimates, before anything is allocated, of the memory of one rank and of the bytes that its step moves and sends.

`optimizer.measure_memory` reads the same bytes off tensors; tests/cli/test_plan_figures.py and
tests/sim/test_plan_on_host.py compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from itertools import groupby
from typing import Any

from megatron_distopt.layout.buckets import BufferLayout
from megatron_distopt.layout.matrix_work import DIRECTION_NBYTES
from megatron_distopt.layout.on_host import pinned_nbytes
from megatron_distopt.layout.shards import FlatParamPlan, owned_shards, plan_flat_params

#: Bytes an element of each form of main params of 16-bit params and of moments, without scales.
MAIN_NBYTES = {"float32": 4, "remainder": 2, "bfloat16": 0, "float16": 2}
MOMENT_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
#: The forms that have a scale of one byte for so many elements.
WITH_SCALES = ("float16", "float8_e4m3fn", "float8_e5m2", "int8")
BLOCK_NUMEL = 128
#: The forms of main params that have the 16-bit model param as a part of themselves, which an update has to read.
PART_OF_MODEL = ("remainder", "bfloat16")
#: Every flat param has a tensor of its own in which its updates are counted: one fp32.
_STEP_NBYTES = 4
#: An element of a matrix of Muon's has one moment, and its flat param no counter.
_MOMENTUM_NBYTES = 4
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
        reads_param: whether the model param is a main param or a part of one, so that an update reads it as well.
    """

    param: int
    grad: int
    main: int
    moments: int = 8
    reduce: int = 0
    main_scales: int = 0
    moment_scales: int = 0
    reads_param: bool = False


@dataclass(frozen=True, slots=True)
class BucketShare:
    """The flat params that one rank owns in one bucket: bytes of their state, and what a step moves for them.

    Args:
        bucket: index.
        is_on_host: where the state is and is updated: in the host's memory, or on the device.
        num_flat_params: in it.
        numel: elements of the flat params.
        matrix_numel: of these, elements of matrices that Muon updates.
        most_matrix_numel: of the largest flat param of matrices.
        main_nbytes, moment_nbytes: of their state, the counters of updates included.
        update_nbytes: what every kernel has to read and write at least: gradient, state, and param.
        down_nbytes, up_nbytes: copied to the host and back in a step.
        pinned_nbytes: pinned tensors of the host for both; they span the padding between two flat params.
    """

    bucket: int
    is_on_host: bool
    num_flat_params: int
    numel: int
    matrix_numel: int
    most_matrix_numel: int
    main_nbytes: int
    moment_nbytes: int
    update_nbytes: int
    down_nbytes: int = 0
    up_nbytes: int = 0
    pinned_nbytes: tuple[int, ...] = ()

    @property
    def state_nbytes(self) -> int:
        """Main params and moments."""
        return self.main_nbytes + self.moment_nbytes


def shares_of(
    layout: BufferLayout,
    rank: int,
    widths: Widths,
    key_of: Callable[[str], Hashable],
    on_host: Collection[int] = (),
    matrices: Collection[str] = (),
) -> tuple[BucketShare, ...]:
    """What `rank` owns of every bucket, in buffer order; buckets of which it owns nothing but padding are left out.

    Args:
        layout: of a grad buffer and its param buffer.
        rank: in the data-parallel group.
        widths: bytes an element.
        key_of: from a param's name; neighbours with equal keys are one flat param.
        on_host: indices of the buckets whose state is on the host, see `choose_buckets`.
        matrices: names of the params that Muon updates; they have other keys than the others.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 128), ParamSpec("b", 64)], num_shards=2, bucket_size=128)
    >>> [first, second] = shares_of(layout, 0, Widths(param=2, grad=4, main=4), lambda name: 0, on_host=[0])
    >>> first.down_nbytes, first.up_nbytes, second.update_nbytes == 32 * 30 + 2 * 4
    (256, 128, True)
    """
    plans = plan_flat_params(owned_shards(layout, rank), key_of)
    return tuple(
        _share_of(bucket, list(members), widths, matrices, is_on_host=bucket in on_host)
        for bucket, members in groupby(plans, key=lambda plan: plan.bucket)
    )


def _share_of(
    bucket: int, plans: Sequence[FlatParamPlan[Any]], widths: Widths, matrices: Collection[str], *, is_on_host: bool
) -> BucketShare:
    numels = [plan.in_buffer.numel for plan in plans]
    of_matrices = [plan.in_buffer.numel for plan in plans if plan.shards[0].name in matrices]
    numel, matrix_numel, blocks = sum(numels), sum(of_matrices), sum(-(-each // BLOCK_NUMEL) for each in numels)
    main = numel * widths.main + blocks * widths.main_scales
    moments = (numel - matrix_numel) * widths.moments + blocks * widths.moment_scales + matrix_numel * _MOMENTUM_NBYTES
    moments += (len(numels) - len(of_matrices)) * _STEP_NBYTES
    params = numel * widths.param * (2 if widths.reads_param else 1)
    pinned_numel = plans[-1].in_buffer.stop - plans[0].in_buffer.start
    return BucketShare(
        bucket=bucket,
        is_on_host=is_on_host,
        num_flat_params=len(numels),
        numel=numel,
        matrix_numel=matrix_numel,
        most_matrix_numel=max(of_matrices, default=0),
        main_nbytes=main,
        moment_nbytes=moments,
        update_nbytes=numel * _FP32_NBYTES + 2 * (main + moments) + params + 2 * matrix_numel * DIRECTION_NBYTES,
        down_nbytes=numel * _FP32_NBYTES if is_on_host else 0,
        up_nbytes=numel * widths.param if is_on_host else 0,
        pinned_nbytes=(pinned_numel * _FP32_NBYTES, pinned_numel * widths.param) if is_on_host else (),
    )


@dataclass(frozen=True)
class Footprint:
    """What one rank holds, in bytes, padding included.

    Args:
        param_nbytes, grad_nbytes: buffers; every rank holds them whole.
        main_nbytes, moment_nbytes: of the flat params that the rank owns, the counters of updates included.
        host_nbytes: of main params and moments, those in the memory of the host.
        staging_nbytes: pinned memory of the host for gradients on their way there and params on their way back.
        rounded_staging_nbytes: the same where every tensor takes a power of two bytes, as with torch on CUDA and ROCm.
        undistributed_nbytes: main params and moments of a rank that holds the state of all params.
        backward_nbytes: for a moment in backward: the largest gradient before it is added to the buffer.
        step_nbytes: for the length of a step: fp32 copies of 16-bit gradients.
        matrices_nbytes: for the length of the update of Muon's matrices: directions, blocks and the iteration.
        num_flat_params: tensors that the inner optimizer updates.
    """

    param_nbytes: int = 0
    grad_nbytes: int = 0
    main_nbytes: int = 0
    moment_nbytes: int = 0
    host_nbytes: int = 0
    staging_nbytes: int = 0
    rounded_staging_nbytes: int = 0
    undistributed_nbytes: int = 0
    backward_nbytes: int = 0
    step_nbytes: int = 0
    matrices_nbytes: int = 0
    num_flat_params: int = 0

    @property
    def lasting_nbytes(self) -> int:
        """What stays allocated on the device between steps."""
        return self.param_nbytes + self.grad_nbytes + self.main_nbytes + self.moment_nbytes - self.host_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that is allocated on the device at any time, in backward or in the step."""
        return self.lasting_nbytes + max(self.backward_nbytes, self.step_nbytes + self.matrices_nbytes)

    def plus(self, other: Footprint) -> Footprint:
        """The footprint of two buffers together. Only one gradient at a time is outside of them, and the matrices of
        one buffer are updated after those of the other."""
        both = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return Footprint(**{name: max(pair) if name in _ONE_AT_A_TIME else sum(pair) for name, pair in both.items()})


_ONE_AT_A_TIME = ("backward_nbytes", "matrices_nbytes")


def footprint_of(
    layout: BufferLayout,
    widths: Widths,
    shares: Sequence[BucketShare],
    matrices: Collection[str] = (),
    blocks_nbytes: int = 0,
) -> Footprint:
    """What a rank holds for one grad buffer and its param buffer.

    Args:
        layout: of both.
        widths: bytes an element.
        shares: of the rank, see `shares_of`.
        matrices: names of the params that Muon updates.
        blocks_nbytes: see `MatrixWork`.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 96), ParamSpec("b", 32)], num_shards=2)
    >>> widths = Widths(param=2, grad=4, main=4)
    >>> held = footprint_of(layout, widths, shares_of(layout, 0, widths, lambda name: 0))
    >>> held.param_nbytes, held.grad_nbytes, held.main_nbytes, held.moment_nbytes
    (320, 640, 320, 644)
    """
    numels = [slot.in_buffer.numel for slot in layout.slots]
    matrix_numel = sum(slot.in_buffer.numel for slot in layout.slots if slot.name in matrices)
    scales = (widths.main_scales + widths.moment_scales) / BLOCK_NUMEL
    directions = sum(share.matrix_numel for share in shares) * DIRECTION_NBYTES
    # The direction of a flat param is fp32 before it is rounded.
    most_mixed = max((share.most_matrix_numel for share in shares), default=0)
    pinned = [nbytes for share in shares for nbytes in share.pinned_nbytes]
    return Footprint(
        param_nbytes=layout.numel * widths.param,
        grad_nbytes=layout.numel * widths.grad,
        main_nbytes=sum(share.main_nbytes for share in shares),
        moment_nbytes=sum(share.moment_nbytes for share in shares),
        host_nbytes=sum(share.state_nbytes for share in shares if share.is_on_host),
        staging_nbytes=sum(pinned),
        rounded_staging_nbytes=sum(map(pinned_nbytes, pinned)),
        undistributed_nbytes=round(sum(numels) * (widths.main + widths.moments + scales))
        - matrix_numel * (widths.moments - _MOMENTUM_NBYTES),
        backward_nbytes=max(numels) * widths.param,
        step_nbytes=sum(share.numel for share in shares) * _FP32_NBYTES if widths.grad < _FP32_NBYTES else 0,
        matrices_nbytes=directions + max(blocks_nbytes, most_mixed * _FP32_NBYTES),
        num_flat_params=sum(share.num_flat_params for share in shares),
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
