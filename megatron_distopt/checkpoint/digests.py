"""Checksums of params, gradients and moments that do not depend on how they lie on ranks.

[Note: digest] The digest of a tensor is the sum over its elements of (bits of the value, as an integer) times (a weight
of the element's place in the whole param), mod 2**64. Integers add up to the same in any order, so ranks and pieces are
summed as they come: the digest of a param is the same at any data-, tensor- and pipeline-parallel size, and on any
device. It is of the bits, so -0.0 and 0.0 differ, and a NaN is a number like any other.

The weight of an element is the product of one odd number of 64 pseudorandom bits for each of its indices. One element
that differs therefore always changes the digest. Values have at most 32 bits (an 8-byte value counts as two), so among
tensors that differ in several elements one in about 2**32 has the same digest, whichever bits differ: the product does
not lose what the sign bit says, as one of 32 bits would. It is a checksum against chance, not against an adversary.
Source: multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast" (2014), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, shards_of
from megatron_distopt.device import CPU
from megatron_distopt.layout import ParamShard, Span
from megatron_distopt.optimizer.coded import plain
from megatron_distopt.optimizer.inner import moments_of
from megatron_distopt.optimizer.main_params import FlatParam

#: The kind of the reduced gradient; main params are of the kind `MAIN`, moments of the inner optimizer's name for them.
GRADS = "grad"
#: Elements that are summed at once: on the CPU they stay in the cache, elsewhere it limits the memory (8 bytes each).
_AT_ONCE_ON_CPU, _AT_ONCE = 1 << 16, 1 << 22
#: Elements of a piece, which limit what is copied: values of several kinds side by side, and those that are decoded.
_PIECE_NUMEL = 1 << 21
#: Weights of this many indices of a dimension are kept; those of larger indices are made of them each time.
_NUM_KEPT = 1 << 16
#: As signed integers of 64 bits, which is what torch has. Source: splitmix64 (Steele, Lea, Flood 2014).
_STEP, _FIRST, _SECOND = (each - (1 << 64) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
#: Indices of different dimensions have different weights, or a matrix would have the digest of its transpose.
_APART = 1 << 40


@dataclass(frozen=True, order=True)
class DigestKey:
    """What a digest is of.

    Args:
        kind: `GRADS`, `MAIN`, or the inner optimizer's name for a moment.
        name: of the param in the whole model.
    """

    kind: str
    name: str


@dataclass(frozen=True, eq=False)
class LocalDigests:
    """What this rank's elements add to digests.

    Args:
        keys: one for each sum; a param that lies in several pieces here has several.
        sums: int64 [len(keys)], on the device of the params.
        dtypes: in which values of a kind are kept; several are joined by a comma.
    """

    keys: tuple[DigestKey, ...]
    sums: Tensor
    dtypes: Mapping[str, str]


class OwnedPieces:
    """The pieces of a model that this rank counts: each element of the whole model is counted on one rank.

    Args:
        model: as it is now.
    """

    def __init__(self, model: WholeModel) -> None:
        self._pieces = [
            piece
            for share in model.shares
            for flat, shard in shards_of(share.optimizer)
            for piece in _cut(share, flat, shard)
        ]
        self._device = model.shares[0].optimizer.device

    def grads(self) -> LocalDigests:
        """Of the sums in the grad buffers, as they were reduced: not divided, not clipped."""
        return self._digests(lambda piece: {GRADS: piece.flat.grad})

    def state(self) -> LocalDigests:
        """Of main params and moments."""
        return self._digests(_state_of)

    def _digests(self, tensors_of: Callable[[OwnedPiece], Mapping[str, Tensor]]) -> LocalDigests:
        keys, sums, dtypes = list[DigestKey](), list[Tensor](), dict[str, set[str]]()
        for piece in self._pieces:
            tensors = tensors_of(piece)
            for kind, tensor in tensors.items():
                keys.append(DigestKey(kind, piece.placement.name))
                dtypes.setdefault(kind, set()).add(dtype_name(tensor.dtype))
            values = [plain(piece.view(tensor)) for tensor in tensors.values()]
            sums.append(_of_piece(values, piece.piece.in_global.offsets, self._device))
        total = torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=self._device)
        return LocalDigests(tuple(keys), total, {kind: ",".join(sorted(found)) for kind, found in dtypes.items()})


def _cut(share: Share, flat: FlatParam, shard: ParamShard) -> Iterator[OwnedPiece]:
    """The pieces of a shard that this rank counts."""
    placement, whole = share.placements[shard.name], shard.in_param
    for start in range(whole.start, whole.stop, _PIECE_NUMEL) if share.writes(shard.name) else ():
        for piece in placement.pieces(Span(start, min(start + _PIECE_NUMEL, whole.stop))):
            yield OwnedPiece(share, flat, shard, placement, piece)


def _state_of(piece: OwnedPiece) -> dict[str, Tensor]:
    return {MAIN: piece.flat.main, **moments_of(piece.share.optimizer.inner, piece.flat.main)}


def _of_piece(values: Sequence[Tensor], offsets: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(values)]. On an accelerator tensors of one dtype are summed together, which takes fewer launches.

    Args:
        values: of one box; a state may lie on the CPU while its gradient does not.
        offsets: of the box.
        device: of the result.
    """
    is_one = values[0].device.type != CPU and len({(each.dtype, each.device) for each in values}) == 1
    if is_one and len(values) > 1:
        return _summed(_bits(torch.stack(list(values))), offsets).to(device)
    return torch.cat([_summed(_bits(each[None]), offsets).to(device) for each in values])


