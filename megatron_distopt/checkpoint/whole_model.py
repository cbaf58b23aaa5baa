"""How this rank's params lie in the whole model. A host knows it; a checkpoint is written and read by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN, key_of
from megatron_distopt.layout import ParamShard, Piece, Placement
from megatron_distopt.optimizer import MainRun, ShardedOptimizer, moments_of

__all__ = ["OwnedPiece", "WholeModel", "owned_pieces", "same_name"]


def same_name(name: str) -> str:
    """The name itself."""
    return name


@dataclass(frozen=True)
class WholeModel:
    """The model as all ranks together have it.

    Args:
        placements: of this rank's params, by their names in the optimizer.
        canonical: from a name in any host's checkpoint to one that all hosts' names of the same param share.
        writes: whether this rank writes its shards of a param, by name in the optimizer: False on all but one rank for
            what several hold beside data parallelism.
        frozen: names in the whole model of params that do not train here; a checkpoint may hold them.
        about: said in the manifest: host, sizes of the parallel groups.
    """

    placements: Mapping[str, Placement]
    canonical: Callable[[str], str] = same_name
    writes: Callable[[str], bool] = lambda name: True
    frozen: frozenset[str] = frozenset()
    about: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class OwnedPiece:
    """A box of one param that this rank owns.

    Args:
        optimizer: whose run it is in.
        run: that holds the elements.
        shard: of which it is a part.
        placement: of the param.
        piece: which elements.
    """

    optimizer: ShardedOptimizer
    run: MainRun
    shard: ParamShard
    placement: Placement
    piece: Piece

    def view(self, tensor: Tensor) -> Tensor:
        """The elements in a tensor as long as the run, in the shape of the box."""
        in_shard = self.piece.in_param.relative_to(self.shard.in_param.start)
        stretch = self.run.cut(tensor, self.shard)[in_shard.as_slice()]
        return stretch.view(self.piece.sizes)[self.piece.inside.as_slices()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the main param and of what the inner optimizer keeps for each element, by key."""
        yield key_of(MAIN, self.placement.name), self.view(self.run.main)
        for kind, tensor in moments_of(self.optimizer.inner, self.run.main).items():
            yield key_of(kind, self.placement.name), self.view(tensor)


def owned_pieces(optimizers: Sequence[ShardedOptimizer], model: WholeModel) -> Iterator[OwnedPiece]:
    """All that this rank owns, in the order of its buffers."""
    for optimizer in optimizers:
        for run in optimizer.runs:
            for shard in run.run.shards:
                placement = model.placements[shard.name]
                for piece in placement.pieces(shard.in_param):
                    yield OwnedPiece(optimizer, run, shard, placement, piece)
