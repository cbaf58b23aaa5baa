"""One flat param group in DeepSpeed's files of ZeRO stages 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.exchange.deepspeed_state import group_record, step_of
from megatron_distopt.checkpoint.exchange.inert import attribute
from megatron_distopt.checkpoint.exchange.located import Flat
from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.layout import Span

__all__ = ["ZeroGroup", "zero_group"]


@dataclass(frozen=True, eq=False)
class ZeroGroup:
    """One param group of one model-parallel rank.

    Args:
        shapes: of its params, in order.
        flats: its flat buffers, by data-parallel rank.
        numel: of the first of them, which has no padding unless it is the only one.
        fragments: what of each param is where in them, by data-parallel rank; None where the files do not say it.
        record: of a `Source`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    flats: tuple[Flat, ...]
    numel: int
    fragments: tuple[Mapping[str, Span] | None, ...]
    record: GroupRecord

    def spans(self) -> dict[str, list[tuple[Flat, Span]]]:
        """Where in the flat buffers each param is, from its first element on."""
        found: dict[str, list[tuple[Flat, Span]]] = {}
        for flat, fragments in zip(self.flats, self.fragments, strict=True):
            for name, span in (fragments or {}).items():
                found.setdefault(name, []).append((flat, span))
        return found if None not in self.fragments else self._one_after_the_other()

    def _one_after_the_other(self) -> dict[str, list[tuple[Flat, Span]]]:
        """As DeepSpeed laid them out before it said so: params in order, in equal parts, padding last."""
        found: dict[str, list[tuple[Flat, Span]]] = {}
        start, each = 0, self.numel
        for name, shape in self.shapes.items():
            here = Span(start, start + math.prod(shape))
            for number, flat in enumerate(self.flats):
                both = here.intersect(Span(number * each, (number + 1) * each))
                if both is not None:
                    found.setdefault(name, []).append((flat, both.relative_to(number * each)))
            start = here.stop
        return found


def zero_group(number: int, shapes: Mapping[str, tuple[int, ...]], states: Sequence[Mapping[str, Any]]) -> ZeroGroup:
    """A param group of one model-parallel rank.

    Args:
        number: of it.
        shapes: of its params, in order.
        states: contents of the optimizer files, by data-parallel rank.
    """
    base = states[0]["base_optimizer_state"]
    options = base["param_groups"][number] if isinstance(base, Mapping) else {}
    step = step_of(_inner_state(states[0], number), options, states[0].get("base_optimizer_state_step"))
    flats = tuple(_flat(_inner_state(state, number), state, number) for state in states)
    fragments = tuple(_fragments(state, number) for state in states)
    numel = states[0]["single_partition_of_fp32_groups"][number].numel()
    return ZeroGroup(shapes, flats, numel, fragments, group_record(shapes, options, step))


def _inner_state(state: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """What the inner optimizer keeps for a group; a list where it was saved without padding."""
    base = state["base_optimizer_state"]
    found: Mapping[str, Any] = base["state"].get(number, {}) if isinstance(base, Mapping) else base[number]
    return found


def _flat(inner: Mapping[str, Any], state: Mapping[str, Any], number: int) -> Flat:
    moments = {key: value for key, value in inner.items() if isinstance(value, Tensor) and value.dim() == 1}
    tensors = {MAIN: state["single_partition_of_fp32_groups"][number].view(-1), **moments}
    kinds: dict[str, torch.dtype] = {kind: tensor.dtype for kind, tensor in tensors.items()}
    return Flat(kinds, lambda kind, span: tensors[kind][span.as_slice()])


def _fragments(state: Mapping[str, Any], number: int) -> Mapping[str, Span] | None:
    if "param_slice_mappings" not in state:
        return None
    mapping = state["param_slice_mappings"][number]
    starts = {
        str(name): (int(attribute(each, "start")), int(attribute(each, "numel"))) for name, each in mapping.items()
    }
    return {name: Span(start, start + numel) for name, (start, numel) in starts.items()}
