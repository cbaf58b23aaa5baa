"""What owners of whole params keep, in a checkpoint: tensors of any shape beside those that are cut like the param.

Their kinds begin with "owned:". The kind "owned:" itself is the JSON of `split_state`, as bytes; "owned:state.GG.0" is
the tensor that it calls so. Where tensor-parallel ranks share a param, each of them updates its part for a param of its
own, as the class does without sharding. The kinds of the second of two ranks begin with "owned:1of2:".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import key_of, kind_of
from megatron_distopt.checkpoint.whole_model import Share
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.owners.owned_param import OwnedParam
from megatron_distopt.optimizer.owners.whole_params import owned_params
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_OWNED = "owned:"
#: The part of the param, and the place in its state.
_KIND = re.compile(r"owned:(?:(\d+of\d+):)?(.*)", re.DOTALL)


def is_owned(key: str) -> bool:
    """Whether the tensor of a key is kept by the owner of a param."""
    return kind_of(key).startswith(_OWNED)


def is_owned_part(key: str, placement: Placement) -> bool:
    """Whether the tensor of a key is kept for the part that this rank has of the param."""
    found = _KIND.fullmatch(kind_of(key))
    return found is not None and (found[1] or "") == _part(placement)


def _part(placement: Placement) -> str:
    return "" if placement.dim is None or placement.size == 1 else f"{placement.rank}of{placement.size}"


def owned_tensors(share: Share) -> Iterator[tuple[str, Tensor]]:
    """What this rank has to write of one optimizer, by key; nothing of params that were never updated.

    Raises:
        CheckpointError: the inner optimizer keeps something that fits into no file.
    """
    for name, owned, _ in owned_params(share.optimizer.inner):
        if share.writes(name) and owned.has_state:
            description, tensors = owned.split()
            text = json.dumps(description).encode()
            yield _key(share, "", name), torch.frombuffer(bytearray(text), dtype=torch.uint8)
            for place, tensor in tensors.items():
                yield _key(share, place, name), tensor


def _key(share: Share, place: str, name: str) -> str:
    placement = share.placements[name]
    part = _part(placement)
    return key_of(_OWNED + (f"{part}:" if part else "") + place, placement.name)


def owned_by_name(share: Share) -> dict[str, tuple[OwnedParam, Mapping[str, Any]]]:
    """By the name in the whole model: what this rank owns whole of one optimizer, with the options of its group."""
    found = owned_params(share.optimizer.inner)
    return {share.placements[name].name: (owned, options) for name, owned, options in found}


def _place_of(key: str) -> str:
    found = _KIND.fullmatch(kind_of(key))
    return "" if found is None else found[2]


def take_owned(
    owned: OwnedParam, options: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], where: str
) -> None:
    """Gives an owned param the state of a checkpoint; it begins anew where that has none.

    Args:
        owned: see `OwnedParam`.
        options: of its param group.
        tensors: all of the param that are of this kind, by key.
        where: the checkpoint, for errors.

    Raises:
        CheckpointError: they do not belong together.
    """
    by_place = {_place_of(key): tensor for key, tensor in tensors}
    if not by_place:
        owned.begin(options)
        return
    try:
        owned.join(json.loads(bytes(by_place.pop("").tolist())), by_place, options)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        rule, remedy = "be what an owner of a param has saved", "Load an earlier checkpoint"
        raise CheckpointError(refusal(f"state in checkpoint {where}", repr(error), rule, remedy)) from error


def local_owned(optimizer: ShardedOptimizer) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """What `OwnedParam.split` returns of all that this rank owns whole, by the name of the param; views."""
    return {name: owned.split() for name, owned, _ in owned_params(optimizer.inner)}


def check_local_owned(optimizer: ShardedOptimizer, saved: Mapping[str, Any]) -> None:
    """Checks that a state of one rank is for what this rank owns whole.

    Raises:
        CheckpointError
    """
    owned = {name for name, *_ in owned_params(optimizer.inner)}
    if owned != set(saved):
        rule, remedy = "hold exactly what this rank owns", "Load each rank's own state, saved with the same buckets"
        raise CheckpointError(refusal("owned params in the state", sorted(saved), rule, remedy))


def take_local_owned(optimizer: ShardedOptimizer, saved: Mapping[str, Any]) -> None:
    """Gives what this rank owns whole its state back; after `check_local_owned`."""
    for name, owned, options in owned_params(optimizer.inner):
        description, tensors = saved[name]
        owned.join(description, {key: tensor.clone() for key, tensor in tensors.items()}, options)
