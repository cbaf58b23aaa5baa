"""How grads are reduced in a host whose DistributedDataParallel is ours: at once in the step, or beside backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import GradOverlap, Group, reduce_grads

__all__ = ["GradSync"]


class GradSync:
    """The grads of one model on this rank, from backward to the step.

    Args:
        buffers: of all its params.
        data: over which they are sharded.
        named: the params.
        overlapped: whether buckets are reduced beside backward.
    """

    def __init__(
        self, buffers: Sequence[ShardedBuffer], data: Group, named: Mapping[str, Parameter], *, overlapped: bool
    ) -> None:
        self._buffers, self._data = buffers, data
        self._is_paused = False
        self._overlap = GradOverlap(buffers, data) if overlapped else None
        if self._overlap is not None:
            for name, param in named.items():  # behind the hook that adds the grad to its buffer
                param.register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]

    def _arrived(self, name: str, _: Tensor) -> None:
        if self._overlap is not None and not self._is_paused:
            self._overlap.arrived(name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward meanwhile adds to grads of which more are to come in this step."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def finish(self) -> None:
        """Collective: what is not reduced yet is; afterwards every rank has the sums of its shards."""
        if self._overlap is not None:
            self._overlap.finish()
            return
        for buffer in self._buffers:
            reduce_grads(buffer, self._data)

    def drop(self) -> None:
        """Collective where backward ran and no step followed: the grads are zeros afterwards."""
        if self._overlap is not None and self._overlap.has_arrived:
            self._overlap.finish()
        for buffer in self._buffers:
            buffer.grad.zero_()
