"""The params between two steps: what a user did to them, found out before the next step.

[Note: weights changed by the user] An fp32 param is its own main param. Of a 16-bit one the main param has to follow,
so its changes have to be seen: torch counts in-place operations (`_version`), but not those on `param.data`, which is
an alias with a count of its own. So while there are 16-bit params under an optimizer, `Parameter.data` notes who was
asked for it (hosts/between_steps.py). Only where either says that something may have changed the values are compared,
element by element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.between_steps import PlacedParam, check_that_left, data_watch


class TrainedParam(PlacedParam):
    """A param of a user's module whose values lie in a param buffer."""

    __slots__ = ("__weakref__", "aliases", "homes", "is_short", "version")

    def __init__(self, name: str, param: Parameter, homes: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        super().__init__(name, param)
        self.homes = tuple(homes)
        #: Of fewer than 32 bits, so that it has a main param of its own, which has to follow changes of the values.
        self.is_short = param.dtype != torch.float32
        #: Tensors through which the values may be changed.
        self.aliases: list[ReferenceType[Tensor]] = []
        self.forget()

    def forget(self) -> None:
        """Takes its values as they are now for known. An alias that still exists may be written to later."""
        self.version = self.param._version
        self.aliases = [alias for alias in self.aliases if alias() is not None]

    def keep(self, alias: Tensor) -> None:
        """Notes an alias, through which the values may be changed."""
        self.aliases.append(ref(alias))


class Params:
    """All params that an optimizer updates, as the user's modules have them."""

    def __init__(self, chunks: Sequence[Module]) -> None:
        self._chunks = chunks
        self._params: list[TrainedParam] = []
        #: Those of 16 bits, and names of those whose values have to be compared also where no change was seen.
        self._short: list[TrainedParam] = []
        self._doubtful: frozenset[str] = frozenset()
        #: Names of those of 16 bits whose values may have changed since `forget`, as `collect` has found them so far.
        self.changed: frozenset[str] = frozenset()

    def add(self, named: Mapping[str, Parameter], buffer: Tensor) -> None:
        """Watches further params."""
        homes = self._homes()
        added = [TrainedParam(name, param, homes.get(param, ())) for name, param in named.items()]
        self._params += added
        if buffer.dtype != torch.float32:
            self._short += added
            data_watch.add(self, added)

    def release(self) -> None:
        """Stops watching."""
        data_watch.remove(self, self._short)
        self._params, self._short, self._doubtful, self.changed = [], [], frozenset(), frozenset()

    def _homes(self) -> dict[Parameter, list[tuple[Mapping[str, Any], str]]]:
        homes: dict[Parameter, list[tuple[Mapping[str, Any], str]]] = {}
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            for key, param in module._parameters.items():
                if param is not None:
                    homes.setdefault(param, []).append((module._parameters, key))
        return homes

    def collect(self) -> frozenset[str]:
        """Brings params back into the buffers that have left them.

        Returns:
            Names of the 16-bit params whose values may have changed since the last `forget`: a call that was refused
            in between has not made them known.

        Raises:
            LayoutError: what was done to one of them cannot be followed.
        """
        left, is_replaced, changed = [], False, self.changed
        for trained in self._params:
            param = trained.param
            if param.data_ptr() != trained.address:
                left.append(trained)
            for held, key in trained.homes:
                is_replaced = is_replaced or held.get(key) is not param
            if trained.is_short and (trained.aliases or param._version != trained.version):
                changed = changed | {trained.name}
        if left:
            check_that_left(self._params, left)
            for trained in left:
                trained.bring_back(with_values=True)
            changed = changed.union(trained.name for trained in left)
        self.changed = changed
        if is_replaced:
            self._look_for_replaced()
        return changed

    def forget(self, unknown: Collection[str] = ()) -> None:
        """Takes all values as they are now for known, but for those of `unknown` params that may have changed."""
        self.changed &= frozenset(unknown)
        for trained in self._short:
            trained.forget()

    def doubt(self) -> None:
        """Has all values compared before the next step: main params were loaded, the model perhaps not."""
        self._doubtful = frozenset(each.name for each in self._short)

    def take_doubtful(self) -> frozenset[str]:
        """Names of those that are to be compared, once: they are known afterwards."""
        names, self._doubtful = self._doubtful, frozenset()
        return names

    def _look_for_replaced(self) -> None:
        """Refuses replaced params. One that left its module without a successor trains no more, as in torch."""
        homes, ours = self._homes(), {each.param for each in self._params}
        new_at = {
            (id(held), key): param for param, places in homes.items() for held, key in places if param not in ours
        }
        for trained in self._params:
            if any(held.get(key) is not trained.param for held, key in trained.homes):
                if any((id(held), key) in new_at for held, key in trained.homes):
                    raise LayoutError(
                        f"Param {trained.name!r} was replaced by another Parameter, which no optimizer has. Write "
                        "param.copy_(...) or load_state_dict(...) without assign=True, or build the optimizer "
                        "afterwards."
                    )
                trained.homes = tuple(homes.get(trained.param, ()))
