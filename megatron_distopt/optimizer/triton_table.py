"""Tables that tell one launch of a kernel about all flat params, and how each of these is cut into programs.

A table lies on the device. It is built when addresses, groups or the set of params with gradients have changed; in a
steady step the host compares the rows and uploads nothing. An upload goes through pinned memory, so the host does not
wait for it either. Gradients may lie in memory that is allocated anew in every step: their places count from the start
of that memory, whose address is an argument of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_distopt.device import pinned

#: Elements of one program of `sweep`, in a body and in what lies around it, and of one block of `statistics`.
SWEEP_BLOCK, REST_BLOCK, STATS_BLOCK = 1024, 256, 2048
#: Warps of one program of `sweep`: each lane has 8 elements, 128 bits of a 16-bit model param.
SWEEP_WARPS = 2 if torch.version.hip else 4
#: Programs that `statistics` is divided into: enough for every device, few enough for one program to add up.
_MOST_STATS_PROGRAMS = 8192
#: Addresses that the kernels take for gradients to count from.
_NUM_SOURCES = 4
_VECTOR_NBYTES = 16

Table = TypeVar("Table")


class GradPlace(NamedTuple):
    """Where a gradient lies: `offset` bytes from source number `source`, or at address `offset` for the last number.

    `phase` is its address modulo the bytes of a vector.
    """

    source: int
    offset: int
    phase: int


def place_grads(grads: Sequence[Tensor]) -> tuple[list[int], list[GradPlace]]:
    """The addresses of the first allocations that hold the gradients, and the places of these."""
    numbers: dict[int, int] = {}
    places = []
    for grad in grads:
        address, start = grad.data_ptr(), grad.untyped_storage().data_ptr()
        number = min(numbers.setdefault(start, len(numbers)), _NUM_SOURCES)
        offset = address if number == _NUM_SOURCES else address - start
        places.append(GradPlace(number, offset, address % _VECTOR_NBYTES))
    starts = list(numbers)[:_NUM_SOURCES]
    # Filled up with an address, so that the type of the argument does not depend on their number.
    return starts + starts[:1] * (_NUM_SOURCES - len(starts)), places


class SweepRow(NamedTuple):
    """One flat param of `triton_kernels.sweep`: addresses, the kind of its model param, elements, param group."""

    main: int
    first: int
    second: int
    step: int
    model: int
    kind: int
    grad: GradPlace
    numel: int
    group: int


class StatsRow(NamedTuple):
    """One flat param of `triton_kernels.statistics`; `padding_numel` elements of it are zeros of no param."""

    grad: GradPlace
    numel: int
    padding_numel: int
    is_excluded: bool


@dataclass(frozen=True)
class Cut:
    """A flat param in a part that is aligned in all its tensors, and the rest; see [Note: full vectors].

    Args:
        head: elements before the body.
        body: elements of the body.
    """

    head: int
    body: int


def cut(numel: int, words: Sequence[int], model: int | None = None, *, unit: int = 8) -> Cut:
    """Cuts where all tensors are aligned.

    Args:
        numel: of the flat param.
        words: addresses of its fp32 tensors.
        model: address of its 16-bit model param, if it has one.
        unit: the body is a multiple of this.

    Returns:
        An empty body where there is no such element.

    >>> cut(100, [4, 20], 2)
    Cut(head=7, body=88)
    >>> cut(100, [4, 8])
    Cut(head=100, body=0)
    """
    for head in range(unit):
        is_aligned = not any((address + 4 * head) % _VECTOR_NBYTES for address in words)
        if is_aligned and (model is None or (model + 2 * head) % _VECTOR_NBYTES == 0):
            return Cut(head, (numel - head) // unit * unit) if head + unit <= numel else Cut(numel, 0)
    return Cut(numel, 0)


@dataclass(frozen=True, eq=False)
class Uploaded:
    """Numbers on the device.

    Args:
        staged: the same in the host's memory; it is kept because a recorded graph copies it at every replay.
        tensor: on the device.
    """

    staged: Tensor
    tensor: Tensor


def upload(values: Tensor, device: torch.device) -> Uploaded:
    """Copies numbers to the device; the host does not wait.

    Args:
        values: in the host's memory.
        device: which.
    """
    staged = pinned(values.shape, values.dtype, device).copy_(values)
    return Uploaded(staged, staged.to(device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class SweepTable:
    """What `sweep` and `prepare` read, on the device.

    Args:
        columns: int64 [14, flat params].
        owners: int32 [num_programs].
        scalars: fp32 [flat params, 8], written by `prepare`.
        num_bodies: programs that update bodies.
    """

    columns: Uploaded
    owners: Uploaded
    scalars: Tensor
    num_bodies: int

    @classmethod
    def of(cls, rows: Sequence[SweepRow], device: torch.device) -> SweepTable:
        """Builds and uploads it; the host waits for nothing."""
        cuts = [_cut_of(row) for row in rows]
        bodies = [-(-each.body // SWEEP_BLOCK) for each in cuts]
        rests = [-(-(row.numel - each.body) // REST_BLOCK) for row, each in zip(rows, cuts, strict=True)]
        columns = [
            [row.main for row in rows],
            [row.first for row in rows],
            [row.second for row in rows],
            [row.model for row in rows],
            [row.grad.offset for row in rows],
            [row.grad.source for row in rows],
            [row.kind for row in rows],
            [each.head for each in cuts],
            [each.body // 8 for each in cuts],
            [row.numel for row in rows],
            starts_of(bodies),
            starts_of(rests, sum(bodies)),
            [row.step for row in rows],
            [row.group for row in rows],
        ]
        scalars = torch.empty(len(rows), 8, dtype=torch.float32, device=device)
        owners = owners_of(bodies, rests)
        return cls(upload(torch.tensor(columns), device), upload(owners, device), scalars, sum(bodies))

    @property
    def num_programs(self) -> int:
        """Programs of `sweep`."""
        return self.owners.tensor.numel()


def _cut_of(row: SweepRow) -> Cut:
    return cut(row.numel, (row.main, row.first, row.second, row.grad.phase), row.model if row.kind else None)


def starts_of(programs: Sequence[int], first: int = 0) -> list[int]:
    """The first program of each flat param."""
    starts = [first]
    for each in programs:
        starts.append(starts[-1] + each)
    return starts[:-1]


def owners_of(*programs: Sequence[int]) -> Tensor:
    """int32 [programs], the flat param of each.

    Args:
        programs: how many each flat param has, once for every kind of program.
    """
    each = torch.arange(len(programs[0]), dtype=torch.int32)
    return torch.cat([torch.repeat_interleave(each, torch.tensor(counts)) for counts in programs])


@dataclass(frozen=True, eq=False)
class StatsTable:
    """What `statistics` reads, and where its programs leave what they found, on the device.

    Args:
        columns: int64 [7, flat params].
        owners: int32 [num_programs].
        sums: fp32 or float64 [num_programs, 2].
        zeros: int32 [num_programs].
        counter: int32 [1].
        blocks: of one program.
        padding_numel: zeros that are not counted.
    """

    columns: Uploaded
    owners: Uploaded
    sums: Tensor
    zeros: Tensor
    counter: Tensor
    blocks: int
    padding_numel: int

    @classmethod
    def of(cls, rows: Sequence[StatsRow], dtype: torch.dtype, device: torch.device) -> StatsTable:
        """Builds and uploads it; the host waits for nothing."""
        cuts = [cut(row.numel, (row.grad.phase,), unit=4) for row in rows]
        numels = [-(-each.body // STATS_BLOCK) for each in cuts]
        blocks = max(1, -(-sum(numels) // _MOST_STATS_PROGRAMS))
        programs = [max(1, -(-numel // blocks)) for numel in numels]
        columns = [
            [row.grad.offset for row in rows],
            [row.grad.source for row in rows],
            [each.head for each in cuts],
            [each.body // 4 for each in cuts],
            [row.numel for row in rows],
            starts_of(programs),
            [int(row.is_excluded) for row in rows],
        ]
        return cls(
            upload(torch.tensor(columns), device),
            upload(owners_of(programs), device),
            torch.empty(sum(programs), 2, dtype=dtype, device=device),
            torch.empty(sum(programs), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            blocks,
            sum(row.padding_numel for row in rows if not row.is_excluded),
        )

    @property
    def num_programs(self) -> int:
        """Programs of `statistics`."""
        return self.zeros.numel()


def launch(kernel: str, num_programs: int, *arguments: Any, module: str = "triton_kernels", **constants: Any) -> None:
    """Launches a kernel.

    Multiplications and additions are not contracted: a GPU computes what Triton's interpreter does, to the bit, and
    compensated sums lose what they take for lost. Memory bounds all of these kernels, so it costs nothing.

    Args:
        kernel: its name.
        num_programs: of it.
        arguments: of the kernel, in order.
        module: where it is, of this folder.
        constants: by name.
    """
    kernels = import_module(f"megatron_distopt.optimizer.{module}")
    getattr(kernels, kernel)[(num_programs,)](*arguments, **constants, enable_fp_fusion=False)


class Tables(Generic[Table]):
    """The tables that were built last, by what they say.

    Args:
        most: that are held.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._held: dict[Hashable, Table] = {}

    def get(self, key: Hashable, device: torch.device, build: Callable[[], Table]) -> Table:
        """The table of that key, which is built where it is not held."""
        table = self._held.get(key)
        if table is None:
            table = self._held[key] = build()
        while len(self._held) > self._most:
            del self._held[next(iter(self._held))]
        return table


