"""The collectives, each in place: a shard is a view of its bucket.

[Note: carrier of a collective] A backend's own collectives are used, except for tensors on the CPU
over gloo, whose own are slow: those go between pairs of ranks (pairwise.py). They do so at every
size, so that a gradient is added up in the same order in every bucket.

[Note: average in the collective] Where grads are divided before they are added up, NCCL multiplies
by the reciprocal as it reads them, which saves the pass over the buffer. For a power of two that is
the division, to the bit; for any other number it would round twice, so the bucket is divided first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from megatron_distopt.buffers import ShardedBuffer, dtype_name
from megatron_distopt.comm import pairwise
from megatron_distopt.comm.agree import exchange
from megatron_distopt.comm.groups import FAKE, Group, carrier_of, named_losses
from megatron_distopt.comm.pending import Done, Pending, begin_in_turn, wait_for_turn
from megatron_distopt.comm.shared_memory import nodes_of
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.stand_ins import code_of

#: Functions of torch.distributed, which other code may have replaced by the time they are called.
#: torch 2.13 renamed them; the old names warn there, and older releases have only those.
REDUCE_SCATTER, ALL_GATHER = (
    ("reduce_scatter_single", "all_gather_single")
    if hasattr(dist, "reduce_scatter_single")
    else ("reduce_scatter_tensor", "all_gather_into_tensor")
)
#: The same on all ranks, see [Note: carrier of a collective].
_PAIRWISE_OVER = "gloo"
#: Backends whose launches cost the CPU and the device something, and which average by themselves.
_LIKE_NCCL = ("nccl",)
#: Of torchrun: the number of a rank, its number on its node, and how many ranks that has.
_VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_by_launcher: WeakKeyDictionary[ProcessGroup, tuple[tuple[int, ...], ...]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Reduction:
    """How grads are added up."""

    # number by which grads are divided before they are added up: a pass over the buffer, or see
    # [Note: average in the collective]. An fp16 sum of n gradients overflows at an n times smaller
    # loss scale than their average.
    divide_by: int = 1
    # in which fp32 grads are communicated, see [Note: sum in a reduce dtype] in pairwise.py; None
    # for their own dtype. float32 is about what is sent between nodes, see [Note: carriers] there
    reduce_dtype: torch.dtype | None = None

    @property
    def is_by_node(self) -> bool:
        """Whether nodes must be known: each sends one sum, unrounded."""
        return self.reduce_dtype is torch.float32


#: Grads are added up as they are.
AS_THEY_ARE = Reduction()


def shares_memory(device: torch.device, group: Group) -> bool:
    """Whether ranks read each other's memory instead of sending messages; after the first
    collective of the group."""
    is_pairwise_there = group.size > 1 and carrier_of(device, group) == _PAIRWISE_OVER
    return is_pairwise_there and len(nodes_of(group).members) == 1


def check_debug_level(device: torch.device, group: Group, how: Reduction) -> None:
    """Refuses communication that is overlapped by messages where torch compares the number of
    messages in each collective; after the group's first collective.

    A thread sends them at other times on other ranks, so that the numbers differ.
    """
    is_pairwise = group.size > 1 and carrier_of(device, group) == _PAIRWISE_OVER
    has_messages = is_pairwise and (how.reduce_dtype or not shares_memory(device, group))
    if has_messages and dist.get_debug_level().name == "DETAIL":  # type: ignore[attr-defined]
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch cannot tell overlapped messages "
            "over gloo from an error. Write TORCH_DISTRIBUTED_DEBUG=INFO, or leave "
            "overlap_grad_reduce and overlap_param_gather out."
        )


def described(device: torch.device, group: Group, how: Reduction = AS_THEY_ARE) -> str:
    """Describes how buckets on a device are communicated in a group; after the group's first
    collective."""
    carrier, is_shared = carrier_of(device, group), shares_memory(device, group)
    short = ""
    if how.is_by_node:
        sizes = [str(len(each)) for each in _members(device, group, how) or ()]
        short = f", grads in fp32 between {len(sizes)} node(s) of {'+'.join(sizes)}"
    elif how.reduce_dtype is not None:
        short = f", grads in {dtype_name(how.reduce_dtype)}" + is_shared * " as messages"
    if carrier != _PAIRWISE_OVER:
        return carrier + short
    return (
        f"{carrier}, from pair to pair {'in shared memory' if is_shared else 'as messages'}{short}"
    )


def reduce_scatter(
    bucket: Tensor,
    shard: Tensor,
    group: Group,
    how: Reduction = AS_THEY_ARE,
    *,
    overlapped: bool = False,
) -> Pending:
    """Collective: adds up `bucket` over the group; this rank's part is written into `shard`.

    Args:
        bucket: 1-D; outside `shard` its values have no meaning afterwards.
        shard: 1-D [bucket.numel / group.size], the view of `bucket` that this rank owns.
        group: of the ranks that take part; its collectives run in the order in which they are
            called.
        how: see `Reduction`.
        overlapped: only begins; `bucket` must not be touched until the returned collective has been
            waited for.
    """
    op = _operation(bucket, group, how)
    if group.size == 1:
        return Done()
    dtype = how.reduce_dtype or bucket.dtype
    members = _members(bucket.device, group, how)
    if carrier_of(bucket.device, group) == _PAIRWISE_OVER:
        if overlapped:
            act = partial(pairwise.reduce_scatter, bucket, group, members, dtype)
            return begin_in_turn(act, group)
        wait_for_turn(group)
        pairwise.reduce_scatter(bucket, group, members, dtype)
        return Done()
    if members is None or len(members) == 1:
        return (
            getattr(dist, REDUCE_SCATTER)(
                shard, bucket, op=op, group=group.handle, async_op=overlapped
            )
            or Done()
        )
    pending = pairwise.begin_reduce_scatter(bucket, group, members, dtype)
    if overlapped:
        return pending
    pending.wait()
    return Done()  # nothing is added up twice


def _members(device: torch.device, group: Group, how: Reduction) -> Sequence[Sequence[int]] | None:
    """The ranks of each node, which add up first; none where nobody knows, and None without a
    reduce dtype."""
    if how.reduce_dtype is None:
        return None
    nodes = (
        nodes_of(group).members
        if carrier_of(device, group) == _PAIRWISE_OVER
        else _nodes_by_launcher(group)
    )
    return nodes if len(nodes) > 1 or how.is_by_node else pairwise.alone(group)


def _nodes_by_launcher(group: Group) -> tuple[tuple[int, ...], ...]:
    """The ranks of a group by node as torchrun says, none where it does not; collective at the
    group's first call."""
    if group.own_handle not in _by_launcher:
        said = exchange([os.environ.get(name, "") for name in _VARIABLES], group)
        nodes: dict[tuple[int, int], list[int]] = {}
        if all(each.isdecimal() for of_rank in said for each in of_rank):
            for number, (rank, local_rank, size) in enumerate(said):
                nodes.setdefault((int(rank) - int(local_rank), int(size)), []).append(number)
        is_right = all(len(ranks) <= size for (_, size), ranks in nodes.items())
        _by_launcher[group.own_handle] = tuple(map(tuple, nodes.values())) if is_right else ()
    return _by_launcher[group.own_handle]