def digest_of(values: Tensor, offsets: Sequence[int]) -> Tensor:
    """The digest of a box of a param; those of boxes that make up the param add up to its digest.

    Args:
        values: of the box.
        offsets: of its first element in the param, one for each dimension.

    Returns:
        int64 0-D, to be taken mod 2**64.

    >>> whole = torch.arange(12.0).view(3, 4)
    >>> parts = digest_of(whole[:, :1], (0, 0)) + digest_of(whole[:, 1:], (0, 1))
    >>> bool(parts == digest_of(whole, (0, 0)))
    True
    """
    return _summed(_bits(values[None]), offsets)[0]


def _bits(values: Tensor) -> Tensor:
    """The bits as integers; a value of 8 bytes becomes two, in a further dimension."""
    integers = _INTEGERS[values.element_size()]
    return (values.contiguous().unsqueeze(-1) if values.element_size() == 8 else values).view(integers)


def _summed(bits: Tensor, offsets: Sequence[int]) -> Tensor:
    """Sums over all dimensions but the first, in pieces that fit into the cache.

    Args:
        bits: integers [number of tensors, *sizes of the box]; 8-byte values have a further dimension.
        offsets: of the box.
    """
    if bits.dim() == 1:
        return bits.long()
    at_once = _AT_ONCE_ON_CPU if bits.device.type == CPU else _AT_ONCE
    dim = max(range(1, bits.dim()), key=lambda each: bits.shape[each])
    if bits.numel() > at_once and bits.shape[dim] > 1:
        numel = max(at_once * bits.shape[dim] // bits.numel(), 1)
        parts = torch.split(bits, numel, dim)
        return torch.stack(
            [_summed(part, _moved(offsets, dim - 1, numel * number)) for number, part in enumerate(parts)]
        ).sum(0)
    for dim in reversed(range(bits.dim() - 1)):
        start = offsets[dim] if dim < len(offsets) else 0
        bits = (bits * _weights(dim, start, bits.shape[-1], bits.device)).sum(-1)
    return bits


def _moved(offsets: Sequence[int], dim: int, distance: int) -> tuple[int, ...]:
    moved = list(offsets)
    moved[dim] += distance
    return tuple(moved)


def _weights(dim: int, start: int, numel: int, device: torch.device) -> Tensor:
    """The weights of some neighbouring indices of a dimension, int64 [numel].

    Indices come in blocks of `_NUM_KEPT`, whose weights differ by a factor for each block; that of the first is 1.
    """
    kept, first, stop = _kept_weights(dim, device), start // _NUM_KEPT, start + numel
    if stop <= _NUM_KEPT:
        return kept[start:stop]
    blocks = torch.arange(first, -(-stop // _NUM_KEPT), dtype=torch.int64, device=device)
    factors = torch.where(blocks == 0, 1, _mixed(blocks - _APART * (dim + 1)))
    in_first = start - first * _NUM_KEPT
    return (factors[:, None] * kept).view(-1)[in_first : in_first + numel]


@lru_cache(maxsize=16)
def _kept_weights(dim: int, device: torch.device) -> Tensor:
    """Made on the CPU, because the streams of all later steps read them: the copy has ended when it returns."""
    return _mixed(torch.arange(dim * _APART, dim * _APART + _NUM_KEPT, dtype=torch.int64, device=CPU)).to(device)


def _mixed(numbers: Tensor) -> Tensor:
    """An odd pseudorandom number for each, by splitmix64; torch shifts with the sign, which is cut off."""
    numbers = (numbers + 1) * _STEP
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return (numbers ^ _shifted(numbers, 31)) | 1


def _shifted(numbers: Tensor, by: int) -> Tensor:
    return (numbers >> by) & ((1 << (64 - by)) - 1)
