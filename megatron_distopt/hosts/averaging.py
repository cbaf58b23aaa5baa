"""Averages in the place of the params: `averaged_params()` of every host, and the evaluation of a
Megatron's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from megatron_distopt.comm import Group, raise_together
from megatron_distopt.errors import ConfigError, HostMismatchError, refusal
from megatron_distopt.hosts.on_all_ranks import on_all_ranks
from megatron_distopt.hosts.patch_points import PatchPoint, Replacement, apply, script_undos
from megatron_distopt.optimizer.sharded import ShardedOptimizer


@contextmanager
def averages_shown(
    optimizers: Sequence[ShardedOptimizer], gather: Callable[[], None]
) -> Iterator[None]:
    """Collective: within it the model has the averages, rounded, and afterwards what it had before.

    What a rank owns of the model params is kept meanwhile: they may be main params themselves, or
    hold bits of them. `gather` is collective, and brings to all ranks what is in the shards of the
    param buffers.
    """
    for buffer in (buffer for optimizer in optimizers for buffer in optimizer.buffers):
        buffer.collect()
    averages = [each.averages for each in optimizers if each.averages is not None]
    begun = [
        flat
        for each in optimizers
        if each.averages and each.averages.has_begun
        for flat in each.flat_params
    ]
    pairs = [(flat.model, flat.average) for flat in begun if flat.average is not None]
    kept = [model.clone() for model, _ in pairs]

    @torch.no_grad()
    def put(values: Sequence[Tensor], *, are_shown: bool) -> None:
        for (model, _), value in zip(pairs, values, strict=True):
            model.copy_(value)
        for each in averages:
            each.are_shown = are_shown
        gather()

    try:
        put([average for _, average in pairs], are_shown=True)
        yield
    finally:
        put(kept, are_shown=False)


class AveragedCalls:
    """What an optimizer answers about the averages of its params."""

    sharded: ShardedOptimizer

    @contextmanager
    @on_all_ranks
    def averaged_params(self) -> Iterator[None]:
        """Collective: `with optimizer.averaged_params(): ...` evaluates averages, rounded to the
        dtypes of the params.

        Afterwards, also after an error, the params are what they were, to the bit; what was written
        to them within is lost. Before the first step there are no averages, and the params stay.
        Module buffers always stay.

        Raises:
            ConfigError: on all ranks: `ema_decay` is not set.
            AccessError: on all ranks: it is within another one. A step, a save and a load within it
                raise this, too.
        """
        optimizers = self._all_sharded()
        if optimizers[0].averages is None:
            rule, remedy = (
                "be of a run that averages its params",
                "Give ema_decay a number such as 0.999",
            )
            raise ConfigError(refusal("averaged_params()", "no ema_decay", rule, remedy))
        optimizers[0].check_has_params("averaged_params()")
        self._settle()
        with averages_shown(optimizers, self._gather_written):
            yield

    def _all_sharded(self) -> Sequence[ShardedOptimizer]:
        return [self.sharded]

    def _settle(self) -> None:
        """Collective: brings the state up to date."""
        raise NotImplementedError

    def _gather_written(self) -> None:
        """Collective: brings to all ranks what was written into the shards of the param buffers."""
        raise NotImplementedError


#: Those that are evaluated, in one order on all ranks.
_evaluated: list[ref[AveragedCalls]] = []


def average_evaluation(optimizers: Sequence[Any], evaluate: PatchPoint) -> None:
    """Collective: lets the host's script evaluate the averages of a model, the last one, if
    `ema_eval` asks for it."""

    def enter() -> None:
        if evaluate.current is None:
            remedy = (
                "Or leave ema_eval out, and write 'with optimizer.averaged_params():' around your "
                "own evaluation."
            )
            raise HostMismatchError(f"{evaluate.missing} {remedy}")
        if not evaluate.is_replaced:
            script_undos.append(
                apply([(evaluate, lambda found: Replacement(found, partial(_evaluate, found)))])
            )

    _evaluated.clear()
    if optimizers[0].sharded.config.ema_eval:
        raise_together(enter, Group.of())
        _evaluated.extend(map(ref, optimizers))


def _evaluate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for optimizer in (found for each in _evaluated if (found := each()) is not None):
            stack.enter_context(optimizer.averaged_params())
        return original(*args, **kwargs)
