"""Forward passes beside the all-gather of their params: whoever reads a param waits for its bucket.

[Note: who waits] A module waits for the params that are its own. Others read params of modules that are never called
(a tied embedding on the last pipeline stage), so in the first step every operation is watched: it waits by itself, and
the innermost module that runs waits from then on. Params that nobody has read by then are waited for by the first
module that is called, and so is everything in evaluation, whose path may be another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.jit import ScriptModule
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import CommTime, Group, ParamOverlap, gather_params, waited_since
from megatron_distopt.hosts.watch import Watch

__all__ = ["OverlappedParamSync", "ParamSync"]


class ParamSync:
    """The params of one model on this rank, from the update to forward: gathered at once.

    Args:
        buffers: of all its params.
        data: over which they are sharded.
    """

    def __init__(self, buffers: Sequence[ShardedBuffer], data: Group) -> None:
        self._buffers, self._data = buffers, data
        self._time = CommTime(0.0, 0.0)

    def gather(self) -> None:
        """Collective: gathers what the owners have updated; some of it may come later."""
        self.gather_now()

    def gather_now(self) -> None:
        """Collective: the same, and all of it is there."""
        start = perf_counter()
        for buffer in self._buffers:
            gather_params(buffer, self._data)
        self._time = waited_since(start, self._buffers)

    def finish(self) -> CommTime:
        """Until all params are there; the time of the last gather."""
        return self._time


class OverlappedParamSync(ParamSync):
    """Gathers beside forward, by hooks on the modules.

    Args:
        buffers, data: as of `ParamSync`.
        chunks: of the model.
        named: the params in the buffers.
    """

    def __init__(
        self, buffers: Sequence[ShardedBuffer], data: Group, chunks: Sequence[Module], named: Mapping[str, Parameter]
    ) -> None:
        super().__init__(buffers, data)
        self.overlap, self._named = ParamOverlap(buffers, data), named
        #: By module, the buckets that it has read; see [Note: who waits].
        self._needs: dict[Module, set[int]] = {}
        #: Buckets of params that nobody has read; known when the first step is over.
        self._unread: frozenset[int] = frozenset()
        self._read: set[str] = set()
        self._first_step: _FirstStep | None = _FirstStep(self)
        names = {param: name for name, param in named.items()}
        for module in {module: None for chunk in chunks for module in chunk.modules()}:
            if not isinstance(module, ScriptModule):  # takes no hooks; its params are read by whoever calls it
                self._hook(module, self._first_step, names)

    def __deepcopy__(self, memo: object) -> OverlappedParamSync:
        """A copy of the model comes with its hooks, for which nothing is ever under way but what is here."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """A model that is read from a file waits for nothing."""
        return OverlappedParamSync, ((), Group(None, 0, 1), (), {})

    def _hook(self, module: Module, first_step: _FirstStep, names: Mapping[Parameter, str]) -> None:
        own = [names[param] for param in module.parameters(recurse=False) if param in names]
        first_step.hook(module, own)
        # In front of whatever else is hooked there, which may read params.
        module.register_forward_pre_hook(partial(self._is_called, self.overlap.numbers_of(own)), prepend=True)
        module.register_state_dict_pre_hook(self._is_saved)  # type: ignore[no-untyped-call]
        module._register_load_state_dict_pre_hook(self._is_saved)  # type: ignore[no-untyped-call]

    def gather(self) -> None:
        """Collective: begins to gather what the owners have updated."""
        has_watched = self._first_step is None or self._first_step.has_watched
        self.overlap.begin(after_forward=has_watched)
        if self._first_step is not None and has_watched:
            self._first_step.end()
            self._first_step = None
            self._unread = self.overlap.numbers_of(self._named.keys() - self._read)

    def gather_now(self) -> None:
        """Collective: gathers it and waits."""
        self.overlap.finish()
        super().gather_now()

    def finish(self) -> CommTime:
        """Until all params are there; the time of the last gather."""
        self.overlap.finish()
        return self.overlap.time

    def watch(self, running: Sequence[Module]) -> Watch:
        """Sees every read of a param, on behalf of the innermost of the modules that run."""
        tensors = {name: param.data for name, param in self._named.items()}
        return Watch(tensors, lambda name: self._is_read(name, running[-1]), writes_only=False)

    def are_waited_for(self, names: Iterable[str]) -> None:
        """Their module was called; what reads them may be a kernel that nobody sees."""
        self._read.update(names)

    def _is_read(self, name: str, module: Module) -> None:
        numbers = self.overlap.numbers_of([name])
        self._read.add(name)
        self._needs.setdefault(module, set()).update(numbers)
        self.overlap.wait_for(numbers)

    def _is_called(self, own: frozenset[int], module: Module, *_: Any) -> None:
        if not self.overlap.is_pending:
            return
        if module.training:
            self.overlap.wait_for(own | self._needs.get(module, set()) | self._unread)
        else:
            self.overlap.finish()

    def _is_saved(self, *_: Any) -> None:
        self.overlap.finish()


class _FirstStep:
    """The watch over forward passes in training, from the first one in which not all params are there to `end`.

    What backward computes anew reads what forward has read, and is not watched.
    """

    def __init__(self, sync: OverlappedParamSync) -> None:
        self._sync = sync
        self._handles: list[RemovableHandle] = []
        self._watch: Watch | None = None
        self._is_open = False
        self._running: list[Module] = []

    def __reduce__(self) -> tuple[object, ...]:
        """Without the handles, which lead to the hooks of all modules."""
        return _FirstStep, (self._sync,)

    @property
    def has_watched(self) -> bool:
        """Whether there was anything to see."""
        return self._watch is not None

    def hook(self, module: Module, own: Sequence[str]) -> None:
        """
        Args:
            module: of the model.
            own: names of its params.
        """
        self._handles.append(module.register_forward_pre_hook(partial(self._begins, own), prepend=True))
        self._handles.append(module.register_forward_hook(self._ends, always_call=True))

    def end(self) -> None:
        """No module is hooked any more."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, own: Sequence[str], module: Module, *_: Any) -> None:
        self._running.append(module)
        if self._watch is None and module.training and self._sync.overlap.is_pending:
            self._watch = self._sync.watch(self._running)
        if self._watch is not None and module.training and not self._is_open and not _is_in_backward():
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._is_open = True
        if self._is_open:
            self._sync.are_waited_for(own)

    def _ends(self, *_: Any) -> None:
        self._running.pop()
        if self._watch is not None and self._is_open and not self._running:
            self._is_open = False
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
