"""Two checkpoints against each other: which tensors both have, and in what those differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_distopt.checkpoint.manifest import key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.hosts.naming import canonical
from megatron_distopt.plugin.commands.compare import Difference, compare
from megatron_distopt.plugin.commands.progress import Progress
from megatron_distopt.plugin.commands.settings import Setting, settings_that_differ
from megatron_distopt.plugin.commands.tensors import nbytes_of

__all__ = ["Compared", "Pair", "compare_all"]


@dataclass(frozen=True)
class Pair:
    """A tensor that both checkpoints have.

    Args:
        key: in the first.
        first, second: it without its values.
        difference: of the rows that both have; None where the shapes differ otherwise.
    """

    key: str
    first: TensorInfo
    second: TensorInfo
    difference: Difference | None

    @property
    def is_alike(self) -> bool:
        """In shape and dtype."""
        return self.first == self.second

    @property
    def has_equal_values(self) -> bool:
        """To the bit, where they were compared."""
        return self.difference is None or not self.difference.count

    @property
    def order(self) -> tuple[float, str]:
        """The largest difference first, and before it what cannot be said as a number."""
        largest = 0.0 if self.difference is None else self.difference.largest
        return -math.inf if math.isnan(largest) else -largest, self.key

    @property
    def note(self) -> str:
        """What differs beside values."""
        first, second = self.first, self.second
        dtypes = "" if first.dtype == second.dtype else f"{first.dtype} and {second.dtype}"
        shapes = "" if first.shape == second.shape else f"{list(first.shape)} and {list(second.shape)}"
        if shapes and self.difference is None:
            shapes += ": not compared"
        elif shapes:
            shapes += f": rows 0 to {min(first.shape[0], second.shape[0]) - 1} compared"
        return "; ".join(filter(None, (dtypes, shapes)))


@dataclass(frozen=True)
class Compared:
    """The outcome.

    Args:
        pairs: all tensors that both have.
        only_first, only_second: keys that one of them has.
        settings: that differ.
    """

    pairs: Sequence[Pair]
    only_first: Sequence[str]
    only_second: Sequence[str]
    settings: Sequence[Setting]

    @property
    def is_equal(self) -> bool:
        """To the bit, all of it."""
        is_same = all(pair.is_alike and pair.has_equal_values for pair in self.pairs)
        return is_same and not (self.only_first or self.only_second or self.settings)


def compare_all(first: Source, second: Source) -> Compared:
    """Reads both; one tensor of each is in memory at a time.

    Raises:
        CheckpointError: one is damaged.
    """
    theirs = {_same(key): key for key in second.tensors}
    both = {key: theirs[_same(key)] for key in first.tensors if _same(key) in theirs}
    of_both = {*both.values()}
    total = sum(nbytes_of(first.tensors[a]) + nbytes_of(second.tensors[b]) for a, b in both.items())
    with Progress("comparing", total) as progress:
        pairs = [_pair(first, second, a, b, progress) for a, b in both.items()]
    names = dict.fromkeys((name_of(a), name_of(b)) for a, b in both.items())
    return Compared(
        pairs,
        [key for key in first.tensors if key not in both],
        [key for key in second.tensors if key not in of_both],
        [*settings_that_differ(first.head, second.head, names)],
    )


def _same(key: str) -> str:
    """What the tensor is called by every host."""
    return key_of(kind_of(key), canonical(name_of(key)))


def _pair(first: Source, second: Source, ours: str, theirs: str, progress: Progress) -> Pair:
    infos = first.tensors[ours], second.tensors[theirs]
    difference = None
    if infos[0].shape == infos[1].shape:
        difference = compare(first.read(ours), second.read(theirs))
    elif infos[0].shape[1:] == infos[1].shape[1:] and len(infos[0].shape) == len(infos[1].shape):
        rows = min(info.shape[0] for info in infos)  # a vocabulary that was padded for another number of ranks
        difference = compare(first.read(ours)[:rows], second.read(theirs)[:rows])
    progress(sum(map(nbytes_of, infos)))
    return Pair(ours, *infos, difference)
