"""The params between two steps: what a user did to them, found out before the next step.

[Note: weights changed by the user] An fp32 param is its own main param. Of a 16-bit one the main
param has to follow, so its changes have to be seen: torch counts in-place operations (`_version`),
but not those on `param.data`, which is an alias with a count of its own. So while there are 16-bit
params under an optimizer, `Parameter.data` notes who was asked for it (hosts/between_steps.py).
Only where either says that something may have changed the values are compared, element by element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary

from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.between_steps import PlacedParam, check_that_left, data_watch
from megatron_distopt.hosts.torch.group_options import GroupOptions
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: By param, the watch of the optimizer that updates it.
_watched_by: MutableMapping[Parameter, ReferenceType[Params]] = WeakIdKeyDictionary()


def is_updated(param: Parameter) -> bool:
    """Whether an optimizer of `distribute` updates a param, and still exists."""
    watch = _watched_by.get(param)
    return watch is not None and watch() is not None


class TrainedParam(PlacedParam):
    """A param of a user's module whose values lie in a param buffer."""

    __slots__ = ("__weakref__", "aliases", "homes", "is_short", "version")

    def __init__(
        self, name: str, param: Parameter, homes: Sequence[tuple[Mapping[str, Any], str]]
    ) -> None:
        super().__init__(name, param)
        #: The `_parameters` of the modules that have it, each with the name there.
        self.homes = tuple(homes)
        #: Of fewer than 32 bits, so that it has a main param of its own, which has to follow
        #: changes of the values.
        self.is_short = param.dtype != torch.float32
        #: Tensors through which the values may be changed.
        self.aliases: list[ReferenceType[Tensor]] = []
        self.forget()

    def forget(self) -> None:
        """Takes its values as they are now for known. An alias that still exists may be written to
        later."""
        self.version = self.param._version
        self.aliases = [alias for alias in self.aliases if alias() is not None]

    def keep(self, alias: Tensor) -> None:
        self.aliases.append(ref(alias))


