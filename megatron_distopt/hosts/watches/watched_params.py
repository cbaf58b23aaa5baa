"""What others did to params between two steps: to their memory, their values and their groups.

[Note: params that have left] `param.data = tensor`, or `.bfloat16().float()` on a module, moves a
param to memory that the optimizer does not write to. Without an error, the param would never be
updated again. This file finds such params. The hosts' own optimizers differ in whether they keep
the new values, so the adapters decide that.

[Note: aliases of a param] torch counts in-place operations on a param (`_version`), but not those
on `param.data`, which is an alias with a count of its own. So while an optimizer has to know
whether its params were changed, `Parameter.data` notes every alias that it returns. Some writes use
no torch operator, such as those of numpy or a collective, and are not counted. So as long as
somebody holds an alias, the values may have changed.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import dtype_name
from megatron_distopt.device import CPU
from megatron_distopt.errors import LayoutError, some_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_log = logging.getLogger("megatron_distopt")
#: torch's own `param.data`, which `DataWatch` replaces.
torch_data: Any = torch._C.TensorBase.data
_Groups = Sequence[Mapping[str, Any]]


# --- memory


def _still_used(storages: Mapping[str, torch.UntypedStorage]) -> list[str]:
    """The names of the storages that something other than this mapping uses."""
    return [
        name
        for name, storage in storages.items()
        if torch._C._storage_Use_Count(storage._cdata) > 1
    ]


@contextmanager
def telling_of_aliases(named: Mapping[str, Parameter]) -> Iterator[None]:
    """Within it params are moved to other memory. Warns of those whose old memory is still used."""
    storages = {name: param.untyped_storage() for name, param in named.items()}
    yield
    if _still_used(storages):
        gc.collect()  # only a reference cycle may still be using it
    if names := _still_used(storages):
        _log.warning(
            "Something still uses the memory that param %s had before the distributed optimizer "
            "was built: a state_dict(), .data, a view, a NumPy array, or the graph of an output. "
            "It will not see any update of the param. Delete it before the optimizer is built, or "
            "take it again afterwards.",
            some_of(names),
        )


def check_not_shared(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses params in memory that processes share: other processes would never see an update."""
    for name, param in named:
        if param.device.type == CPU and param.untyped_storage().is_shared():
            raise LayoutError(
                f"Param {name!r} is in memory that processes share, as after share_memory(). The "
                "distributed optimizer moves params to its own buffers, which other processes "
                "cannot see. Train a copy, copy.deepcopy(model), and call "
                "shared_model.load_state_dict(model.state_dict()) to publish its values."
            )


def check_own_memory(named: Mapping[str, Parameter]) -> None:
    """Refuses two Parameters in the same memory. torch updates that memory twice; here each would
    get memory of its own."""
    _check_apart(named.items(), "is in the same memory as")


def _check_apart(tensors: Iterable[tuple[str, Tensor]], found: str) -> None:
    """Refuses the first two that overlap, in the order of their addresses."""
    extents = sorted(
        (*addresses_of(one), name) for name, one in tensors if one.numel() and not one.is_meta
    )
    for (_, stop, first), (start, _, second) in pairwise(extents):
        if start < stop:
            raise LayoutError(
                f"Param {second!r} {found} {first!r}, but each Parameter needs memory of its own. "
                "To tie params, make them one Parameter, b.weight = a.weight, before the "
                "distributed optimizer is built."
            )


def addresses_of(tensor: Tensor) -> tuple[int, int]:
    """The address of the first byte, and the one after the last byte."""
    extent = 1 + sum(
        (numel - 1) * stride for numel, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + extent * tensor.element_size()


class PlacedParam:
    """A param and the memory in which `param.data` lies, to which the optimizer writes its new
    values."""

    __slots__ = ("address", "name", "param", "view")

    def __init__(self, name: str, param: Parameter) -> None:
        self.name, self.param = name, param
        #: What `param.data` is, unless other code assigned to it.
        self.view: Tensor = torch_data.__get__(param)
        #: `param.data_ptr()` as long as `param.data` is the view.
        self.address = self.view.data_ptr()

    @torch.no_grad()
    def bring_back(self, *, with_values: bool) -> None:
        if with_values:
            self.view.copy_(torch_data.__get__(self.param))
        torch_data.__set__(self.param, self.view)


def params_that_left(params: Sequence[PlacedParam]) -> Sequence[PlacedParam]:
    """Finds the params to bring back, see [Note: params that have left]. Refuses a param whose
    dtype, shape or device has changed, or that was given memory of another param."""
    left = [placed for placed in params if placed.param.data_ptr() != placed.address]
    if not left:
        return left
    for moved in left:
        before, after = _described(moved.view), _described(moved.param)
        if before != after:
            raise LayoutError(
                f"Param {moved.name!r} is {after} now, but it was {before} when the optimizer was "
                "built. Convert the model before distribute(...) or get_megatron_optimizer(...) "
                "builds its optimizer."
            )
    check_not_shared((moved.name, moved.param) for moved in left)
    places: list[tuple[str, Tensor]] = [(placed.name, placed.view) for placed in params]
    places += [(moved.name, moved.param) for moved in left]
    _check_apart(places, "was given the memory of")
    return left


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)} on {tensor.device}"


# --- values


