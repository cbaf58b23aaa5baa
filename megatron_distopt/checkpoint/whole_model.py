"""How this rank's params lie in the whole model. A host knows it; a checkpoint is written and read by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN, key_of
from megatron_distopt.layout import ParamShard, Piece, Placement
from megatron_distopt.optimizer import FlatParam, ShardedOptimizer, moments_of

__all__ = ["OwnedPiece", "Share", "WholeModel", "owned_pieces", "without_wrappers"]

#: What torch.compile, FSDP and activation checkpointing put into the names of params, wherever they wrap a module.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: What DataParallel and DDP put in front of them.
_IN_FRONT = "module"


def without_wrappers(name: str) -> str:
    """The name that a param has in the model as it was written.

    >>> without_wrappers("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == _IN_FRONT:
        parts = parts[1:]
    return ".".join(parts)


@dataclass(frozen=True, eq=False)
class Share:
    """What one optimizer of this rank holds of the model.

    Args:
        optimizer: the sharded step.
        placements: of its params, by their names in it.
        writes: whether this rank writes its shards of a param, by those names: False on all but one rank for what
            several hold beside data parallelism.
        resting: names in the whole model of params without state, by the number of the param group that they are in.
    """

    optimizer: ShardedOptimizer
    placements: Mapping[str, Placement]
    writes: Callable[[str], bool] = lambda name: True
    resting: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class WholeModel:
    """The model as all ranks together have it.

    Args:
        shares: of this rank, one an optimizer; at least one.
        canonical: from a name in any host's checkpoint to one that all hosts' names of the same param share.
            Names that become the same in one checkpoint or model are compared as they are.
        frozen: names in the whole model of params that do not train here; a checkpoint may hold them.
        about: said in the manifest: host, sizes of the parallel groups.
        from_weights: how a user starts from the model's weights without a checkpoint of the optimizer, for errors.
    """

    shares: Sequence[Share]
    canonical: Callable[[str], str] = without_wrappers
    frozen: frozenset[str] = frozenset()
    about: Mapping[str, str | int] = field(default_factory=dict)
    from_weights: str = "start from its weights with a new optimizer"


@dataclass(frozen=True, eq=False)
class OwnedPiece:
    """A box of one param that this rank owns.

    Args:
        share: whose flat param it is in.
        flat: that holds the elements.
        shard: of which it is a part.
        placement: of the param.
        piece: which elements.
    """

    share: Share
    flat: FlatParam
    shard: ParamShard
    placement: Placement
    piece: Piece

    def view(self, tensor: Tensor) -> Tensor:
        """The elements in a tensor as long as the flat param, in the shape of the box."""
        in_shard = self.piece.in_param.relative_to(self.shard.in_param.start)
        stretch = self.flat.cut(tensor, self.shard)[in_shard.as_slice()]
        return stretch.view(self.piece.sizes)[self.piece.inside.as_slices()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the main param and of what the inner optimizer keeps for each element, by key."""
        yield key_of(MAIN, self.placement.name), self.view(self.flat.main)
        for kind, tensor in moments_of(self.share.optimizer.inner, self.flat.main).items():
            yield key_of(kind, self.placement.name), self.view(tensor)


def owned_pieces(model: WholeModel) -> Iterator[OwnedPiece]:
    """All that this rank owns, in the order of its buffers."""
    for share in model.shares:
        for flat in share.optimizer.flat_params:
            for shard in flat.plan.shards:
                placement = share.placements[shard.name]
                for piece in placement.pieces(shard.in_param):
                    yield OwnedPiece(share, flat, shard, placement, piece)
