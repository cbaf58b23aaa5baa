"""The host's chain over our optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from megatron.core.optimizer import ChainedOptimizer as HostChainedOptimizer

from megatron_distopt.hosts.between_steps import not_copied
from megatron_distopt.hosts.megatron_core.checkpoint import CheckpointCalls
from megatron_distopt.hosts.megatron_core.optimizer import DistributedOptimizer
from megatron_distopt.hosts.megatron_core.sharded import HEAD
from megatron_distopt.hosts.megatron_core.together import StepOfHost, prepare_together, step_together, update_together
from megatron_distopt.optimizer import StepAction

__all__ = ["ChainedOptimizer"]


class ChainedOptimizer(CheckpointCalls, HostChainedOptimizer):
    """The host's chain over our optimizers: one measurement and one all-gather for all of them."""

    chained_optimizers: list[DistributedOptimizer]

    def ours(self) -> Sequence[DistributedOptimizer]:
        """All of them."""
        return self.chained_optimizers

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise not_copied("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickled")

    def load_state_dict(self, state_dict: Any) -> None:
        """Collective: takes back `sharded_state_dict()` of all of them at once, or a state of each.

        Raises: as the optimizer's.
        """
        if isinstance(state_dict, Mapping) and HEAD in state_dict:
            self.load_sharded(state_dict)
        else:
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self) -> StepOfHost:
        """Collective: the whole step, as the host's: (updated, gradient norm, zeros or None)."""
        return step_together(self.chained_optimizers)

    def prepare_grads(self) -> bool:
        """Collective: measures all gradients together; True where the step must be skipped."""
        return prepare_together(self.chained_optimizers) is StepAction.SKIP

    def get_grad_norm(self) -> float:
        """Of the whole gradient; after `prepare_grads`."""
        return self.chained_optimizers[0].get_grad_norm()

    def count_zeros(self) -> int:
        """Of the whole gradient; after `prepare_grads`."""
        return self.chained_optimizers[0].count_zeros()

    def step_with_ready_grads(self) -> bool:
        """Collective: updates all, then gathers the params once."""
        update_together(self.chained_optimizers)
        return True