class Writes:
    """Counts writes to one param and to its aliases."""

    __slots__ = ("__weakref__", "_was_written", "aliases", "name", "param", "version")

    #: With this many aliases, those that no other code holds are dropped.
    _MANY = 8

    def __init__(self, name: str, param: Parameter) -> None:
        self.name, self.param = name, param
        #: Aliases that were asked for since `forget` or that somebody still holds, each with the
        #: version that it had.
        self.aliases: list[tuple[Tensor, int]] = []
        self.forget()

    def keep(self, alias: Tensor) -> None:
        """Notes an alias and holds it, so that its version is not lost."""
        if len(self.aliases) >= self._MANY:
            self._was_written = self.is_written
            self._let_go()
        self.aliases.append((alias, alias._version))

    @property
    def is_written(self) -> bool:
        """Whether torch has counted a write."""
        if self._was_written or self.param._version != self.version:
            return True
        return any(alias._version != count for alias, count in self.aliases)

    def forget(self) -> None:
        """Marks the current values as seen."""
        self.version, self._was_written = self.param._version, False
        if self.aliases:
            self._let_go()

    def _let_go(self) -> None:
        """Drops the aliases that no other code holds, not even as the base of a view."""
        held = [ref(alias) for alias, _ in self.aliases]
        self.aliases.clear()
        others = [alias() for alias in held]
        self.aliases += [(alias, alias._version) for alias in others if alias is not None]


class _DataWatch:
    """Gives `Writes` every alias that `param.data` returns."""

    def __init__(self) -> None:
        #: By the id of the param, while somebody holds the `Writes`.
        self._writes: WeakValueDictionary[int, Writes] = WeakValueDictionary()

    def add(self, params: Iterable[Writes]) -> None:
        self._writes.update({id(each.param): each for each in params})
        if self._writes and "data" not in vars(Parameter):
            Parameter.data = property(self._get, torch_data.__set__)  # type: ignore[assignment]

    def remove(self, params: Iterable[Writes]) -> None:
        for each in params:
            self._writes.pop(id(each.param), None)
        self._end()

    def _end(self) -> None:
        """Puts torch's own `Parameter.data` back when no param is watched."""
        if not self._writes and "data" in vars(Parameter):
            del Parameter.data

    def _get(self, param: Parameter) -> Tensor:
        alias: Tensor = torch_data.__get__(param)
        if writes := self._writes.get(id(param)):
            writes.keep(alias)
        else:
            self._end()
        return alias


data_watch = _DataWatch()


class WeightWatch:
    """Watches params whose main params have to follow a change of values."""

    def __init__(self) -> None:
        self.params: list[Writes] = []

    def add(self, named: Mapping[str, Parameter]) -> None:
        added = [Writes(name, param) for name, param in named.items()]
        self.params += added
        data_watch.add(added)

    def release(self) -> None:
        data_watch.remove(self.params)
        self.params.clear()

    def forget(self) -> None:
        """Marks all current values as seen, after a step or another write of the optimizer's. An
        alias that somebody still holds is watched on."""
        for each in self.params:
            each.forget()


class RemainderWatch(WeightWatch):
    """Refuses weights that were written to while their main params are stored as remainders.

    In a Megatron a step overwrites changed weights with the main params. But a remainder is the
    difference of a main param to its weight, so a changed weight silently changes the main param.
    """

    def __init__(self, sharded: ShardedOptimizer, named: Mapping[str, Parameter]) -> None:
        super().__init__()
        self._sharded = sharded
        self.add({name: named[name] for name in names_in(self._remainders(), named)})

    def _remainders(self) -> list[FlatParam]:
        return [flat for flat in self._sharded.flat_params if flat.changes_with_model]

    def check(self) -> None:
        """Refuses weights that were written to since the last step, if main params would change
        with them."""
        written = {each.name for each in self.params if each.is_written}
        if written and (lost := names_in(self._remainders(), written)):
            remedy = (
                "or write --distopt-main-params-dtype float32: then steps overwrite changed weights"
            )
            raise remainder_lost(lost[0], "was written to", remedy)
        self.forget()


def names_in(flat_params: Iterable[FlatParam], names: Collection[str]) -> list[str]:
    """The params of which flat params hold a shard, in the order of the flat params."""
    return [shard.name for flat in flat_params for shard in flat.plan.shards if shard.name in names]


def remainder_lost(name: str, found: str, remedy: str) -> LayoutError:
    """An error for weights that were changed while main params are stored as remainders."""
    return LayoutError(
        f"Param {name!r} {found} between two steps, which also changes its main param, because "
        "main_params_dtype is 'remainder'. Call optimizer.reload_model_params() after you have "
        f"changed weights, {remedy}."
    )


# --- groups


class GroupMembers:
    """Notes which params are in the groups of an inner optimizer, and refuses a change."""

    def __init__(self, groups: _Groups) -> None:
        self._ids = ids_of(groups)

    def check(self, groups: _Groups) -> None:
        if ids_of(groups) != self._ids:
            raise LayoutError(
                "Params were added to, removed from or reordered in optimizer.param_groups. After "
                "a change of the model, build the optimizer again with "
                "get_megatron_optimizer(...)."
            )


def ids_of(groups: _Groups) -> list[list[int]]:
    """The ids of the params in each group."""
    return [list(map(id, group["params"])) for group in groups]
