"""Orthogonalization of a matrix of which every tensor-parallel rank has a part.

Either every rank gathers the whole matrix, orthogonalizes it and keeps its part: the result is that of one rank with
the whole matrix, to the bit. Or every rank multiplies its part, and the products of the cut dimension are added up over
the ranks: no rank does work twice, and sums have another order. Sums travel in fp32.

Source: megatron-core calls the two "duplicated" and "distributed"; its "blockwise" takes the part of a rank for a
matrix of its own, which needs none of this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_distopt.comm import Group, sum_over
from megatron_distopt.comm.collectives import all_gather
from megatron_distopt.layout import MatrixCut
from megatron_distopt.optimizer.owners.muon import newton_schulz, orthogonalize
from megatron_distopt.optimizer.owners.muon_options import MuonOptions


def orthogonalize_cut(part: Tensor, cut: MatrixCut, options: MuonOptions, group: Group) -> Tensor:
    """Collective over `group`: `orthogonalize` for a matrix that its ranks have equal parts of.

    Args:
        part: 2-D, contiguous, in the dtype in which it travels; may be changed.
        cut: how they share it.
        options: see `MuonOptions`.
        group: tensor-parallel ranks.

    Returns:
        this rank's part of the result.
    """
    if not cut.is_gathered:
        return _distributed(part, cut, options, group)
    whole = orthogonalize(_joined(part, cut, group), options)
    return _in_pieces(whole, cut, cut.size).select(cut.dim + 1, group.rank).reshape(part.shape)


def _joined(part: Tensor, cut: MatrixCut, group: Group) -> Tensor:
    """Collective: the whole matrix, contiguous."""
    bucket = part.new_empty(cut.size * part.numel())
    own = bucket[group.rank * part.numel() : (group.rank + 1) * part.numel()]
    own.copy_(part.view(-1))
    all_gather(bucket, own, group)
    parts = [_in_pieces(each.view(part.shape), cut, 1) for each in bucket.chunk(cut.size)]
    return torch.cat(parts, dim=cut.dim + 1).reshape(cut.whole((part.shape[0], part.shape[1]))).contiguous()


def _in_pieces(matrix: Tensor, cut: MatrixCut, num_ranks: int) -> Tensor:
    """A view with the cut dimension as three: pieces of the stride, ranks, and the rest."""
    sizes = list(matrix.shape)
    sizes[cut.dim : cut.dim + 1] = [cut.stride, num_ranks, -1]
    return matrix.reshape(sizes)  # splits one dimension, which needs no copy


def _distributed(part: Tensor, cut: MatrixCut, options: MuonOptions, group: Group) -> Tensor:
    """Products contract the dimension that is cut, whichever side is shorter."""
    own = part.T if cut.dim == 0 else part
    square = own.float().square().sum()
    sum_over(square, group)
    own = options.normalized(own, square.sqrt())

    def gram_of(matrix: Tensor) -> Tensor:
        gram = (matrix @ matrix.T).float()
        sum_over(gram, group)
        return gram.to(matrix.dtype)

    own = newton_schulz(own, options, gram_of)
    return own.T if cut.dim == 0 else own
