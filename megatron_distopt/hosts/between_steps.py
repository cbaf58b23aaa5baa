"""Finds what a user did to params and param groups between two steps, before the next step is made.

[Note: params that have left] `param.data = tensor`, or `.bfloat16().float()` on a module, moves a
param to memory that the optimizer does not write to: without an error, it would never be updated
again. This file finds such params. Whether their new values are kept differs between the hosts' own
optimizers, so the adapters decide that.

[Note: aliases of a param] torch counts in-place operations on a param (`_version`), but not those
on `param.data`, which is an alias with a count of its own. So while an optimizer has to know who
wrote to its params, `Parameter.data` notes every alias that it returns.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol
from weakref import ReferenceType, WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.device import CPU
from megatron_distopt.errors import LayoutError, refusal, some_of
from megatron_distopt.optimizer.deferred import Notice
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_log = logging.getLogger("megatron_distopt")

#: torch's own `param.data`, which `DataWatch` replaces.
_torch_data: Any = torch._C.TensorBase.data


def _still_used(storages: Mapping[str, torch.UntypedStorage]) -> list[str]:
    """The names of those that something uses beside this mapping."""
    return [
        name
        for name, storage in storages.items()
        if torch._C._storage_Use_Count(storage._cdata) > 1
    ]


@contextmanager
def telling_of_aliases(named: Mapping[str, Parameter]) -> Iterator[None]:
    """Params are moved to other memory in it; says in a warning whose old memory is still used."""
    storages = {name: param.untyped_storage() for name, param in named.items()}
    yield
    if _still_used(storages):
        gc.collect()  # what uses it may be gone but for a cycle
    if names := _still_used(storages):
        _log.warning(
            "Something still uses the memory that param %s had before the distributed optimizer "
            "was built: a state_dict(), .data, a view, a NumPy array, or the graph of an output. "
            "It keeps the values of now; take it again afterwards, or delete it before.",
            some_of(names),
        )


def check_not_shared(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses params in memory of several processes: the others would never see an update."""
    for name, param in named:
        if param.device.type == CPU and param.untyped_storage().is_shared():
            raise LayoutError(
                f"Param {name!r} is in memory that processes share, as after share_memory(), and "
                "the distributed optimizer writes to buffers of its own. Train a copy, "
                "copy.deepcopy(model), and call shared_model.load_state_dict(model.state_dict()) "
                "whenever other processes are to see its values."
            )


def check_own_memory(named: Mapping[str, Parameter]) -> None:
    """Refuses two Parameters in the same memory: torch updates it twice, and here each would get
    memory of its own."""
    if tied := _sharing_memory(named.items()):
        first, second = tied
        raise _tied(second, f"in the same memory as {first!r}")


