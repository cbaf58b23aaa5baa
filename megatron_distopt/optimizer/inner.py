"""The inner optimizer as the sharded step uses it: the choice, and the interface of optimizers that
update whole params."""

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
#: How many param groups one constructor of torch's is given.
_GROUPS_AT_ONCE = 64


@dataclass(frozen=True)
class InnerChoice:
    """The inner optimizer that was chosen."""

    name: str  # of the implementation, such as "torch_fused"
    build: Build  # takes param groups of main params
    # reasons for the choice; one line for each better implementation that cannot be used
    why: tuple[str, ...] = ()
    # defaults of an optimizer that the user gave, to compare ranks
    defaults: tuple[str, ...] = ()
    # builds the same optimizer for params in CPU memory, with the same form of state; None if there
    # is none
    on_host: Build | None = None
    updates_whole_params: bool = False  # whether one rank updates each param as a whole
    # keys that a user's class writes into its param groups, besides options of its constructor
    writes: frozenset[str] = frozenset()

    @property
    def is_adam(self) -> bool:
        """Whether it is one of our implementations of Adam, which keep two moments and count
        updates."""
        return self.name in ADAM_NAMES

    @property
    def moments(self) -> frozenset[str]:
        """The state that it keeps for every element. For a user's class it is known only after the
        first step."""
        if self.is_adam:
            return frozenset(("exp_avg", "exp_avg_sq"))
        return frozenset(("momentum_buffer",) if self.name == "torch_sgd" else ())


class InParts(Optimizer):
    """An inner optimizer that updates whole matrices or params; its main params are pieces of them.

    It may have several parts, each of which updates some of the param groups. They share its state
    and its param groups, and count updates in the state like torch's classes.
    """

    owners: list[OwnerPlan]  # the owners of matrices or params, by buffer; the same on all ranks
    # params that the next step does not update, the same on all ranks
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
        """Tells it of which params the main params are pieces. Called whenever these change."""
        raise NotImplementedError

    def nbytes_elsewhere(self) -> int:
        """Bytes of state that this rank keeps outside of `state`."""
        return 0


def part_for(inner: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """The optimizer that updates a param group: the inner optimizer or a part of it."""
    return inner.part_for(group) if isinstance(inner, InParts) else inner


def is_of_torch(kind: type) -> bool:
    """Whether torch itself provides the class."""
    return kind is not Optimizer and f"{kind.__module__}.".startswith("torch.optim.")


def build_in_parts(build: Build, groups: Groups) -> Optimizer:
    """Builds an optimizer that keeps params only in its state and its param groups.

    For every param of a group torch searches all earlier groups, so the time to build one object
    grows with the square of their number. So objects with few groups are built and joined.
    """
    built = build(groups[:_GROUPS_AT_ONCE])
    for start in range(_GROUPS_AT_ONCE, len(groups), _GROUPS_AT_ONCE):
        other = build(groups[start : start + _GROUPS_AT_ONCE])
        built.state.update(other.state)
        built.param_groups += other.param_groups
    return built
