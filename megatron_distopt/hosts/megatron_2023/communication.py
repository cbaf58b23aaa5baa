"""What the ranks that hold the same params send each other in a step: beside computation, or at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.nn import Module, Parameter

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import CommTime, GradOverlap, Group, gather_params, reduce_grads
from megatron_distopt.hosts.access import AccessWatch
from megatron_distopt.hosts.comm_log import CommLog
from megatron_distopt.hosts.megatron_2023.buffers import GradBuffer, main_grads
from megatron_distopt.hosts.megatron_2023.overlap import num_microbatches_of
from megatron_distopt.hosts.megatron_2023.start import Start
from megatron_distopt.hosts.overlap import GradSync, behind_the_hosts_hook
from megatron_distopt.hosts.torch.gather import OverlappedGather
from megatron_distopt.hosts.torch.model import Gather
from megatron_distopt.hosts.watch import Watch

__all__ = ["Communication"]


class Communication:
    """The reduce-scatter of grads and the all-gather of params.

    Experts are owned by other ranks than the dense params; theirs never run beside anything, so that ranks which share
    some groups and not others cannot wait for each other in different ones.

    Args:
        start: what was decided.
        buffers: of this rank.
        models: the fork's chunks.
        everyone: all ranks; the first one logs.
    """

    def __init__(self, start: Start, buffers: Sequence[GradBuffer], models: Sequence[Module], everyone: Group) -> None:
        self._how = start.how
        dense = [buffer for buffer in buffers if not buffer.plan.is_ours]
        self._experts = [buffer for buffer in buffers if buffer.plan.is_ours]
        self._named = {name: param for buffer in dense for name, param in buffer.plan.params.items()}
        trained = {name: param for name, param in self._named.items() if param.requires_grad}
        frozen = frozenset(self._named.keys() - trained.keys())
        self._grads = _grad_sync(start, [buffer.sharded[0] for buffer in dense], frozen)
        self._nodes: list[object] = []
        self._watch: Watch | None = None
        if self._grads.overlap is not None:
            self._nodes = behind_the_hosts_hook(trained, self._grads.arrived)
            self._watch = Watch(main_grads(trained), self._grads.overlap.defer, writes_only=True)
        params = [each for buffer in dense for each in buffer.sharded]
        self._params: Gather | OverlappedGather = Gather(start.data)
        if start.overlap.params:
            self._params = OverlappedGather(start.data, models)
        self._params.add(self._named, params)
        self._access = self._watch_accesses(trained) if start.plan.config.debug else None
        self._log = CommLog(start.plan.config.log_communication, is_first=everyone.rank == 0)

    def _watch_accesses(self, trained: Mapping[str, Parameter]) -> AccessWatch:
        params, overlap = self._params, self._grads.overlap
        return AccessWatch(
            {name: param.detach() for name, param in self._named.items()},
            params.is_under_way if isinstance(params, OverlappedGather) else lambda name: False,
            main_grads(trained),
            overlap.is_begun if overlap is not None else lambda name: False,
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is added to grads meanwhile is reduced after it, from now on.

        Raises:
            LayoutError: to one whose bucket is under way.
        """
        if self._watch is None:
            yield
        else:
            with self._watch:
                yield

    def reduce(self) -> None:
        """Collective: every rank has the sums of its shards afterwards."""
        time = self._grads.finish()
        # Experts too are averaged over all ranks whose tokens they saw: those of the dense params.
        for buffer in self._experts:
            reduce_grads(buffer.sharded[0], buffer.plan.group, self._how)
        self._log.step(time, self._params.finish())

    def gather(self) -> None:
        """Collective: every rank has the new params afterwards, or when it reads them."""
        for buffer in self._experts:
            for each in buffer.sharded:
                gather_params(each, buffer.plan.group)
        self._params.gather()

    def gather_now(self) -> None:
        """Collective: every rank has them afterwards."""
        self.gather()
        self.finish_gather()

    def finish_gather(self) -> CommTime:
        """Until all params are there."""
        return self._params.finish()

    def drop(self) -> None:
        """Zeroes what the fork does not zero; collective where backward ran and no step followed."""
        if self._grads.overlap is not None and self._grads.overlap.has_arrived:
            self._grads.drop()
        for buffer in self._experts:
            buffer.grad.zero_()


def _grad_sync(start: Start, buffers: Sequence[ShardedBuffer], frozen: frozenset[str]) -> GradSync:
    num_microbatches = num_microbatches_of()
    if not start.overlap.grads or num_microbatches is None:
        return GradSync(buffers, start.data, how=start.how)
    overlap = GradOverlap(buffers, start.data, num_microbatches=num_microbatches, how=start.how, frozen=frozen)
    return GradSync(buffers, start.data, overlap)
