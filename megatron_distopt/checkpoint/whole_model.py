"""What this rank holds of the whole model. A host describes it; a checkpoint is written from it and
read into it.

[Note: owned state] What the owner of a whole param keeps are tensors of any shape beside those that
are cut like the param. Their kinds begin with "owned:". The kind "owned:" itself is the JSON of
`OwnedParam.split`, as bytes; "owned:state.GG.0" is the tensor that it calls so. Where
tensor-parallel ranks share a param, each of them updates its part for a param of its own, as the
class does without sharding. The kinds of the second of two ranks begin with "owned:1of2:".
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_distopt.checkpoint.manifest import MAIN, key_of, kind_of
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import ParamShard, Piece, Placement
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.inner_state import moments_of
from megatron_distopt.optimizer.loss_scale import LossScale
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.owners.whole_params import OwnedParam, owned_params
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: What torch.compile, FSDP and activation checkpointing add to the names of params in a module that
#: they wrap.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: What DataParallel and DDP add in front of the names.
_IN_FRONT = "module"
_log = logging.getLogger("megatron_distopt")
#: The names that Megatron's grad scaler has for the numbers of the loss scale, and the names in a
#: checkpoint.
LOSS_SCALE_NAMES = {
    "scale": "scale",
    "growth_tracker": "good_steps",
    "hysteresis_tracker": "tolerated",
}
#: The kind of a tensor that the owner of a whole param keeps: the part of the param, and the place
#: in its state.
_OWNED_KIND = re.compile(r"owned:((?:\d+of\d+:)?)(.*)", re.DOTALL)


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
    """What one optimizer of this rank holds of the model."""

    optimizer: ShardedOptimizer
    placements: Mapping[str, Placement]  # of its params, by their names in it
    #: Whether this rank writes its shards of a param, by the names in the optimizer. Where ranks
    #: other than data-parallel ones hold the same shards, it is True on one of them.
    writes: Callable[[str], bool] = lambda name: True
    #: Names in the whole model of params without state, by the number of the param group that they
    #: are in.
    untrained: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class WholeModel:
    """The model as all ranks together have it."""

    shares: Sequence[Share]  # of this rank, one for each optimizer; at least one
    #: Maps the names that different hosts have for a param to one name. Names that become equal
    #: within one checkpoint or model are compared as they are.
    canonical: Callable[[str], str] = without_wrappers
    # names of params that do not train here; a checkpoint may hold them
    frozen: frozenset[str] = frozenset()
    # host and sizes of groups, for the manifest
    about: Mapping[str, str | int] = field(default_factory=dict)
    # what to do without a checkpoint, for errors
    from_weights: str = "start from its weights with a new optimizer"
    # options of param groups that a load leaves as the run has them
    kept_options: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class OwnedPiece:
    """A box of one param that this rank owns."""

    share: Share
    flat: FlatParam  # holds the elements
    shard: ParamShard  # that the box is a part of
    placement: Placement  # of the param
    piece: Piece  # which elements

    def view(self, tensor: Tensor) -> Tensor:
        """The elements of the piece in a tensor as long as the flat param, in the shape of the
        box."""
        in_shard = self.piece.in_param.relative_to(self.shard.in_param.start)
        stretch = self.flat.cut(tensor, self.shard)[in_shard.as_slice()]
        shown = stretch.view(self.piece.sizes)[self.piece.inside.as_slices()]
        return shown.permute(self.piece.dims) if self.piece.dims else shown

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the main param, of its average once there is one, and of the moments, by key."""
        yield key_of(MAIN, self.placement.name), self.view(self.flat.main)
        averages = self.share.optimizer.averages
        if self.flat.average is not None and averages is not None and averages.has_begun:
            yield key_of(AVERAGE, self.placement.name), self.view(self.flat.average)
        for kind, tensor in moments_of(self.share.optimizer.inner, self.flat.main).items():
            yield key_of(kind, self.placement.name), self.view(tensor)


def shards_of(optimizer: ShardedOptimizer) -> Iterator[tuple[FlatParam, ParamShard]]:
    """The param shards of this rank with their flat params, in the order of the buffers."""
    return ((flat, shard) for flat in optimizer.flat_params for shard in flat.plan.shards)


