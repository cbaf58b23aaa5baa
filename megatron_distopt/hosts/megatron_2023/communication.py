"""What the ranks that hold the same params send each other in a step: overlapped with computation, or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.nn import Module, Parameter

from megatron_distopt.comm import CommLog, CommTime, Communicator, Group, gather_params, reduce_grads
from megatron_distopt.hosts.megatron_2023.decisions import Start, num_microbatches_of
from megatron_distopt.hosts.megatron_2023.grad_buffers import GradBuffer, main_grads
from megatron_distopt.hosts.torch.gather import ParamGather
from megatron_distopt.hosts.watch import Watch, tell_of_grads


class Communication:
    """The reduce-scatter of grads and the all-gather of params.

    Experts are owned by other ranks than the dense params. Their communication is never overlapped, so that ranks which
    share some groups and not others cannot wait for each other in different ones.
    """

    def __init__(self, start: Start, buffers: Sequence[GradBuffer], models: Sequence[Module], everyone: Group) -> None:
        self._how = start.how
        self._dense = [buffer for buffer in buffers if not buffer.plan.is_ours]
        self._experts = [buffer for buffer in buffers if buffer.plan.is_ours]
        named = {name: param for buffer in self._dense for name, param in buffer.plan.params.items()}
        trained = {name: param for name, param in named.items() if param.requires_grad}
        self._communicator = Communicator(
            start.data,
            start.how,
            overlap_grads=start.overlap.grads,
            overlap_params=start.overlap.params,
            num_microbatches=num_microbatches_of(),
        )
        self._communicator.add(
            [buffer.sharded[0] for buffer in self._dense],
            [each for buffer in self._dense for each in buffer.sharded],
            frozen=frozenset(named.keys() - trained.keys()),
        )
        self._params = ParamGather(self._communicator, models)
        self._params.add(named)
        self._nodes, self._watch = self._follow_grads(trained)
        every = start.plan.config.log_communication
        self._log = CommLog(every) if every is not None and everyone.rank == 0 else None

    def _follow_grads(self, trained: Mapping[str, Parameter]) -> tuple[list[object], Watch | None]:
        """Announces gradients where they are overlapped, and prepares `watched`."""
        if not self._communicator.overlaps_grads:
            return [], None
        nodes = tell_of_grads(trained, self._communicator.grad_arrived)
        return nodes, Watch(main_grads(trained), self._communicator.defer, writes_only=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, the fork may change gradients; from now on these are reduced afterwards."""
        if self._watch is None:
            yield
        else:
            with self._watch:
                yield

    def reduce(self) -> None:
        """Collective: every rank has the sums of its shards afterwards."""
        time = self._communicator.finish_grads()
        # Experts too are averaged over all ranks whose tokens they saw: those of the dense params.
        for buffer in self._experts:
            reduce_grads(buffer.sharded[0], buffer.plan.group, self._how)
        gathered = self._params.finish()
        if self._log is not None:
            self._log.step(time, gathered)

    def gather(self) -> None:
        """Collective: every rank has the new params afterwards, or when it reads them."""
        for buffer in self._experts:
            for each in buffer.sharded:
                gather_params(each, buffer.plan.group)
        self._params.gather()

    def gather_now(self) -> None:
        """Collective: every rank has the new params afterwards."""
        self.gather()
        self.finish_gather()

    def finish_gather(self) -> CommTime:
        """Waits until all params are there."""
        return self._params.finish()

    def drop(self) -> None:
        """Zeroes the gradients that the fork does not zero; collective where backward ran and no step followed."""
        if self._communicator.has_arrived:
            self._communicator.finish_grads()
            for buffer in self._dense:
                buffer.grad.zero_()
        for buffer in self._experts:
            buffer.grad.zero_()
