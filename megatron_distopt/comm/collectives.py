"""The collectives, each in place: a shard is a view of its bucket.

[Note: backend of a collective] A backend's own collectives are used, except for tensors on the CPU
over gloo, whose own are slow: those go between pairs of ranks (pairwise.py). They do so at every
size, so that a gradient is added up in the same order in every bucket.

[Note: average in the collective] Where grads are divided before they are added up, NCCL multiplies
by the reciprocal as it reads them, which saves the pass over the buffer. For a power of two that is
the division, to the bit; for any other number it would round twice, so the bucket is divided first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megatron_distopt.buffers import ShardedBuffer, dtype_name
from megatron_distopt.comm import pairwise
from megatron_distopt.comm.group_nodes import Members, alone, nodes_of
from megatron_distopt.comm.groups import Group, backend_of, named_losses
from megatron_distopt.comm.pending import Pending, begin_in_turn, wait_for_turn
from megatron_distopt.errors import ConfigError

#: Functions of torch.distributed, which other code may have replaced by the time they are called.
#: torch 2.13 renamed them; the old names warn there, and older releases have only those.
REDUCE_SCATTER, ALL_GATHER = (
    ("reduce_scatter_single", "all_gather_single")
    if hasattr(dist, "reduce_scatter_single")
    else ("reduce_scatter_tensor", "all_gather_into_tensor")
)
#: The same on all ranks, see [Note: backend of a collective].
_PAIRWISE_OVER = "gloo"
#: Backends whose launches cost the CPU and the device something, and which average by themselves.
_LIKE_NCCL = ("nccl",)


@dataclass(frozen=True)
class Reduction:
    """How grads are added up."""

    # number by which grads are divided before they are added up: a pass over the buffer, or see
    # [Note: average in the collective]. An fp16 sum of n gradients overflows at an n times smaller
    # loss scale than their average.
    divide_by: int = 1
    # in which fp32 grads are communicated, see [Note: sum in a reduce dtype] in pairwise.py; None
    # for their own dtype. float32 is about what is sent between nodes, see [Note: leaders] there
    reduce_dtype: torch.dtype | None = None

    @property
    def is_by_node(self) -> bool:
        """Whether nodes must be known: each sends one sum, unrounded."""
        return self.reduce_dtype is torch.float32


#: Grads are added up as they are.
PLAIN_SUM = Reduction()


def shares_memory(device: torch.device, group: Group) -> bool:
    """Whether ranks read each other's memory instead of sending messages; after the first
    collective of the group."""
    return _is_pairwise(device, group) and len(nodes_of(group).in_memory) == 1


def _is_pairwise(device: torch.device, group: Group) -> bool:
    return group.size > 1 and backend_of(device, group) == _PAIRWISE_OVER


def check_debug_level(device: torch.device, group: Group, how: Reduction) -> None:
    """Refuses communication that is overlapped by messages where torch compares the number of
    messages in each collective; after the group's first collective.

    A thread sends them at other times on other ranks, so that the numbers differ.
    """
    if not _is_pairwise(device, group):
        return
    has_messages = how.reduce_dtype or not shares_memory(device, group)
    if has_messages and dist.get_debug_level().name == "DETAIL":  # type: ignore[attr-defined]
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG is DETAIL, and with it torch mistakes overlapped messages "
            "over gloo for an error. Write TORCH_DISTRIBUTED_DEBUG=INFO, or leave out "
            "overlap_grad_reduce and overlap_param_gather."
        )


def described(device: torch.device, group: Group, how: Reduction = PLAIN_SUM) -> str:
    """Describes how buckets on a device are communicated in a group; after the group's first
    collective."""
    backend, is_shared = backend_of(device, group), shares_memory(device, group)
    short = ""
    if how.is_by_node:
        sizes = [str(len(each)) for each in members_of(device, group, how) or ()]
        short = f", grads in fp32 between {len(sizes)} node(s) of {'+'.join(sizes)}"
    elif how.reduce_dtype is not None:
        way = " as messages" if is_shared else ""
        short = f", grads in {dtype_name(how.reduce_dtype)}{way}"
    if backend == _PAIRWISE_OVER:
        backend += f", from pair to pair {'in shared memory' if is_shared else 'as messages'}"
    return backend + short


def reduce_scatter(
    bucket: Tensor,
    shard: Tensor,
    group: Group,
    how: Reduction = PLAIN_SUM,
    *,
    overlapped: bool = False,
) -> Pending:
    """Collective: adds up `bucket` over the group; this rank's part is written into `shard`.

    Args:
        bucket: 1-D; outside `shard` its values have no meaning afterwards.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
        group: the ranks that take part; its collectives run in the order in which they are called.
        how: see `Reduction`.
        overlapped: only begins; `bucket` must not be touched until the returned collective has been
            waited for.
    """
    op = _operation(bucket, group, how)
    if group.size == 1:
        return Pending()
    dtype = how.reduce_dtype or bucket.dtype
    members = members_of(bucket.device, group, how)
    if _is_pairwise(bucket.device, group):
        act = partial(pairwise.reduce_scatter, bucket, group, members, dtype)
        if overlapped:
            return _begin_pairwise(act, group)
        wait_for_turn(group)
        act()
        return Pending()
    if members is None or len(members) == 1:
        function = getattr(dist, REDUCE_SCATTER)
        work = function(shard, bucket, op=op, group=group.handle, async_op=overlapped)
        return _pending(work)
    pending = pairwise.begin_reduce_scatter(bucket, group, members, dtype)
    if overlapped:
        return pending
    pending.wait()
    return Pending()  # whose wait does not add up again


def _begin_pairwise(act: Callable[[], None], group: Group) -> Pending:
    """Begins a collective between pairs of ranks in the thread of the group."""
    nodes_of(group)  # in this thread, because it is a collective of the backend's
    return begin_in_turn(act, group)


def _pending(work: dist.Work | None) -> Pending:
    return Pending() if work is None else Pending([work.wait], is_completed=work.is_completed)


def members_of(device: torch.device, group: Group, how: Reduction) -> Members | None:
    """The ranks of each node, which add up among themselves first. Empty where the nodes are
    unknown, None without a reduce dtype."""
    if how.reduce_dtype is None:
        return None
    nodes = nodes_of(group)
    members = nodes.in_memory if _is_pairwise(device, group) else nodes.members
    return members if len(members) > 1 or how.is_by_node else alone(group)


def _operation(bucket: Tensor, group: Group, how: Reduction) -> dist.ReduceOp.RedOpType:
    """The operation of the collective; divides the bucket where the collective does not average by
    itself."""
    if how.divide_by == 1:
        return dist.ReduceOp.SUM
    is_exact = how.divide_by == group.size and group.size.bit_count() == 1
    if how.reduce_dtype is None and is_exact and backend_of(bucket.device, group) in _LIKE_NCCL:
        return dist.ReduceOp.AVG  # see [Note: average in the collective]; the same on all ranks
    bucket.div_(how.divide_by)
    return dist.ReduceOp.SUM


def all_gather(bucket: Tensor, shard: Tensor, group: Group, *, overlapped: bool = False) -> Pending:
    """Collective: fills `bucket` with every rank's `shard`.

    Args: as of `reduce_scatter`.
    """
    if group.size == 1:
        return Pending()
    if _is_pairwise(bucket.device, group):
        if overlapped:
            return _begin_pairwise(partial(pairwise.all_gather, bucket, group), group)
        wait_for_turn(group)
        pairwise.all_gather(bucket, group)
        return Pending()
    function = getattr(dist, ALL_GATHER)
    return _pending(function(bucket, shard, group=group.handle, async_op=overlapped))


@contextmanager
def coalesced(tensor: Tensor, group: Group) -> Iterator[None]:
    """Launches all collectives of one kind that are called inside this context at once, where the
    backend gains from that."""
    if group.size > 1 and backend_of(tensor.device, group) in _LIKE_NCCL:
        with dist.distributed_c10d._coalescing_manager(group.handle):
            yield
    else:
        yield


def reduce_grads(buffer: ShardedBuffer, group: Group, how: Reduction = PLAIN_SUM) -> None:
    """Collective: reduce-scatters every bucket of the grad buffer, in order.

    Unless `how` says otherwise the result is the *sum*. The average is taken where the gradient is
    read anyway (`divisor` in optimizer/sharded.py), so no pass over the buffer is spent on a
    division, and a 16-bit gradient does not lose small values to a division before it is added up.
    """
    if group.size == 1 and how.divide_by == 1:
        return
    with coalesced(buffer.grad, group) if how.reduce_dtype is None else nullcontext():
        for number, (whole, shard) in enumerate(buffer.reduces):
            with profiled(f"reduce-scatter {number}"):
                reduce_scatter(whole, shard, group, how)


def gather_params(buffer: ShardedBuffer, group: Group) -> None:
    """Collective: all-gathers every bucket of the param buffer, in order.

    `param.data` is a view of that buffer, so afterwards the module has the new values. Params of
    the less common dtype of a model with two are copied to their places, see buffers/compact.py.
    """
    if group.size > 1:
        with coalesced(buffer.param, group):
            for number, (whole, shard) in enumerate(buffer.gathers):
                with profiled(f"all-gather {number}"):
                    all_gather(whole, shard, group)
    buffer.publish()


def share_initial(tensors: Iterable[Tensor], group: Group, device: torch.device) -> None:
    """Collective: gives every rank the values that the group's rank 0 has in these tensors.

    Args:
        tensors: of any strides, dtypes and devices; as many, as large and of the same dtypes on
            every rank.
        group: whose rank 0 counts.
        device: one whose tensors the group's backend can send.
    """
    for tensor in (each for each in tensors if group.size > 1 and each.numel()):
        # As bytes, because not every backend can send every dtype.
        packed = tensor.detach().to(device).contiguous()
        dist.broadcast(
            packed.view(-1).view(torch.uint8), src=group.global_rank(0), group=group.handle
        )
        if packed.data_ptr() != tensor.data_ptr():
            # Without repetition: torch does not write to an expanded tensor, which has fewer
            # elements than it shows.
            distinct = tuple(
                slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()
            )
            tensor.detach()[distinct].copy_(packed[distinct])


def gather_to_first(part: Tensor, group: Group) -> Tensor | None:
    """Collective: returns all ranks' parts one after the other on the group's rank 0, None
    elsewhere.

    Args:
        part: 1-D, equally long on every rank, on a device whose tensors the group's backend can
            send.
        group: the ranks that take part.
    """
    if group.size == 1:
        return part
    whole = part.new_empty(group.size * part.numel()) if group.rank == 0 else None
    parts = None if whole is None else list(torch.split(whole, part.numel()))
    dist.gather(part, parts, dst=group.global_rank(0), group=group.handle)
    return whole


def broadcast(tensor: Tensor, rank: int, group: Group) -> None:
    """Collective: every rank gets the values that one rank of the group has."""
    if group.size > 1:
        dist.broadcast(tensor, src=group.global_rank(rank), group=group.handle)


def sum_over(tensor: Tensor, group: Group) -> None:
    """Collective: sums a small tensor over the group, in place.

    Raises:
        RanksDisagreeError: another rank ended, or did not come within the group's time limit.
    """
    if group.size > 1:
        with named_losses():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group.handle)


class Tally(NamedTuple):
    """A number of a rank and its square, which the all-reduce of a step adds up; or their sums over
    ranks.

    All ranks had the same number where the mean of the squares is the square of the mean. Numbers
    are small, so that these sums are exact.

    >>> Tally(2 + 3, 2**2 + 3**2).spread(2), Tally(3 + 3, 3**2 + 3**2).spread(2)
    (1, 0)
    """

    number: Any  # a Python number, or a tensor of one element
    squared: Any

    @classmethod
    def of(cls, number: float) -> Tally:
        return cls(number, number**2)

    def spread(self, num_ranks: int) -> Any:
        """Above 0 where the numbers of the ranks differ, otherwise 0; to be called on the sums."""
        return num_ranks * self.squared - self.number**2


#: Begins the name of every range, so that a timeline can be searched for them.
_PREFIX = "megatron_distopt::"


def profiled(name: str) -> AbstractContextManager[object]:
    """Names what runs meanwhile, behind "megatron_distopt::", in `torch.profiler`.

    >>> with torch.profiler.profile() as profile, profiled("clip"):
    ...     pass
    >>> [event.key for event in profile.key_averages()]
    ['megatron_distopt::clip']
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        return record_function(_PREFIX + name)
    return nullcontext()
