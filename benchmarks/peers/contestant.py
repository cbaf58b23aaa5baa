"""What a contestant of the benchmark of checkpoints is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from peers.state import Setting


class Contestant:
    """Optimizer state of one model on all ranks, and a way to save it and load it.

    Its constructor builds that state. Every call is collective.
    """

    #: The last one is read. A save in the background is in its steady state from the second on.
    saves = 1

    def save(self, folder: Path) -> None:
        """Writes the state into a folder that is there and empty."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what `save` left to do in the background."""

    def load(self, folder: Path) -> None:
        """Takes back what `save` wrote."""
        raise NotImplementedError

    def forget(self) -> None:
        """Before `load`: overwrites the state, so that a load that does nothing is noticed."""
        for tensor in self.tensors():
            tensor.detach().zero_()

    def tensors(self) -> Iterator[Tensor]:
        """The live state of this rank: main params and moments."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of all memory."""


@dataclass(frozen=True)
class Memory:
    """Bytes of all ranks together that a contestant needs at its worst."""

    save: int  # while it is built and saves
    load: int  # while it loads


@dataclass(frozen=True)
class Entry:
    """A contestant before it is built."""

    name: str  # in results
    what: str  # in words
    build: Callable[[Setting], Contestant]  # it, from the setting
    memory: Callable[[int, int], Memory]  # that it will need, so that what does not fit is left out and not killed
