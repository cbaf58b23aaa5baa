"""How grads are reduced where the host leaves that to us: at once in the step, or beside backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from megatron_distopt.buffers import ShardedBuffer, dtype_name
from megatron_distopt.comm import (
    AS_THEY_ARE,
    CommTime,
    GradOverlap,
    Group,
    Reduction,
    check_alone,
    reduce_grads,
    waited_since,
)
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, refusal

__all__ = ["GradSync", "behind_the_hosts_hook", "check_bucket", "wire_of"]

#: The hook that tells of a param's gradient; beside the param and not in it, because a model may be pickled.
_hooks: MutableMapping[Parameter, RemovableHandle] = WeakIdKeyDictionary()
#: Lets somebody know, with the param's name, that its gradient is in the buffer.
Arrived = Callable[[str], None]


def check_bucket(config: DistOptConfig, num_ranks: int, write: str) -> None:
    """Whether every rank can own an element of a bucket.

    Args:
        config: merged.
        num_ranks: that share each bucket.
        write: what a good one looks like.

    Raises:
        ConfigError
    """
    if config.bucket_size is not None and config.bucket_size < num_ranks:
        got, rule = f"{config.bucket_size} elements", f"have one for each of the {num_ranks} data-parallel ranks"
        raise ConfigError(refusal("bucket_size", got, rule, f"Write {write}, or leave it out"))


def wire_of(config: DistOptConfig, grad_dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """What grads are rounded to on their way; None for as they are.

    Raises:
        ConfigError: grads that are kept in 16 bits are to be rounded.
    """
    if config.reduce_dtype is None:
        return None
    short = [dtype for dtype in grad_dtypes if dtype is not torch.float32]
    if short:
        got, rule = f"{config.reduce_dtype} for grads kept in {dtype_name(short[0])}", "have fp32 grads to round"
        remedy = "Leave it out, or write --accumulate-allreduce-grads-in-fp32 or grads_in_fp32=True"
        raise ConfigError(refusal("reduce_dtype", got, rule, remedy))
    wire: torch.dtype = getattr(torch, config.reduce_dtype)
    return wire


class GradSync:
    """The grads of one model on this rank, from backward to the step.

    Args:
        buffers: of all its params.
        data: over which they are sharded.
        overlap: reduces the same buffers beside backward; None for at once.
        how: see `Reduction`.
    """

    def __init__(
        self,
        buffers: Sequence[ShardedBuffer],
        data: Group,
        overlap: GradOverlap | None = None,
        how: Reduction = AS_THEY_ARE,
    ) -> None:
        self._buffers, self._data, self._how = buffers, data, how
        self._is_paused = False
        self.overlap = overlap

    def arrived(self, name: str) -> None:
        """A gradient was added to its buffer.

        Raises:
            LayoutError: its bucket is under way already.
        """
        if self.overlap is not None and self._is_paused:
            self.overlap.check_open(name)
        elif self.overlap is not None:
            self.overlap.arrived(name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward meanwhile adds to grads of which more are to come in this step."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def finish(self) -> CommTime:
        """Collective: what is not reduced yet is; afterwards every rank has the sums of its shards."""
        if self.overlap is not None:
            return self.overlap.finish()
        check_alone(self._data, None)
        start = perf_counter()
        for buffer in self._buffers:
            reduce_grads(buffer, self._data, self._how)
        return waited_since(start, self._buffers)

    def drop(self) -> None:
        """Collective where backward ran and no step followed: the grads are zeros afterwards."""
        if self.overlap is not None and self.overlap.has_arrived:
            self.overlap.finish()
        for buffer in self._buffers:
            buffer.grad.zero_()


def behind_the_hosts_hook(named: Mapping[str, Parameter], arrived: Arrived) -> list[object]:
    """Tells of every gradient, behind a hook on the node of autograd that accumulates the gradient.

    Returns:
        The nodes: hooks live as long as these.
    """
    nodes: list[object] = []
    for name, param in named.items():
        with torch.enable_grad():
            node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        # The host keeps the node, so a hook of an optimizer that was built before would go on.
        if (before := _hooks.get(param)) is not None:
            before.remove()
        _hooks[param] = node.register_hook(partial(_tell, arrived, name))
        nodes.append(node)
    return nodes


def _tell(arrived: Arrived, name: str, *_: object) -> None:
    arrived(name)
