"""What owners of whole params keep, in a checkpoint: tensors of any shape beside those that are cut like the param.

Their kinds begin with "owned:". The kind "owned:" itself is the JSON of `split_state`, as bytes; "owned:state.GG.0" is
the tensor that it calls so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import key_of, kind_of
from megatron_distopt.checkpoint.whole_model import Share
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.optimizer import OwnedParam, owned_params

__all__ = ["is_owned", "owned_by_name", "owned_tensors", "take_owned"]

_OWNED = "owned:"


def is_owned(key: str) -> bool:
    """Whether the tensor of a key is kept by the owner of a param."""
    return kind_of(key).startswith(_OWNED)


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
    return key_of(_OWNED + place, share.placements[name].name)


def owned_by_name(share: Share) -> dict[str, tuple[OwnedParam, Mapping[str, Any]]]:
    """By the name in the whole model: what this rank owns whole of one optimizer, with the options of its group."""
    found = owned_params(share.optimizer.inner)
    return {share.placements[name].name: (owned, options) for name, owned, options in found}


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
    by_place = {kind_of(key).removeprefix(_OWNED): tensor for key, tensor in tensors}
    if not by_place:
        owned.begin(options)
        return
    try:
        owned.join(json.loads(bytes(by_place.pop("").tolist())), by_place, options)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        rule, remedy = "be what an owner of a param has saved", "Load an earlier checkpoint"
        raise CheckpointError(refusal(f"state in checkpoint {where}", repr(error), rule, remedy)) from error