class Params:
    """All params that an optimizer updates, as the user's modules have them, and the options of
    their groups."""

    def __init__(
        self,
        chunks: Sequence[Module],
        groups: Sequence[MutableMapping[str, Any]],
        sharded: ShardedOptimizer,
    ) -> None:
        self._chunks, self._groups, self._sharded = chunks, groups, sharded
        self._params: list[TrainedParam] = []
        #: Of those of 16 bits, names of those whose values have to be compared also where no change
        #: was seen.
        self._doubtful: frozenset[str] = frozenset()
        #: Names of those whose values may have changed since `forget`, as `_collect` has found them
        #: so far.
        self._changed: frozenset[str] = frozenset()
        self.options = GroupOptions(groups, sharded.inner, sharded.plan.choice)
        self._members: list[list[int]] = []

    def learn_groups(self) -> None:
        """Notes that groups which are not known yet have the right params and options."""
        self._members += [
            list(map(id, group["params"])) for group in self._groups[len(self._members) :]
        ]
        self.options.learn()

    @property
    def _short(self) -> list[TrainedParam]:
        return [each for each in self._params if each.is_short]

    def add(self, named: Mapping[str, Parameter]) -> None:
        """Watches further params, which lie in buffers."""
        homes = self._homes()
        added = [TrainedParam(name, param, homes.get(param, ())) for name, param in named.items()]
        self._params += added
        _watched_by.update((param, ref(self)) for param in named.values())
        if short := [each for each in added if each.is_short]:
            data_watch.add(self, short)

    def release(self) -> None:
        data_watch.remove(self, self._short)
        for trained in self._params:
            _watched_by.pop(trained.param, None)
        self._params, self._doubtful, self._changed = [], frozenset(), frozenset()

    def _homes(self) -> dict[Parameter, list[tuple[Mapping[str, Any], str]]]:
        homes: dict[Parameter, list[tuple[Mapping[str, Any], str]]] = {}
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            for key, param in module._parameters.items():
                if param is not None:
                    homes.setdefault(param, []).append((module._parameters, key))
        return homes

    def follow(self, *, is_read: bool = True, before_step: bool = False) -> None:
        """Takes over what the user did to params and options since the last step, so that the state
        belongs to them.

        `is_read`: main params are used as they are, so that changes which they cannot follow are
        refused. A load makes such changes known, unless it fails. `before_step`: params that were
        doubted are compared as well."""
        changed = self._collect()
        lost = self._lost() if changed and is_read else ()
        if lost:
            raise LayoutError(
                f"Param {lost[0]!r} with main_params_dtype='remainder' was written to, or its "
                ".data read, between two steps. Call optimizer.reload_model_params() after you "
                "have changed weights, and read them by detach(); or write "
                "main_params_dtype='float32'."
            )
        if [list(map(id, group["params"])) for group in self._groups] != self._members:
            raise LayoutError(
                "The param_groups have other params than they were given. Call "
                "optimizer.add_param_group(...) for more, and param.requires_grad_(False) for "
                "fewer."
            )
        self.options.exchange()
        if before_step and self._doubtful:
            changed, self._doubtful = changed | self._doubtful, frozenset()
        if changed:
            for flat in self._sharded.flat_params:
                for shard in flat.plan.shards if flat.can_tell_changes else ():
                    if shard.name in changed:
                        flat.follow_model(shard)
            self.forget_followed()

    def _lost(self) -> list[str]:
        """Names of changed params of which a main param cannot know how, in the order of the main
        params."""
        unknowing = (
            [flat for flat in self._sharded.flat_params if not flat.can_tell_changes]
            if self._changed
            else []
        )
        return [
            shard.name
            for flat in unknowing
            for shard in flat.plan.shards
            if shard.name in self._changed
        ]

    def _collect(self) -> frozenset[str]:
        """Brings params back into the buffers that have left them.

        Returns names of the 16-bit params whose values may have changed since the last `forget`: a
        call that was refused in between has not made them known.
        """
        left, is_replaced, changed = [], False, self._changed
        for trained in self._params:
            param = trained.param
            if param.data_ptr() != trained.address:
                left.append(trained)
            for held, key in trained.homes:
                # the `_parameters` of a script module have no `get`
                is_replaced = is_replaced or key not in held or held[key] is not param
            if trained.is_short and (trained.aliases or param._version != trained.version):
                changed = changed | {trained.name}
        if left:
            check_that_left(self._params, left)
            for trained in left:
                trained.bring_back(with_values=True)
            changed = changed.union(trained.name for trained in left)
        self._changed = changed
        if is_replaced:
            self._look_for_replaced()
        return changed

    def _look_for_replaced(self) -> None:
        """Refuses replaced params. One that left its module without a successor trains no more, as
        in torch."""
        homes, ours = self._homes(), {each.param for each in self._params}
        new = {(id(held), key) for param in homes.keys() - ours for held, key in homes[param]}
        for trained in self._params:
            if any(
                key not in held or held[key] is not trained.param for held, key in trained.homes
            ):
                if any((id(held), key) in new for held, key in trained.homes):
                    raise LayoutError(
                        f"Param {trained.name!r} was replaced by another Parameter, which no "
                        "optimizer has. Write param.copy_(...) or load_state_dict(...) without "
                        "assign=True, or build the optimizer afterwards."
                    )
                trained.homes = tuple(homes.get(trained.param, ()))

    def reload(self) -> None:
        """Refreshes all main params from the model params, also where they still round to them."""
        self._collect()
        self._sharded.reload_model_params()
        self.forget()

    def forget(self, unknown: Collection[str] = ()) -> None:
        """Takes all values as they are now for known, but for those of `unknown` params that may
        have changed."""
        self._changed &= frozenset(unknown)
        for trained in self._short:
            trained.forget()

    def forget_followed(self) -> None:
        """Takes values as they are now for known, but for changes that main params know nothing
        about."""
        self.forget(self._lost())

    def doubt(self) -> None:
        """Has all values compared before the next step: main params were loaded, the model perhaps
        not."""
        self._doubtful = frozenset(each.name for each in self._short)