def owned_pieces(model: WholeModel) -> Iterator[OwnedPiece]:
    """Everything that this rank owns, in the order of its buffers."""
    for share in model.shares:
        for flat, shard in shards_of(share.optimizer):
            placement = share.placements[shard.name]
            for piece in placement.pieces(shard.in_param):
                yield OwnedPiece(share, flat, shard, placement, piece)


def saved_loss_scale(loss_scale: LossScale) -> dict[str, float]:
    """The state of a loss scale as plain numbers; empty for one that never changes."""
    return {
        LOSS_SCALE_NAMES.get(key, key): float(value.item()) if torch.is_tensor(value) else value
        for key, value in loss_scale.state_dict().items()
    }


def load_loss_scale(loss_scale: LossScale, saved: Mapping[str, Any]) -> None:
    """Loads the numbers where both runs have a loss scale; a run may start or stop using one.

    `saved` has the names of a checkpoint, or those of Megatron's grad scaler.
    """
    current, named = (
        loss_scale.state_dict(),
        {LOSS_SCALE_NAMES.get(key, key): saved[key] for key in saved},
    )
    found = {key: named.get(LOSS_SCALE_NAMES.get(key, key)) for key in current}
    if current and None not in found.values():
        loss_scale.load_state_dict(
            {key: _like(value, found[key]) for key, value in current.items()}
        )
    elif current:
        _log.warning("the checkpoint has no loss scale; this run continues with its own")
    elif saved:
        _log.warning("the checkpoint has a loss scale, which is ignored because this run has none")


def _like(current: Any, number: Any) -> Any:
    """A number in the type and shape in which this run keeps it."""
    return (
        torch.full_like(current, float(number))
        if torch.is_tensor(current)
        else type(current)(number)
    )


# --- what owners of whole params keep, see [Note: owned state]


def is_owned(key: str) -> bool:
    """Whether the tensor of a key is kept by the owner of a param."""
    return _OWNED_KIND.fullmatch(kind_of(key)) is not None


def is_owned_part(key: str, placement: Placement) -> bool:
    """Whether the tensor of a key is kept for the part that this rank has of the param."""
    match = _OWNED_KIND.fullmatch(kind_of(key))
    return match is not None and match[1] == _part(placement)


def _part(placement: Placement) -> str:
    return (
        ""
        if placement.dim is None or placement.size == 1
        else f"{placement.rank}of{placement.size}:"
    )


def owned_tensors(share: Share) -> Iterator[tuple[str, Tensor]]:
    """What this rank has to write of one optimizer, by key; nothing of params that were never
    updated.

    Raises:
        CheckpointError: the inner optimizer keeps something that fits into no file.
    """
    for name, owned, _ in owned_params(share.optimizer.inner):
        if share.writes(name) and owned.has_state:
            description, tensors = owned.split()
            text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
            placement = share.placements[name]
            for place, tensor in {"": text, **tensors}.items():
                yield key_of(f"owned:{_part(placement)}{place}", placement.name), tensor


def take_owned(
    owned: OwnedParam, options: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], where: str
) -> None:
    """Gives an owned param the state of a checkpoint, all its tensors by key; it begins anew where
    that has none.

    Raises:
        CheckpointError: the tensors do not belong together.
    """
    by_place = {
        match[2]: tensor
        for key, tensor in tensors
        if (match := _OWNED_KIND.fullmatch(kind_of(key)))
    }
    if not by_place:
        owned.begin(options)
        return
    try:
        owned.join(json.loads(bytes(by_place.pop("").tolist())), by_place, options)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"Checkpoint {where} has state that the owner of a param did not save in this form: "
            f"{error!r}. Load an earlier checkpoint."
        ) from error


def untrained_tensors(chunks: Iterable[Module]) -> dict[str, Tensor]:
    """What a model has beside the params that train, by name: frozen params and persistent
    buffers."""
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        for prefix, module in chunk.named_modules(prefix=str(number)):
            buffers = module.named_buffers(prefix, recurse=False)
            skipped = {f"{prefix}.{name}" for name in module._non_persistent_buffers_set}
            found |= {name: buffer for name, buffer in buffers if name not in skipped}
            params = module.named_parameters(prefix, recurse=False)
            found |= {name: param for name, param in params if not param.requires_grad}
    return found
