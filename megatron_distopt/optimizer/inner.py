"""The inner optimizer, as the sharded step sees it: what was chosen, and what those answer that
update params as wholes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.config import ADAM_NAMES
from megatron_distopt.layout import OwnerPlan
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup

Groups = list[dict[str, Any]]
Build = Callable[[Groups], Optimizer]
#: So many param groups are given to one constructor of torch's.
_GROUPS_AT_ONCE = 64


@dataclass(frozen=True)
class InnerChoice:
    """The inner optimizer that was chosen."""

    name: str  # of the source, e.g. "torch_fused".
    build: Build  # from param groups of main params
    # how it came to that; one line for each better source that was passed over
    why: tuple[str, ...] = ()
    # of an optimizer that brings its own, for comparison between ranks
    defaults: tuple[str, ...] = ()
    # builds the same for params on the host, with the same form of state; None where there is no
    # such
    on_host: Build | None = None
    updates_whole_params: bool = False  # whether each param is updated whole, by one rank
    # keys that a user's class writes into its param groups by itself, beside options of its
    # constructor
    writes: frozenset[str] = frozenset()

    @property
    def is_adam(self) -> bool:
        """Whether it is one of our sources of Adam, which keep two moments and count their
        updates."""
        return self.name in ADAM_NAMES

    @property
    def moments(self) -> frozenset[str]:
        """What it keeps for every element. Of a class that a user names it is known after its first
        step only."""
        if self.is_adam:
            return frozenset(("exp_avg", "exp_avg_sq"))
        return frozenset(("momentum_buffer",) if self.name == "torch_sgd" else ())


class InParts(Optimizer):
    """An inner optimizer that updates whole matrices or params, and knows what its main params are
    pieces of.

    It may have several parts, each of which updates some of the param groups. They share its state
    and its param groups, and count updates where torch's classes do.
    """

    owners: list[OwnerPlan]  # who updates what, by buffer; the same on all ranks
    # params, the same on all ranks, that the next step does not update
    left_out: frozenset[str] = frozenset()

    def part_for(self, group: Mapping[str, Any]) -> Optimizer:
        """The part that updates a param group."""
        return self

    def hold(
        self,
        buffers: Sequence[ShardedBuffer],
        flat_params: Sequence[FlatParam],
        groups: Sequence[ParamGroup],
    ) -> None:
        """Says what the main params are pieces of, whenever they are other ones."""
        raise NotImplementedError

    def nbytes_elsewhere(self) -> int:
        """Bytes of what this rank keeps elsewhere than in `state`."""
        return 0


def part_for(inner: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """What updates a param group: the inner optimizer or a part of it."""
    return inner.part_for(group) if isinstance(inner, InParts) else inner


def is_of_torch(kind: type) -> bool:
    """Whether torch itself provides the class."""
    return kind is not Optimizer and f"{kind.__module__}.".startswith("torch.optim.")


def build_in_parts(build: Build, groups: Groups) -> Optimizer:
    """Builds an optimizer that keeps its params in state and param groups alone.

    torch looks for every param of a group in all groups before it, so the time for one object grows
    with the square of their number.
    """
    built = build(groups[:_GROUPS_AT_ONCE])
    for start in range(_GROUPS_AT_ONCE, len(groups), _GROUPS_AT_ONCE):
        other = build(groups[start : start + _GROUPS_AT_ONCE])
        built.state.update(other.state)
        built.param_groups += other.param_groups
    return built
