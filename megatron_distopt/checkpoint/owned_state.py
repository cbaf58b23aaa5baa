"""What owners of whole params keep, in a checkpoint: tensors of any shape beside those that are cut like the param.

Their kinds begin with "owned:". The kind "owned:" itself is the JSON of `OwnedParam.split`, as bytes;
"owned:state.GG.0" is the tensor that it calls so. Where tensor-parallel ranks share a param, each of them updates its
part for a param of its own, as the class does without sharding. The kinds of the second of two ranks begin with
"owned:1of2:".
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
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.owners.whole_params import OwnedParam, owned_params

#: The part of the param, and the place in its state.
_KIND = re.compile(r"owned:(?:(\d+of\d+):)?(.*)", re.DOTALL)


def is_owned(key: str) -> bool:
    """Whether the tensor of a key is kept by the owner of a param."""
    return _KIND.fullmatch(kind_of(key)) is not None


def is_owned_part(key: str, placement: Placement) -> bool:
    """Whether the tensor of a key is kept for the part that this rank has of the param."""
    match = _KIND.fullmatch(kind_of(key))
    return match is not None and (match[1] or "") == _part(placement)


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
            text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
            placement = share.placements[name]
            part = _part(placement)
            for place, tensor in {"": text, **tensors}.items():
                yield key_of("owned:" + (f"{part}:" if part else "") + place, placement.name), tensor


def owned_by_name(share: Share) -> dict[str, tuple[OwnedParam, Mapping[str, Any]]]:
    """By the name in the whole model: what this rank owns whole of one optimizer, with the options of its group."""
    return {
        share.placements[name].name: (owned, options) for name, owned, options in owned_params(share.optimizer.inner)
    }


def take_owned(
    owned: OwnedParam, options: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], where: str
) -> None:
    """Gives an owned param the state of a checkpoint, all its tensors by key; it begins anew where that has none.

    Raises:
        CheckpointError: the tensors do not belong together.
    """
    by_place = {match[2]: tensor for key, tensor in tensors if (match := _KIND.fullmatch(kind_of(key)))}
    if not by_place:
        owned.begin(options)
        return
    try:
        owned.join(json.loads(bytes(by_place.pop("").tolist())), by_place, options)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"State in checkpoint {where} is not what the owner of a param has saved: {error!r}. Load an earlier "
            "checkpoint."
        ) from error
