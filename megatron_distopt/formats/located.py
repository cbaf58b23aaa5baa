"""Reads the params of a whole model out of the flat buffers of other software's files, as a `Source`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box, Piece, Placement, Span


@dataclass(frozen=True, eq=False)
class Flat:
    """A flat buffer of which files hold several tensors with the same elements: main params, moments.

    Args:
        kinds: dtypes by kind of tensor: "main", and what the inner optimizer keeps ("exp_avg" ...).
        read: returns a span of the buffer for a kind, 1-D.
    """

    kinds: Mapping[str, torch.dtype]
    read: Callable[[str, Span], Tensor]


@dataclass(frozen=True, eq=False)
class Located:
    """A stretch of a rank's flattened param, and the same elements in a flat buffer.

    Args:
        placement: where the rank's param lies in the whole model.
        in_param: which elements of that param, flattened.
        flat: the buffer that holds them.
        start: index in `flat` of the first of them.
    """

    placement: Placement
    in_param: Span
    flat: Flat
    start: int

    def read(self, kind: str) -> Tensor:
        """Reads the elements of one kind, 1-D.

        Raises:
            CheckpointError: the buffer ends before the last of them.
        """
        found = self.flat.read(kind, Span(self.start, self.start + self.in_param.numel))
        if found.shape != (self.in_param.numel,):
            remedy = "Load an earlier checkpoint; this one is damaged"
            got, rule = f"{found.numel()} elements of its {kind!r}", f"hold {self.in_param.numel} in one place"
            raise CheckpointError(refusal(f"param {self.placement.name!r}", got, rule, remedy))
        return found


def source_of(found: Iterable[Located], where: str, head_of: Callable[[Mapping[str, TensorInfo]], Manifest]) -> Source:
    """Builds the optimizer state of the whole model.

    Args:
        found: stretches that together hold every element of every param once.
        where: path of the checkpoint, for errors.
        head_of: returns param groups, loss scale and so on, for the tensors that were found.

    Raises:
        CheckpointError: nothing is there, or elements are missing or there twice.
    """
    homes: dict[str, list[Located]] = {}
    for each in found:
        homes.setdefault(each.placement.name, []).append(each)
    if not homes:
        rule, remedy = "hold optimizer state", "Save it without --no-save-optim"
        raise CheckpointError(refusal(f"checkpoint {where}", "no param", rule, remedy))
    infos: dict[str, TensorInfo] = {}
    for name, parts in homes.items():
        shape = parts[0].placement.global_shape
        numel = sum(part.in_param.numel for part in parts)
        if numel != math.prod(shape) or any(part.placement.global_shape != shape for part in parts):
            remedy = "Copy the files of all ranks into the folder"
            rule = f"hold all {math.prod(shape)} elements of its shape {list(shape)}, each once"
            raise CheckpointError(refusal(f"param {name!r} in {where}", f"{numel} elements", rule, remedy))
        _check_kinds(name, parts, where)
        for kind, dtype in parts[0].flat.kinds.items():
            infos[key_of(kind, name)] = TensorInfo(shape, dtype_name(dtype))
    return Source(head_of(infos), infos, lambda key, box: gather(homes[name_of(key)], kind_of(key), infos[key], box))


def _check_kinds(name: str, parts: list[Located], where: str) -> None:
    for part in parts:
        if part.flat.kinds != parts[0].flat.kinds:
            listed = [", ".join(sorted(each.flat.kinds)) for each in (part, parts[0])]
            rule, remedy = f"have {listed[1]} as on the others", "Give the files of one save"
            raise CheckpointError(refusal(f"param {name!r} in {where}", f"{listed[0]} on one rank", rule, remedy))


@torch.no_grad()
def gather(parts: Iterable[Located], kind: str, info: TensorInfo, box: Box) -> Tensor:
    """Reads a box of a tensor of the whole model; stretches without elements in the box are not read.

    Args:
        parts: all stretches of the tensor's param.
        kind: "main", "exp_avg" ...
        info: shape and dtype of the whole tensor.
        box: of the whole tensor.
    """
    found = torch.empty(box.sizes, dtype=getattr(torch, info.dtype))
    for part in parts:
        pieces = part.placement.pieces(part.in_param)
        if any(piece.in_global.intersect(box) for piece in pieces):
            fill(found, box, part.read(kind), part.in_param.start, pieces)
    return found


def fill(found: Tensor, box: Box, values: Tensor, start: int, pieces: Iterable[Piece]) -> None:
    """Copies those elements of a stretch that lie in a box of the whole tensor.

    Args:
        found: written to: the elements of the box, in its shape.
        box: of the whole tensor.
        values: the elements of a stretch of a rank's flattened param, 1-D.
        start: index of the first of them in that param.
        pieces: where the stretch lies in the whole tensor.
    """
    for piece in pieces:
        both = piece.in_global.intersect(box)
        if both is not None:
            stretch = values[piece.in_param.relative_to(start).as_slice()].view(piece.sizes)
            inside = stretch[piece.inside.as_slices()][both.relative_to(piece.in_global.offsets).as_slices()]
            found[both.relative_to(box.offsets).as_slices()] = inside


def cut(placement: Placement, dtype: torch.dtype, read: Callable[[Box], Tensor]) -> Tensor:
    """Cuts a rank's param out of the whole tensor: the inverse of `gather`.

    Args:
        placement: where the rank's param lies in the whole tensor.
        dtype: of the result.
        read: returns a box of the whole tensor.
    """
    local = torch.empty(placement.shape, dtype=dtype)
    for piece in placement.pieces(Span(0, local.numel())):
        stretch = local.view(-1)[piece.in_param.as_slice()].view(piece.sizes)
        stretch[piece.inside.as_slices()] = read(piece.in_global)
    return local


def count_unlike(main: Tensor, model: Tensor) -> int:
    """Counts the values of a model param that differ from its main param, rounded to the model's dtype.

    0 shows that the state belongs to this model and that every element was found at its right place.
    """
    numbers = torch.finfo(model.dtype)
    rounded = main.view(model.shape).to(model.dtype)
    return int((~torch.isclose(rounded, model, rtol=numbers.eps, atol=numbers.tiny, equal_nan=True)).sum())
