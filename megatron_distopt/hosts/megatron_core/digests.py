"""The digests of an optimizer or of a chain of them, as one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_distopt.checkpoint.digest_log import DigestLog
from megatron_distopt.comm import Group
from megatron_distopt.hosts.megatron_core.whole import whole_model_of


class DigestCalls(MegatronOptimizer):
    """What steps and checkpoints of a class of ours have in common."""

    _digests: DigestLog | None = None

    def ours(self) -> Sequence[Any]:
        """The optimizers whose steps they are."""
        raise NotImplementedError

    @property
    def digests(self) -> DigestLog:
        """Of all of them together."""
        if self._digests is None:
            config = self.ours()[0].sharded.config
            self._digests = DigestLog(config, lambda: whole_model_of(self.ours()), Group.of)
        return self._digests
