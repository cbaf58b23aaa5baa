"""megatron-core's keys in a distributed checkpoint, as params of the whole model.

::

    decoder.layers.3.mlp.linear_fc2.weight       one param
    decoder.layers.mlp.linear_fc2.weight         that of all layers, stacked (until 0.14)
    decoder.layers.3.mlp.linear_fc1.weight_w     the gate, and with _v in place of _w the up projection: one param
    optimizer.state.exp_avg.KEY                  of the param KEY; until 0.14 each tensor-parallel rank's part is flat

A flat part of rank (i, j) of a grid of X by Y ranks is row [i, j] of a tensor of shape [X, Y, elements of a part].
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.torch.dcp_reader import DcpFolder, DcpTensor
from megatron_distopt.layout import Box

_STACKED = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?!\d+\.)(?P<after>.+)")
_GATE, _UP = "_w", "_v"


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A tensor of the whole model.

    Args:
        shape: of it.
        dtype: of it.
        cuts: into how many parts each dimension was cut.
        read: a box of it.
        place: in the order of the file; layers that are stacked have one each.
        writer: the file that has the first part of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[int, ...]
    read: Callable[[Box], Tensor]
    place: tuple[int, int, int]
    writer: str

    def whole(self) -> Tensor:
        """The whole tensor."""
        return self.read(Box.whole(self.shape))


def named_tensors(
    folder: DcpFolder, keys: Mapping[str, str], model: Mapping[str, NamedTensor] | None = None
) -> dict[str, NamedTensor]:
    """Tensors by the names of params in the whole model.

    Args:
        folder: the checkpoint.
        keys: from megatron-core's key of a param to the key of the tensor.
        model: params of the model, where the tensors may be flat.

    Raises:
        CheckpointError: a tensor has neither the shape of its param nor that of its flat parts.
    """
    found: dict[str, NamedTensor] = {}
    blocks: dict[str, int] = {}
    for number, (key, place) in enumerate(keys.items()):
        match = _STACKED.fullmatch(key)
        block = blocks.setdefault(match["before"], number) if match else number
        found |= _layers_of(folder, key, place, (block, 0, number))
    if model is not None:
        found = {name: _in_shape(tensor, name, model.get(name), folder) for name, tensor in found.items()}
    return dict(_with_pairs(found))


def _layers_of(
    folder: DcpFolder, key: str, stored_as: str, place: tuple[int, int, int]
) -> Iterator[tuple[str, NamedTensor]]:
    stored = folder.tensors[stored_as]
    writer = stored.chunks[0].stored.file if stored.chunks else ""
    about = (stored.dtype, _cuts_of(stored), lambda box: folder.read_box(stored_as, box), place, writer)
    whole, match = NamedTensor(stored.shape, *about), _STACKED.fullmatch(key)
    if match is None or any(chunk.box.sizes[:1] != (1,) for chunk in stored.chunks):
        yield key, whole
        return
    for layer in range(stored.shape[0]):
        yield f"{match['before']}{layer}.{match['after']}", _row(whole, layer)


def _cuts_of(stored: DcpTensor) -> tuple[int, ...]:
    return tuple(len({chunk.box.offsets[dim] for chunk in stored.chunks}) for dim in range(len(stored.shape)))


def _row(whole: NamedTensor, row: int) -> NamedTensor:
    def read(box: Box) -> Tensor:
        return whole.read(Box((row, *box.offsets), (1, *box.sizes)))[0]

    place = (whole.place[0], row, whole.place[2])
    return replace(whole, shape=whole.shape[1:], cuts=whole.cuts[1:], read=read, place=place)


def _in_shape(tensor: NamedTensor, name: str, param: NamedTensor | None, folder: DcpFolder) -> NamedTensor:
    if param is None or param.shape == tensor.shape:
        return tensor
    cuts, numel = tensor.shape[:-1], tensor.shape[-1]
    is_grid = len(cuts) == len(param.shape) and all(s % c == 0 for s, c in zip(param.shape, cuts, strict=True))
    if not is_grid or math.prod(cuts) * numel != math.prod(param.shape):
        got, rule = (
            f"of shape {list(tensor.shape)}",
            f"have the shape {list(param.shape)} of the param, or of its parts",
        )
        remedy = "Load it with megatron-core 0.15 or newer, and save it again in its default format (dp_reshardable)"
        raise CheckpointError(refusal(f"state of {name!r} in {folder.folder}", got, rule, remedy))
    return replace(param, dtype=tensor.dtype, read=lambda box: _unfold(tensor.whole(), param.shape)[box.as_slices()])


def _unfold(parts: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshapes [X, Y, elements of a part] into [rows, columns], for any number of dimensions."""
    cuts = parts.shape[:-1]
    sizes = [numel // cut for numel, cut in zip(shape, cuts, strict=True)]
    dims = len(shape)
    alternating = [dim for pair in zip(range(dims), range(dims, 2 * dims), strict=True) for dim in pair]
    return parts.reshape(*cuts, *sizes).permute(alternating).reshape(shape)


def _with_pairs(tensors: Mapping[str, NamedTensor]) -> Iterator[tuple[str, NamedTensor]]:
    """Puts the halves of gated projections together."""
    for name, tensor in tensors.items():
        base, suffix = name[: -len(_GATE)], name[-len(_GATE) :]
        if suffix == _GATE and f"{base}{_UP}" in tensors and base not in tensors:
            yield base, _stacked(tensor, tensors[f"{base}{_UP}"])
        elif not (suffix == _UP and f"{base}{_GATE}" in tensors and base not in tensors):
            yield name, tensor


def _stacked(gate: NamedTensor, up: NamedTensor) -> NamedTensor:
    rows, (_, *rest) = gate.shape[0], gate.shape

    def read(box: Box) -> Tensor:
        halves = [Box((number * rows, *(0 for _ in rest)), gate.shape) for number in (0, 1)]
        both = [(half, part, box.intersect(half)) for half, part in zip(halves, (gate, up), strict=True)]
        return torch.cat([part.read(inside.relative_to(half.offsets)) for half, part, inside in both if inside])

    return replace(gate, shape=(2 * rows, *rest), cuts=(2 * gate.cuts[0], *gate.cuts[1:]), read=read)
