"""Who wrote to a param between two steps, as far as torch can tell.

torch counts in-place operations on a param (`_version`), but not those on `param.data`, which is an alias with a count
of its own. So while somebody has to know, `Parameter.data` notes every alias that it returns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from weakref import ReferenceType, WeakSet, finalize, ref

from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.between_steps import torch_data
from megatron_distopt.optimizer.sharded import ShardedOptimizer


class WatchedParam(Protocol):
    """Wants to know of the aliases of a param."""

    @property
    def param(self) -> Parameter:
        """Whose."""

    def keep(self, alias: Tensor) -> None:
        """Notes an alias, through which the values may be changed."""


class _DataWatch:
    """Knows who asked for `param.data` of a param."""

    def __init__(self) -> None:
        self._watched: dict[int, ReferenceType[WatchedParam]] = {}
        self._users: WeakSet[Any] = WeakSet()

    def add(self, user: object, params: Iterable[WatchedParam]) -> None:
        """Tells these params, held weakly, of their aliases; until the last user is gone or removed."""
        self._watched |= {id(each.param): ref(each) for each in params}
        if user not in self._users:
            self._users.add(user)
            finalize(user, self._end)
        if "data" not in vars(Parameter):
            Parameter.data = property(self._get, self._set)  # type: ignore[assignment]

    def remove(self, user: object, params: Iterable[WatchedParam]) -> None:
        """Takes back what `add` did."""
        for each in params:
            self._watched.pop(id(each.param), None)
        self._users.discard(user)
        self._end()

    def _end(self) -> None:
        """Puts torch's own `Parameter.data` back where no user is left."""
        self._watched = {key: each for key, each in self._watched.items() if each() is not None}
        if not list(self._users) and "data" in vars(Parameter):
            del Parameter.data

    def _get(self, param: Parameter) -> Tensor:
        alias: Tensor = torch_data.__get__(param)
        known = self._watched.get(id(param))
        watched = None if known is None else known()
        if watched is not None and watched.param is param:
            watched.keep(alias)
        return alias

    def _set(self, param: Parameter, value: Tensor) -> None:
        torch_data.__set__(param, value)


data_watch = _DataWatch()


class _Writes:
    """Counts writes to one param and to its aliases."""

    __slots__ = ("__weakref__", "_aliases", "_version", "_was_written", "name", "param")

    #: So many aliases are held before those that nobody else holds are let go.
    _MANY = 8

    def __init__(self, name: str, param: Parameter) -> None:
        self.name, self.param = name, param
        #: Each with its count of writes when it was noted.
        self._aliases: list[tuple[Tensor, int]] = []
        self.forget()

    def keep(self, alias: Tensor) -> None:
        """See `WatchedParam`. It is held, because its count is lost with it."""
        if len(self._aliases) >= self._MANY:
            self._was_written = self.is_written
            self._let_go()
        self._aliases.append((alias, alias._version))

    @property
    def is_written(self) -> bool:
        """Whether any of it was written to since `forget`."""
        if self._was_written or self.param._version != self._version:
            return True
        return bool(self._aliases) and any(alias._version != count for alias, count in self._aliases)

    def forget(self) -> None:
        """Takes its values as they are now for known."""
        self._version, self._was_written = self.param._version, False
        self._let_go()

    def _let_go(self) -> None:
        """Lets go of the aliases that nobody else holds: beside the list, the loop and the argument."""
        if self._aliases:
            self._aliases = [(alias, alias._version) for alias, _ in self._aliases if sys.getrefcount(alias) > 3]


class RemainderWatch:
    """Refuses weights that were written to where main params are remainders of them.

    A main param of its own wins over weights that were changed in a Megatron, whose step overwrites them. A remainder
    becomes that of other weights, which nobody wants.
    """

    def __init__(self, sharded: ShardedOptimizer, named: Mapping[str, Parameter]) -> None:
        self._sharded = sharded
        flat_params = [flat for flat in sharded.flat_params if flat.changes_with_model]
        names = {shard.name for flat in flat_params for shard in flat.plan.shards}
        self._writes = {name: _Writes(name, named[name]) for name in sorted(names)}
        if self._writes:
            data_watch.add(self, self._writes.values())

    def check(self) -> None:
        """Refuses weights that were written to, if their main params would change with them."""
        written = {name for name, each in self._writes.items() if each.is_written}
        for flat in self._sharded.flat_params if written else ():
            names = [shard.name for shard in flat.plan.shards if shard.name in written]
            if names and flat.changes_with_model:
                raise LayoutError(
                    f"Param {names[0]!r} with main_params_dtype='remainder' was written to between two steps. Call "
                    "optimizer.reload_model_params() after you have changed weights, or write "
                    "--distopt-main-params-dtype float32, with which a step overwrites them."
                )
        self.forget()

    def forget(self) -> None:
        """Takes all weights as they are now for known."""
        for each in self._writes.values():
            each.forget()
