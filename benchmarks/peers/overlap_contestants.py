"""All contestants of overlap.py, and the forward that is taken off to know how long backward is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer
from peers.script import pick
from peers.train_contestants import MESSAGES, train_entries
from peers.trainers import Ours, TrainEntry, Trainer
from peers.transformer import TrainSetting, transformer

OURS = "ours"
_OVERLAP, _BOTH = "ours, overlap", "ours, both overlaps"
_VARIANTS = ("fork of 2023, fused Adam", "megatron-core, fused Adam", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2, bf16 wire")
_GATHER_OPTION, _FINISH = "overlap_param_gather", "finish_param_gather"


class OursWithBoth(Ours):
    """This package with both overlaps; a gather that is under way ends with the block of steps."""

    def __init__(self, setting: TrainSetting) -> None:
        super().__init__(setting, overlap_grad_reduce=True, **{_GATHER_OPTION: True})

    def finish(self) -> None:
        getattr(self._optimizer, _FINISH)()


class Forward(Trainer):
    """Forward alone, with all that it keeps for a backward."""

    def __init__(self, setting: TrainSetting) -> None:
        self._model = transformer(setting)

    def train(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._model(tokens)
        return loss.detach()


FORWARD = TrainEntry("forward alone", Forward, trains=False)


def overlap_entries(ours: Sequence[str]) -> tuple[TrainEntry, ...]:
    """Those of train.py, and this package with both of its overlaps where it has two.

    Args:
        ours: see `train_entries`.
    """
    entries = train_entries(ours)
    options = {field.name for field in dataclasses.fields(DistOptConfig)}
    has_both = _GATHER_OPTION in options and hasattr(TorchDistributedOptimizer, _FINISH)
    if not has_both or any(map(_gathers, train_entries([]))):
        return entries
    both = TrainEntry(_BOTH, OursWithBoth)
    place = next(number for number, entry in enumerate(entries) if entry.name == _OVERLAP)
    return (*entries[: place + 1], both, *entries[place + 1 :])


def _gathers(entry: TrainEntry) -> bool:
    """Here or in train.py."""
    build = entry.build
    return build is OursWithBoth or (isinstance(build, partial) and bool(build.keywords.get(_GATHER_OPTION)))


def picked(ours: Sequence[str], names: Sequence[str], *, quick: bool = False) -> list[TrainEntry]:
    """What `--contestants` names, and this package with and without its overlaps.

    In network namespaces of their own ranks do not share memory, so that ours sends messages in any case.

    Args:
        ours: see `train_entries`.
        names: all where there is none.
        quick: leave variants of peers out, where there is none.

    Raises:
        SystemExit: a name is not one of theirs.
    """
    entries = [entry for entry in overlap_entries(ours) if entry.name != MESSAGES]
    mine = [entry.name for entry in entries if is_ours(entry.name)]
    wanted = names or [entry.name for entry in entries if not (quick and entry.name in _VARIANTS)]
    return pick(entries, [*wanted, *mine])


def is_ours(name: str) -> bool:
    return name == OURS or name.startswith(f"{OURS}, ")


def best_of(entries: Sequence[TrainEntry]) -> str:
    """This package as peers are compared with it: with as much overlap as it has, be that the fastest or not."""
    gathering = [entry.name for entry in entries if is_ours(entry.name) and _gathers(entry)]
    return gathering[-1] if gathering else _OVERLAP
