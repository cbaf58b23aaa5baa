"""Tries the collectives that training needs before it needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm.agree import all_gather_objects
from megatron_distopt.comm.collectives import (
    ALL_GATHER,
    PLAIN_SUM,
    REDUCE_SCATTER,
    Reduction,
    all_gather,
    members_of,
    reduce_scatter,
    share_initial,
    sum_over,
)
from megatron_distopt.comm.groups import FAKE, Group, backend_of
from megatron_distopt.errors import ConfigError
from megatron_distopt.stand_ins import code_of


def try_collectives(
    device: torch.device,
    group: Group,
    how: Reduction = PLAIN_SUM,
    *,
    dtypes: Iterable[torch.dtype] = (),
    sums: Iterable[torch.dtype] = (),
) -> None:
    """Collective: tries the collectives that training needs, on one or two numbers of each rank.

    Args:
        device: of the tensors.
        group: of the ranks that take part.
        how: as of `reduce_scatter`.
        dtypes: of grads and params, which are reduce-scattered, all-gathered and shared.
        sums: dtypes of what is summed by `sum_over`.

    Raises:
        ConfigError: the backend lacks one of them, or one gives a wrong result, for example because
            other code has replaced a function of torch's.
    """
    if group.size == 1 or device.type == "meta":
        return
    if how.is_by_node and not members_of(device, group, how):
        raise ConfigError(
            "reduce_dtype is float32, which needs to know which ranks are on one node, and "
            "nothing says so. Start with torchrun, set RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or "
            "leave out reduce_dtype."
        )
    if backend_of(device, group) == FAKE:
        return
    try:
        # All of them before one is judged: a rank that stopped would leave the others in the next.
        trials = list(_trials(device, group, how, dtypes, sums))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _missing(device, group, reason) from error
    for name, what, got, wanted in trials:
        if got != wanted:
            reason = f"{what} over {group.size} ranks gave {got} instead of {wanted}"
            raise _replaced(name, reason) or _missing(device, group, f"{name} of {reason}")


def _trials(
    device: torch.device,
    group: Group,
    how: Reduction,
    dtypes: Iterable[torch.dtype],
    sums: Iterable[torch.dtype],
) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """Collective: runs each trial, and yields the function's name, what it was given, its result
    and the expected one."""
    marks = [float(rank % 251) for rank in range(group.size)]  # which every dtype holds
    yield "all_gather_object", "objects", all_gather_objects(marks[group.rank], group), marks
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
    """The error about a function of torch's that other code has replaced; None where it is torch's
    own."""
    place, function = f"torch.distributed.{name}", getattr(dist, name)
    module, file = next(code_of(function))
    if module.partition(".")[0] == "torch":
        return None
    spare = f"torch.distributed.distributed_c10d.{name}"
    torchs = f"{place}.__wrapped__" if hasattr(function, "__wrapped__") else spare
    return ConfigError(
        f"{place} was replaced by {module} ({file}), and {reason}. Type this before the optimizer "
        f"is built: import torch; {place} = {torchs}."
    )


def _missing(device: torch.device, group: Group, reason: str) -> ConfigError:
    return ConfigError(
        f"The backend {backend_of(device, group)} cannot run the reduce-scatters, all-gathers, "
        f"broadcasts and sums that training needs on {device.type} tensors: {reason}. Write "
        "--distributed-backend nccl on GPUs or gloo on CPUs, or give init_process_group another "
        "backend."
    )
