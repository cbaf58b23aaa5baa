"""megatron-core's flat buffers of optimizer state: which params they hold, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.located import Flat, Located
from megatron_distopt.formats.megatron_core.flat_slots import (
    Candidate,
    FlatMain,
    Order,
    Slot,
    Values,
    names_of,
    slots_of,
)
from megatron_distopt.layout import Span

_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<number>\d+)\..+")
_PARAM, _COALESCED = "param", "buckets_coalesced"


@dataclass(frozen=True, eq=False)
class FlatBucket:
    """A bucket, or a buffer in which buckets follow one another.

    Args:
        flat: all that is kept of it.
        main: its main params.
    """

    flat: Flat
    main: FlatMain

    @classmethod
    def of(cls, flat: Flat, numel: int, dtype: torch.dtype, where: str, *, is_one_bucket: bool) -> FlatBucket:
        """Makes one of `numel` elements whose params have the given dtype in the model."""
        return cls(flat, FlatMain(where, dtype, lambda: flat.read(MAIN, Span(0, numel)), is_one_bucket))


def coalesced(state: Mapping[Any, Any], where: str) -> list[list[FlatBucket]]:
    """The buffers of a state that data-parallel rank 0 gathered (megatron-core since 0.7).

    Args:
        state: `{'buckets_coalesced': True, buffer: {(param dtype, grad dtype): {'param', 'exp_avg', ...}}}`
        where: path of it, for errors.

    Raises:
        CheckpointError: it is laid out in another way.
    """
    if not state.get(_COALESCED):
        got, rule = f"without {_COALESCED!r}", "have whole buffers, as megatron-core saves since 0.7"
        remedy = "Load it with the megatron-core that wrote it, and save it with 0.7 or later"
        raise CheckpointError(refusal(f"optimizer state {where}", got, rule, remedy))
    found = []
    for number, by_dtype in state.items():
        for dtypes, tensors in by_dtype.items() if isinstance(by_dtype, Mapping) else ():
            found.append([_buffer(tensors, dtypes[0], f"{number} in {where}")])
    return found


def _buffer(entry: Mapping[str, Any], dtype: torch.dtype, where: str) -> FlatBucket:
    tensors = {_kind(key): value for key, value in entry.items() if isinstance(value, Tensor) and value.dim() == 1}
    kinds = {kind: tensor.dtype for kind, tensor in tensors.items()}
    flat = Flat(kinds, lambda kind, span: tensors[kind][span.as_slice()])
    return FlatBucket.of(flat, tensors[MAIN].numel(), dtype, where, is_one_bucket=False)


def _kind(key: str) -> str:
    return MAIN if key == _PARAM else key


def layer_orders(names: Sequence[str]) -> list[Order]:
    """Orders in which the params of a layer come before those of later layers."""
    found: dict[str, dict[int, int]] = {}
    for number, name in enumerate(names):
        match = _LAYER.fullmatch(name)
        if match:
            found.setdefault(match["before"], {})[number] = int(match["number"])
    return list(found.values())


def locate(
    buffers: Sequence[Sequence[FlatBucket]],
    candidates: Sequence[Candidate],
    orders: Sequence[Order],
    where: str,
    families: Sequence[int] = (),
) -> Iterator[Located]:
    """Where the params of one tensor-parallel rank are; what two stages hold is taken from the first.

    Args:
        buffers: with their buckets in order.
        candidates: params of the model as this rank has them.
        orders: see `names_of`.
        where: path of the checkpoint, for errors.
        families: of the candidates, where it is known that a buffer holds those of one family.

    Raises:
        CheckpointError: params cannot be found or told apart.
    """
    dtypes = {bucket.main.dtype for buffer in buffers for bucket in buffer}
    values = {dtype: Values(candidates, dtype) for dtype in dtypes}
    slots: list[list[tuple[FlatBucket, Slot]]] = [
        [(bucket, slot) for bucket in buffer for slot in slots_of(bucket.main, values[bucket.main.dtype])]
        for buffer in buffers
    ]
    possible = [_of_one_family([slot for _, slot in buffer], families) for buffer in slots]
    names = names_of(possible, candidates, orders, where)
    home: dict[int, int] = {}
    for number, (buffer, found) in enumerate(zip(slots, names, strict=True)):
        for (bucket, slot), candidate in zip(buffer, found, strict=True):
            if home.setdefault(candidate, number) == number:
                yield Located(candidates[candidate].placement, Span(0, slot.numel), bucket.flat, slot.start)


def _of_one_family(slots: list[Slot], families: Sequence[int]) -> list[Slot]:
    """Slots with the candidates of one family alone, where exactly one family fits every slot."""
    fitting = [{families[number] for number in slot.candidates} for slot in slots] if families else []
    common = set.intersection(*fitting) if fitting else set()
    if len(common) != 1:
        return slots
    return [
        replace(slot, candidates=tuple(number for number in slot.candidates if families[number] in common))
        for slot in slots
    ]


def whole_of(by_rank: Sequence[Sequence[Located]]) -> Iterator[Located]:
    """The params of the whole model.

    Args:
        by_rank: those of each tensor-parallel rank.
    """
    for rank, found in enumerate(by_rank):
        yield from (each for each in found if rank == 0 or each.placement.dim is not None)
