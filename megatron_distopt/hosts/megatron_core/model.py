"""How a session reads and replaces the state of optimizers of megatron-core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_distopt.checkpoint import WholeModel, is_checkpoint
from megatron_distopt.comm import Group, all_gather_results, raise_together
from megatron_distopt.formats.megatron_core.nameless import is_nameless
from megatron_distopt.hosts.megatron_core.buffers import chunks_of
from megatron_distopt.hosts.megatron_core.model_parallel import OneOptimizer, whole_model_of
from megatron_distopt.hosts.megatron_core.resume import load_nameless
from megatron_distopt.session import HostState


class CoreState(HostState):
    """The state of the optimizers of a chain, or of one of them."""

    def __init__(self, ours: Sequence[OneOptimizer]) -> None:
        self.everyone, self._ours = Group.of(), ours
        self.optimizers = [optimizer.sharded for optimizer in ours]

    def whole(self) -> WholeModel:
        return whole_model_of(self._ours)

    def bring_up_to_date(self) -> None:
        check_is_there(self._ours, "save")
        self._end_gathers()

    def begin_load(self) -> None:
        """Also ends a gather in progress: it would overwrite the loaded params, and the host would
        take it for the gather of the load."""
        check_is_there(self._ours, "load")
        self._end_gathers()

    def _end_gathers(self) -> None:
        for chunk in chunks_of(self._ours):
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)

    def read(self, folder: Path) -> None:
        nameless = all_gather_results(
            lambda: not is_checkpoint(folder) and is_nameless(folder), self.everyone, "load"
        )
        if any(nameless):
            load_nameless(folder, self._ours, self.everyone)
        else:
            super().read(folder)

    def loaded(self) -> None:
        for optimizer in self._ours:
            if optimizer.counts is not None:
                optimizer.counts.show()

    def gather_written(self) -> None:
        for optimizer in self._ours:
            optimizer.written.forget()
        for chunk in chunks_of(self._ours):
            chunk.start_param_sync(force_sync=True)


def check_is_there(ours: Sequence[OneOptimizer], what: str) -> None:
    """Collective: refuses `what` on all ranks if other code has emptied or changed the state of one
    rank."""

    def check() -> None:
        for optimizer in ours:
            if optimizer.counts is not None:
                optimizer.counts.follow()
            optimizer.offloaded.check_is_there()
            if what == "save":
                optimizer.written.check()

    raise_together(check, ours[0].stats_group, what)