def _operation(bucket: Tensor, group: Group, how: Reduction) -> dist.ReduceOp.RedOpType:
    """The operation of the collective; divides the bucket where the collective does not average by
    itself."""
    if how.divide_by == 1:
        return dist.ReduceOp.SUM
    is_exact = how.divide_by == group.size and group.size.bit_count() == 1
    if how.reduce_dtype is None and is_exact and carrier_of(bucket.device, group) in _LIKE_NCCL:
        return dist.ReduceOp.AVG  # see [Note: average in the collective]; the same on all ranks
    bucket.div_(how.divide_by)
    return dist.ReduceOp.SUM


def all_gather(bucket: Tensor, shard: Tensor, group: Group, *, overlapped: bool = False) -> Pending:
    """Collective: fills `bucket` with every rank's `shard`.

    Args: as of `reduce_scatter`.
    """
    if group.size == 1:
        return Done()
    if carrier_of(bucket.device, group) == _PAIRWISE_OVER:
        if overlapped:
            return begin_in_turn(partial(pairwise.all_gather, bucket, group), group)
        wait_for_turn(group)
        pairwise.all_gather(bucket, group)
        return Done()
    return (
        getattr(dist, ALL_GATHER)(bucket, shard, group=group.handle, async_op=overlapped) or Done()
    )


@contextmanager
def coalesced(tensor: Tensor, group: Group) -> Iterator[None]:
    """Makes one launch of the collectives of one kind that are called meanwhile, where the backend
    gains from that."""
    if group.size > 1 and carrier_of(tensor.device, group) in _LIKE_NCCL:
        with dist.distributed_c10d._coalescing_manager(group.handle):
            yield
    else:
        yield


def reduce_grads(buffer: ShardedBuffer, group: Group, how: Reduction = AS_THEY_ARE) -> None:
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
        device: one that the group's backend carries.
    """
    for tensor in (each for each in tensors if group.size > 1 and each.numel()):
        # As bytes, because not every backend carries every dtype.
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
        part: 1-D, as long on every rank, on a device that the group's backend carries.
        group: of the ranks that take part.
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
    """A number that ranks tell each other by the all-reduce of a step, with its square; or the sums
    of both over ranks.

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
        """Of sums over so many ranks: above 0 where the numbers differ, and otherwise 0."""
        return num_ranks * self.squared - self.number**2