class GroupNumbers:
    """What `prepare` reads of param groups, on the device; it is uploaded where it has changed."""

    def __init__(self) -> None:
        self._held: Tables[Uploaded] = Tables()

    def of(self, groups: Sequence[Mapping[str, Any]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Rates and other options, see `triton_kernels.prepare`.

        Args:
            groups: of torch's Adam.
            device: of the result.
        """
        return self._rates(groups, device), self._options(groups, device)

    def _rates(self, groups: Sequence[Mapping[str, Any]], device: torch.device) -> Tensor:
        """float64 [groups, 2]; the product is made in the dtype of the rate."""
        pairs = [(group["lr"], group["lr"] * group["weight_decay"]) for group in groups]
        flat = [each for pair in pairs for each in pair]
        if not any(isinstance(each, Tensor) and each.device == device for each in flat):
            return self._uploaded(tuple(map(float, flat)), device).view(-1, 2)
        return torch.stack([_wide(each, device) for each in flat]).view(-1, 2)

    def _options(self, groups: Sequence[Mapping[str, Any]], device: torch.device) -> Tensor:
        flat = [float(each) for group in groups for each in (*group["betas"], group["eps"], group["weight_decay"])]
        return self._uploaded(tuple(flat), device).view(-1, 4)

    def _uploaded(self, values: tuple[float, ...], device: torch.device) -> Tensor:
        wide = self._held.get(values, device, lambda: upload(torch.tensor(values, dtype=torch.float64), device))
        return wide.tensor


def _wide(number: float | Tensor, device: torch.device) -> Tensor:
    """float64, 0-D."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float64, non_blocking=True)
    return torch.full((), number, dtype=torch.float64, device=device)
