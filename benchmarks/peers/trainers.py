"""Whole training steps: this package, the algorithm of a fork of 2023, and no optimizer at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peers.adam import ADAM, CLIP_GRAD, AdamBuilder
from peers.fork_step import ForkStep
from peers.state import groups_of
from peers.transformer import TrainSetting, transformer


class Trainer:
    """A model with its optimizer on every rank. Its constructor builds both."""

    def train(self, tokens: Tensor) -> Tensor:
        """Collective: forward, backward, reduce, step, gather; returns this rank's loss before the
        step."""
        raise NotImplementedError

    def finish(self) -> None:
        """Collective: completes what `train` may have left for the next step."""

    def close(self) -> None:
        """Lets go of what was changed outside of this object."""


@dataclass(frozen=True)
class TrainEntry:
    """A contestant before it is built."""

    name: str  # in results; this package is "ours"
    build: Callable[[TrainSetting], Trainer]  # it, from the setting; imports what it needs
    trains: bool = True  # False for one whose losses are not those of a training


class Ours(Trainer):
    """This package through its documented calls.

    Args:
        setting: of model and data.
        options: more fields of its config.
    """

    def __init__(self, setting: TrainSetting, **options: Any) -> None:
        from megatron_distopt import DistOptConfig, distribute

        self._model = transformer(setting)
        config = DistOptConfig(accelerator="torch", clip_grad=CLIP_GRAD, **ADAM, **options)
        self._optimizer = distribute(self._model, config, param_groups=groups_of(self._model))

    def train(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._model(tokens)
        self._optimizer.scale_loss(loss).backward()
        self._optimizer.step()
        return loss.detach()

    def finish(self) -> None:
        self._optimizer.finish_param_gather()


class ForkTrainer(Trainer):
    """The forks' order: zero, forward, backward, reduce, step, gather; nothing overlaps.

    Args:
        setting: of model and data.
        adam: the inner optimizer.
    """

    def __init__(self, setting: TrainSetting, adam: AdamBuilder) -> None:
        self._model = transformer(setting)
        self._optimizer = ForkStep(
            self._model, adam, rank=setting.rank, size=setting.size, clip_grad=CLIP_GRAD
        )

    def train(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._model(tokens)
        loss.backward()
        self._optimizer.reduce()
        self._optimizer.step()
        self._optimizer.gather()
        return loss.detach()


class ForwardBackward(Trainer):
    """Neither reduces nor updates: what is left of a step when communication and optimizer cost
    nothing."""

    def __init__(self, setting: TrainSetting) -> None:
        self._model = transformer(setting)

    def train(self, tokens: Tensor) -> Tensor:
        for param in self._model.parameters():
            param.grad = None
        loss = self._model(tokens)
        loss.backward()
        return loss.detach()


class Forward(Trainer):
    """Forward alone, with all that it keeps for a backward."""

    def __init__(self, setting: TrainSetting) -> None:
        self._model = transformer(setting)

    def train(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._model(tokens)
        return loss.detach()