def addresses_of(tensor: Tensor) -> tuple[int, int]:
    """The address of the first byte, and the one after the last byte."""
    extent = 1 + sum(
        (numel - 1) * stride for numel, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + extent * tensor.element_size()


def _sharing_memory(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """The names of the first two that overlap, in the order of their addresses; None where all are
    apart."""
    extents = sorted(
        (*addresses_of(one), name) for name, one in tensors if one.numel() and not one.is_meta
    )
    for (_, stop, first), (start, _, second) in pairwise(extents):
        if start < stop:
            return first, second
    return None


class PlacedParam:
    """A param and the memory that the optimizer writes its new values to, in which `param.data`
    is."""

    __slots__ = ("address", "name", "param", "view")

    def __init__(self, name: str, param: Parameter) -> None:
        self.name, self.param = name, param
        #: What `param.data` is, unless other code assigned to it.
        self.view: Tensor = _torch_data.__get__(param)
        #: `param.data_ptr()` as long as `param.data` is the view.
        self.address = self.view.data_ptr()

    @torch.no_grad()
    def bring_back(self, *, with_values: bool) -> None:
        if with_values:
            self.view.copy_(_torch_data.__get__(self.param))
        _torch_data.__set__(self.param, self.view)


def params_that_left(params: Sequence[PlacedParam]) -> Sequence[PlacedParam]:
    """Finds the params to bring back, see [Note: params that have left]; refuses those that cannot
    be."""
    left = [placed for placed in params if placed.param.data_ptr() != placed.address]
    if left:
        check_that_left(params, left)
    return left


def check_that_left(params: Sequence[PlacedParam], left: Sequence[PlacedParam]) -> None:
    """Refuses params whose dtype, shape or device changed, and those that share another's
    memory."""
    for moved in left:
        before, after = (
            f"{dtype_name(one.dtype)}{list(one.shape)} on {one.device}"
            for one in (moved.view, moved.param)
        )
        if before != after:
            raise LayoutError(
                f"Param {moved.name!r} is {after} where it was {before}. Convert the model before "
                "distribute(...) or get_megatron_optimizer(...) builds its optimizer."
            )
    check_not_shared((moved.name, moved.param) for moved in left)
    places = [(placed.name, placed.view) for placed in params] + [
        (moved.name, moved.param) for moved in left
    ]
    if tied := _sharing_memory(places):
        first, second = tied
        raise _tied(second, f"given the memory of {first!r}")


def _tied(name: str, got: str) -> LayoutError:
    remedy = (
        "Tie params as one Parameter, b.weight = a.weight, before the distributed optimizer is "
        "built"
    )
    return LayoutError(refusal(f"param {name!r}", got, "have memory of its own", remedy))


class GroupMembers:
    """Notes which params the inner optimizer's groups have; users must not change that."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._members = [list(map(id, group["params"])) for group in inner.param_groups]

    def check(self) -> None:
        if [list(map(id, group["params"])) for group in self._inner.param_groups] != self._members:
            got, rule = "other params than the optimizer was built with", "keep their params"
            remedy = (
                "Build the optimizer again with get_megatron_optimizer(...) after the model has "
                "changed"
            )
            raise LayoutError(refusal("param_groups", got, rule, remedy))


class GroupCounts:
    """Counts updates in `group["step"]`, too, as apex's and TransformerEngine's Adam do and the
    users of a host expect.

    What counts is in the state of each main param, as torch's Adam has it. What users write into
    the group goes there.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        #: By group what it said last, and the writes to a count of its state that were known then.
        self._shown: dict[int, tuple[int, int]] = {}

    def follow(self) -> None:
        """Takes what users have written since, into the group or the state; into both: the group
        wins."""
        for number, group in enumerate(self._inner.param_groups):
            value, writes = self._shown.get(number, (None, 0))
            counts = self._counts(group)
            if "step" in group and group["step"] != value:
                for count in counts:
                    count.fill_(int(group["step"]))
                self._show(number, group, int(group["step"]))
            elif value is not None and counts and counts[0]._version != writes:
                self._show(number, group, int(counts[0]))
            elif value is not None and group["params"] and not counts:  # the state begins anew
                del group["step"], self._shown[number]

    def show(self, *, is_after_update: bool = False) -> None:
        """Writes the counts, which are read off the state; after an update one is added to what was
        known."""
        for number, group in enumerate(self._inner.param_groups):
            if counts := self._counts(group):
                # a look at the device would wait for it
                is_known = is_after_update and number in self._shown
                self._show(
                    number, group, self._shown[number][0] + 1 if is_known else int(counts[0])
                )

    def _show(self, number: int, group: dict[str, Any], value: int) -> None:
        group["step"], counts = value, self._counts(group)
        self._shown[number] = value, counts[0]._version if counts else 0

    def _counts(self, group: Mapping[str, Any]) -> list[Tensor]:
        """Empty for a group without a main param on this rank."""
        states = [self._inner.state.get(main, {}) for main in group["params"]]
        return [state["step"] for state in states if "step" in state]


def notice_for(check: Callable[[], None], flag: Tensor, group: Group) -> Notice:
    """Makes all ranks of the model raise, in the step, what `check` raises on one of them.

    `flag` is 1-D [1], of the dtype and device of statistics, and above 0 if `check` will raise on
    this rank.
    """

    def act(sums: Sequence[float]) -> None:
        if sums[0] > 0:
            raise_together(check, group, "step")

    return Notice(flag, flag, act)


def raising(error: Exception | None) -> Callable[[], None]:
    """Returns a check that raises `error`, or passes if that is None."""

    def check() -> None:
        if error is not None:
            raise error

    return check


class WatchedParam(Protocol):
    param: Parameter

    def keep(self, alias: Tensor) -> None:
        """Notes an alias, through which the values may be changed."""


class _DataWatch:
    """Knows who asked for `param.data` of a param."""

    def __init__(self) -> None:
        self._watched: dict[int, ReferenceType[WatchedParam]] = {}
        self._users: WeakSet[Any] = WeakSet()

    def add(self, user: object, params: Iterable[WatchedParam]) -> None:
        """Tells these params, held weakly, of their aliases; until the last user is gone or
        removed."""
        self._watched |= {id(each.param): ref(each) for each in params}
        if user not in self._users:
            self._users.add(user)
            finalize(user, self._end)
        if "data" not in vars(Parameter):
            Parameter.data = property(self._get, _torch_data.__set__)  # type: ignore[assignment]

    def remove(self, user: object, params: Iterable[WatchedParam]) -> None:
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
        alias: Tensor = _torch_data.__get__(param)
        known = self._watched.get(id(param))
        watched = None if known is None else known()
        if watched is not None and watched.param is param:
            watched.keep(alias)
        return alias


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
        """It is held, because its count is lost with it."""
        if len(self._aliases) >= self._MANY:
            self._was_written = self.is_written
            self._let_go()
        self._aliases.append((alias, alias._version))

    @property
    def is_written(self) -> bool:
        if self._was_written or self.param._version != self._version:
            return True
        return bool(self._aliases) and any(
            alias._version != count for alias, count in self._aliases
        )

    def forget(self) -> None:
        """Takes its values as they are now for known."""
        self._version, self._was_written = self.param._version, False
        self._let_go()

    def _let_go(self) -> None:
        """Lets go of the aliases that nobody else holds: beside the list, the loop and the
        argument."""
        if self._aliases:
            self._aliases = [
                (alias, alias._version) for alias, _ in self._aliases if sys.getrefcount(alias) > 3
            ]


class RemainderWatch:
    """Refuses weights that were written to where main params are remainders of them.

    A main param of its own wins over weights that were changed in a Megatron, whose step overwrites
    them. A remainder becomes that of other weights, which nobody wants.
    """

    def __init__(self, sharded: ShardedOptimizer, named: Mapping[str, Parameter]) -> None:
        self._sharded = sharded
        flat_params = [flat for flat in sharded.flat_params if flat.changes_with_model]
        names = {shard.name for flat in flat_params for shard in flat.plan.shards}
        self._writes = [_Writes(name, named[name]) for name in sorted(names)]
        if self._writes:
            data_watch.add(self, self._writes)

    def check(self) -> None:
        """Refuses weights that were written to since the last step, if main params would change
        with them."""
        written = {each.name for each in self._writes if each.is_written}
        changing = (
            [flat for flat in self._sharded.flat_params if flat.changes_with_model]
            if written
            else []
        )
        if names := [
            shard.name for flat in changing for shard in flat.plan.shards if shard.name in written
        ]:
            raise LayoutError(
                f"Param {names[0]!r} with main_params_dtype='remainder' was written to between two "
                "steps. Call optimizer.reload_model_params() after you have changed weights, or "
                "write --distopt-main-params-dtype float32, with which a step overwrites them."
            )
        self.forget()

    def forget(self) -> None:
        """Takes all weights as they are now for known; after a step and whatever else of ours
        writes to them."""
        for each in self._writes:
            each.forget()