def try_collectives(
    device: torch.device,
    group: Group,
    how: Reduction = AS_THEY_ARE,
    *,
    dtypes: Iterable[torch.dtype] = (),
    sums: Iterable[torch.dtype] = (),
) -> None:
    """Collective: tries what training needs on a number or two a rank, before it needs them.

    Args:
        device: of the tensors.
        group: of the ranks that take part.
        how: as of `reduce_scatter`.
        dtypes: of grads and params, which are reduce-scattered, all-gathered and shared.
        sums: dtypes of what is summed by `sum_over`.

    Raises:
        ConfigError: the backend does not have one of them, or it, or what other code has put into
            the place of a function of torch's, gives a wrong result.
    """
    if group.size == 1 or device.type == "meta":
        return
    if how.is_by_node and not _members(device, group, how):
        raise ConfigError(
            refusal(
                "reduce_dtype",
                "float32",
                "know the nodes of ranks",
                "Start with torchrun, set RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or leave it out",
            )
        )
    if carrier_of(device, group) == FAKE:
        return
    try:
        # All of them before one is judged: a rank that stopped would leave the others in the next.
        trials = list(_trials(device, group, how, dtypes, sums))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _missing(device, group, reason) from error
    for name, what, got, wanted in trials:
        if got != wanted:
            reason = f"{what} over {group.size} ranks gave {got}, and not {wanted}"
            raise _replaced(name, reason) or _missing(device, group, f"{name} of {reason}")


def _trials(
    device: torch.device,
    group: Group,
    how: Reduction,
    dtypes: Iterable[torch.dtype],
    sums: Iterable[torch.dtype],
) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """Collective: names the function and what it was given, and has what came out and should
    have."""
    marks = [float(rank % 251) for rank in range(group.size)]  # which every dtype holds
    yield "all_gather_object", "objects", exchange(marks[group.rank], group), marks
    for dtype in dtypes:
        # Two ranks give to each shard, so that 16 bits hold the sum.
        numbers = torch.zeros(group.size, dtype=dtype, device=device)
        numbers[[group.rank, (group.rank + 1) % group.size]] = float(how.divide_by)
        shard = numbers[group.rank : group.rank + 1]
        # fp32 grads alone have a reduce dtype; a division in 16 bits rounds.
        reduce_scatter(
            numbers, shard, group, how if dtype is torch.float32 else Reduction(how.divide_by)
        )
        yield REDUCE_SCATTER, dtype_name(dtype), shard.float().round().tolist(), [2.0]
        numbers.fill_(-1.0)[group.rank] = marks[group.rank]
        all_gather(numbers, shard, group)
        yield ALL_GATHER, dtype_name(dtype), numbers.tolist(), marks
        share_initial([shard], group, device)
        yield "broadcast", dtype_name(dtype), shard.tolist(), marks[:1]
    for dtype in sums:
        # Whole numbers that a shorter dtype rounds; 4,096 ranks add them up exactly.
        large = 2.0**-12 / torch.finfo(dtype).eps
        number = torch.tensor([large + group.rank], dtype=dtype, device=device)
        sum_over(number, group)
        total = large * group.size + sum(range(group.size))
        yield "all_reduce", dtype_name(dtype), number.tolist(), [total]


def _replaced(name: str, reason: str) -> ConfigError | None:
    """The refusal of what other code has put into the place of a function of torch's, if it has."""
    place, function = f"torch.distributed.{name}", getattr(dist, name)
    module, file = next(code_of(function))
    if module.partition(".")[0] == "torch":
        return None
    spare = f"torch.distributed.distributed_c10d.{name}"
    torchs = f"{place}.__wrapped__" if hasattr(function, "__wrapped__") else spare
    return ConfigError(
        refusal(
            place,
            f"it was replaced by {module} ({file}), and {reason}",
            "communicate as torch's own",
            f"Type this before the optimizer is built: import torch; {place} = {torchs}",
        )
    )


def _missing(device: torch.device, group: Group, reason: str) -> ConfigError:
    return ConfigError(
        refusal(
            "backend",
            f"{carrier_of(device, group)} on {device.type} ({reason})",
            "carry reduce-scatters, all-gathers and broadcasts of the model's tensors, and sums",
            "Write --distributed-backend nccl on GPUs, gloo on CPUs, or give init_process_group "
            "another backend",
        )
    )


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
