"""Logs digests every so many steps (`log_digests`), so that it can be said where two runs parted.

[Note: when digests are written] The host says when a step begins, with its gradients reduced, and when it is decided
and updated. What is due is summed on the device and copied to the CPU behind everything else that is queued there. It
is written when the next step begins, or at the end of the process, so the CPU does not wait for it: by then it waits
at most for the update of the step before, which on an accelerator a loss or a gradient norm that is printed does, too.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from megatron_distopt.checkpoint.digest_files import DigestWriter, LoggedStep, Start, next_start
from megatron_distopt.checkpoint.digests import DigestKey, LocalDigests, OwnedPieces
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group, exchange_together, profiled, raise_together
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import mark, pinned
from megatron_distopt.optimizer.inner import count_updates
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.step import StepDecision
from megatron_distopt.version import VERSION

_log = logging.getLogger("megatron_distopt")


class DigestLog:
    """The digests of one run.

    Args:
        config: `log_digests` and `digest_folder`.
        model: returns what this rank holds.
        group: returns all ranks that hold a part of the model.
    """

    def __init__(self, config: DistOptConfig, model: Callable[[], WholeModel], group: Callable[[], Group]) -> None:
        self._config, self._every = config, config.log_digests
        self._model_of, self._group_of = model, group
        self._pending = _Pending()
        #: Steps so far; None before the first step of a start.
        self._num_steps: int | None = None
        self._grads: LocalDigests | None = None
        self._pieces: OwnedPieces | None = None
        self._pieces_of: tuple[tuple[FlatParam, ...], ...] = ()
        finalize(self, self._pending.write)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Digests the gradients, if it is the turn of this step; they are reduced, and not divided or clipped yet.

        Collective in the first step and in the first one after a load.

        Raises:
            CheckpointError: on a rank that cannot write; RanksDisagreeError on the others.
        """
        if self._every is None:
            return
        self._pending.write()
        if self._num_steps is None:
            self._num_steps = self._begin()
        self._grads = None
        if (self._num_steps + 1) % self._every == 0:
            with profiled("digests of gradients"):
                self._grads = self._owned().grads()

    @torch.no_grad()
    def end_step(self, decision: StepDecision) -> None:
        """Digests main params and moments, if it is the turn of this step; before the params are gathered.

        Args:
            decision: about the step, which was made or skipped.
        """
        if self._every is None or self._num_steps is None:
            return
        self._num_steps += 1
        if self._grads is not None:
            facts = _facts_of(self._model)
            with profiled("digests of state"):
                parts = [self._grads, self._owned().state()]
                self._pending.keep(_Copied(self._num_steps, parts, facts, decision))
            self._grads = None

    def finish(self) -> None:
        """Writes what is due."""
        self._pending.write()

    def restart(self) -> None:
        """Called where a state was loaded: the next step begins another start."""
        self._pending.write()
        self._num_steps = None

    def _begin(self) -> int:
        """Collective: begins a start and logs its state; returns the number of steps so far."""
        group, folder = self._group_of(), Path(self._config.digest_folder)
        self._model = self._model_of()
        said = exchange_together(lambda: (self._count(), next_start(folder)), group, "digests")
        num_steps, number = max(count for count, _ in said), max(number for _, number in said)
        start = Start(num_steps, self._config.log_digests or 1, group.size, self._about())
        writer = raise_together(lambda: DigestWriter(folder, number, group.rank, start), group, "digests")
        self._pending.writer = writer
        self._pending.keep(_Copied(num_steps, [self._owned(is_new=True).state()], {}, None))
        return num_steps

    def _count(self) -> int:
        """Steps so far, skipped ones too, as far as this rank knows. It waits for the device."""
        optimizers = [share.optimizer for share in self._model.shares]
        return max((count_updates(each.inner) or 0) + each.num_skipped for each in optimizers)

    def _about(self) -> dict[str, str | int]:
        optimizer = self._model.shares[0].optimizer
        return {
            **self._model.about,
            "adam": optimizer.plan.choice.name,
            "device": optimizer.device.type,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron_distopt": VERSION,
            "machine": platform.machine(),
        }

    def _owned(self, *, is_new: bool = False) -> OwnedPieces:
        """What this rank counts; found anew where params were added or flat params were cut."""
        present = tuple(share.optimizer.flat_params for share in self._model.shares)
        is_same = len(present) == len(self._pieces_of) and all(map(_is, present, self._pieces_of))
        if is_new or self._pieces is None or not is_same:
            self._model = self._model_of()
            self._pieces, self._pieces_of = OwnedPieces(self._model), present
        return self._pieces


def _is(one: object, other: object) -> bool:
    return one is other


def _facts_of(model: WholeModel) -> dict[str, Any]:
    """Numbers of the step that are known without waiting; read before the next scheduler changes them."""
    optimizers = [share.optimizer for share in model.shares]
    rates = [group.get("lr") for each in optimizers for group in each.inner.param_groups]
    decays = [group.get("weight_decay") for each in optimizers for group in each.inner.param_groups]
    return {"lr": [*map(_plain, rates)], "weight_decay": [*map(_plain, decays)]}


def _plain(value: Any) -> float | str | None:
    """A number that JSON has; one that is kept on a device is not waited for."""
    if not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else str(value)


class _Copied:
    """Digests that are being copied to the CPU.

    Args:
        number: of the step.
        parts: that belong to it.
        facts: see `LoggedStep`.
        decision: about the step; None for a start.
    """

    def __init__(
        self, number: int, parts: list[LocalDigests], facts: dict[str, Any], decision: StepDecision | None
    ) -> None:
        self._number, self._facts, self._decision = number, facts, decision
        self._keys = [key for part in parts for key in part.keys]
        self._dtypes = {kind: dtype for part in parts for kind, dtype in part.dtypes.items()}
        sums = torch.cat([part.sums for part in parts])
        self._sums: Tensor = pinned(sums.shape, sums.dtype, sums.device).copy_(sums, non_blocking=True)
        self._wait = mark(sums.device)

    def read(self) -> LoggedStep:
        """Waits for the copy."""
        self._wait()
        digests: dict[DigestKey, int] = {}
        for key, value in zip(self._keys, self._sums.tolist(), strict=True):
            digests[key] = digests.get(key, 0) + value
        return LoggedStep(self._number, digests, self._dtypes, self._facts | self._decided())

    def _decided(self) -> dict[str, Any]:
        decision = self._decision
        if decision is None:
            return {}
        return {"updated": decision.updated, "norm": _plain(decision.norm), "divisor": _plain(decision.unclipped)}


@dataclass(eq=False)
class _Pending:
    """What is to be written at the next opportunity.

    Args:
        writer: of this start; None before the first step, and after it could not write.
        copied: oldest first.
    """

    writer: DigestWriter | None = None

    def __post_init__(self) -> None:
        self._copied: list[_Copied] = []

    def keep(self, copied: _Copied) -> None:
        self._copied.append(copied)

    def write(self) -> None:
        """Writes all of it. Training goes on without digests where the disk does not take them."""
        waiting, self._copied = self._copied, []
        for each in waiting if self.writer is not None else ():
            step = each.read()
            try:
                if self.writer is not None:
                    self.writer.write(step)
            except OSError as error:
                _log.error("digests of step %d could not be written, and none are from now on: %s", step.number, error)
                self.writer = None
