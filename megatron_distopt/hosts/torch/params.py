"""The params between two steps: what a user did to them, found out before the next step.

[Note: weights changed by the user] An fp32 param is its own main param. The main param of a 16-bit
param has to follow a user's changes, so they have to be noticed: see [Note: aliases of a param] in
hosts/watches/watched_params.py. Values are compared, element by element, only if they may have
changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary

from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.torch.group_options import GroupOptions
from megatron_distopt.hosts.watches.watched_params import (
    PlacedParam,
    WeightWatch,
    ids_of,
    names_in,
    params_that_left,
    remainder_lost,
)
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: By param, the watch of the optimizer that updates it.
_watched_by: MutableMapping[Parameter, ReferenceType[Params]] = WeakIdKeyDictionary()


def is_updated(param: Parameter) -> bool:
    """Whether an optimizer of `distribute` updates a param, and still exists."""
    watch = _watched_by.get(param)
    return watch is not None and watch() is not None


class _Home(NamedTuple):
    """Where a module of the user's has a param."""

    param: Parameter
    held: Mapping[str, Any]  # `_parameters` of the module
    key: str


class Params:
    """All params that an optimizer updates, where the user's modules hold them, and the options of
    their param groups."""

    def __init__(
        self,
        chunks: Sequence[Module],
        groups: Sequence[MutableMapping[str, Any]],
        sharded: ShardedOptimizer,
    ) -> None:
        self._chunks, self._groups, self._sharded = chunks, groups, sharded
        self._placed: list[PlacedParam] = []
        self._homes: list[_Home] = []
        #: The 16-bit params, which have main params of their own.
        self._weights = WeightWatch()
        #: 16-bit params whose values are compared before the next step, though no change was seen.
        self._doubtful: set[str] = set()
        #: 16-bit params whose values may have changed since `forget`, also if a call in between was
        #: refused.
        self._changed: set[str] = set()
        self.options = GroupOptions(groups, sharded.inner, sharded.plan.choice)
        self._members: list[list[int]] = []

    def learn_groups(self) -> None:
        """Remembers the params and options of new groups as they are now."""
        self._members += ids_of(self._groups[len(self._members) :])
        self.options.learn()

    def add(self, named: Mapping[str, Parameter]) -> None:
        """Watches further params, which lie in buffers."""
        added = set(named.values())
        self._placed += [PlacedParam(name, param) for name, param in named.items()]
        self._homes += [home for home in self._all_homes() if home.param in added]
        self._weights.add(
            {name: param for name, param in named.items() if param.dtype != torch.float32}
        )
        _watched_by.update((param, ref(self)) for param in added)

    def release(self) -> None:
        self._weights.release()
        for placed in self._placed:
            _watched_by.pop(placed.param, None)
        self._placed.clear()
        self._homes.clear()
        self._changed.clear()
        self._doubtful.clear()

    def _all_homes(self) -> Iterator[_Home]:
        for chunk in self._chunks:
            for module in chunk.modules():
                for key, param in module._parameters.items():
                    if param is not None:
                        yield _Home(param, module._parameters, key)

    def follow(self, *, is_read: bool = True, before_step: bool = False) -> None:
        """Takes over what the user did to params and options since the last step, so that the
        optimizer state matches them.

        `is_read`: the main params are about to be used, so changes that they cannot follow are
        refused. A load replaces the main params, so it passes False. `before_step`: also compares
        the doubtful params."""
        self._collect()
        if is_read and self._changed and (lost := self._lost()):
            remedy = "and read weights with detach(). Or write main_params_dtype='float32'"
            raise remainder_lost(lost[0], "was written to, or its .data was read,", remedy)
        if [list(map(id, group["params"])) for group in self._groups] != self._members:
            raise LayoutError(
                "Params were added to, removed from or reordered in optimizer.param_groups. To "
                "train more params, call optimizer.add_param_group(...). To train fewer, call "
                "param.requires_grad_(False)."
            )
        self.options.sync()
        changed = set(self._changed)
        if before_step:
            changed |= self._doubtful
            self._doubtful.clear()
        if changed:
            self._follow(changed)
            self.forget_followed()

    def _follow(self, changed: Collection[str]) -> None:
        for flat in self._sharded.flat_params:
            for shard in flat.plan.shards if flat.can_tell_changes else ():
                if shard.name in changed:
                    flat.follow_model(shard)

    def _lost(self) -> list[str]:
        """Names of changed params whose main params cannot follow the change."""
        if not self._changed:
            return []
        unknowing = [flat for flat in self._sharded.flat_params if not flat.can_tell_changes]
        return names_in(unknowing, self._changed)

    def _collect(self) -> None:
        """Brings params that have left the buffers back into them, and notes which params may have
        changed."""
        for each in self._weights.params:
            # code that holds an alias may have written to it in a way that torch does not count
            if each.aliases or each.param._version != each.version:
                self._changed.add(each.name)
        if any(placed.param.data_ptr() != placed.address for placed in self._placed):
            for moved in params_that_left(self._placed):
                moved.bring_back(with_values=True)
                self._changed.add(moved.name)
        left = [
            home
            for home in self._homes
            # the `_parameters` of a script module have no `get`
            if home.key not in home.held or home.held[home.key] is not home.param
        ]
        if left:
            self._look_for_replaced(left)

    def _look_for_replaced(self, left: Sequence[_Home]) -> None:
        """Refuses params that another Parameter has replaced. A param that was only removed from
        its module trains no more, as in torch."""
        name_of = {placed.param: placed.name for placed in self._placed}
        homes = list(self._all_homes())
        new = {(id(home.held), home.key) for home in homes if home.param not in name_of}
        for home in left:
            if (id(home.held), home.key) in new:
                raise LayoutError(
                    f"Param {name_of[home.param]!r} was replaced by another Parameter, which the "
                    "optimizer does not know. Write param.copy_(...), call load_state_dict(...) "
                    "without assign=True, or build the optimizer after the replacement."
                )
        self._homes = [home for home in homes if home.param in name_of]

    def reload(self) -> None:
        """Copies all model params into their main params, also those whose main params still round
        to them."""
        self._collect()
        self._sharded.reload_model_params()
        self.forget()

    def forget(self, unknown: Collection[str] = ()) -> None:
        """Marks the current values of all params as seen, except those of `unknown`."""
        self._changed.intersection_update(unknown)
        self._weights.forget()

    def forget_followed(self) -> None:
        """Marks the current values of all params as seen, except those that their main params could
        not follow."""
        self.forget(self._lost())

    def doubt(self) -> None:
        """Makes the next step compare all values: main params were loaded, and the model params may
        not have been."""
        self._doubtful = {each.name for each in self._weights.params}
