"""Lets a Megatron's script evaluate averages in place of the params."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ref

from megatron_distopt.comm import Group, raise_together
from megatron_distopt.errors import HostMismatchError
from megatron_distopt.patch_points import PatchPoint, Replacement, apply, in_force
from megatron_distopt.session import SessionCalls

#: The optimizers whose averages are evaluated, in the same order on all ranks.
_evaluated: list[ref[SessionCalls]] = []


def average_evaluation(optimizers: Sequence[Any], evaluate: PatchPoint) -> None:
    """Collective: with `ema_eval`, lets the host's script evaluate the averages of the last model
    that was built."""

    def enter() -> None:
        if evaluate.current is None:
            raise HostMismatchError(
                f"{evaluate.missing} Or leave ema_eval out, and write 'with "
                "optimizer.averaged_params():' around your own evaluation."
            )
        if not evaluate.is_replaced:
            ours = (evaluate, lambda found: Replacement(found, partial(_evaluate, found)))
            apply([ours], in_force)

    _evaluated.clear()
    if optimizers[0].sharded.config.ema_eval:
        raise_together(enter, Group.of())
        _evaluated.extend(map(ref, optimizers))


def _evaluate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for optimizer in (found for each in _evaluated if (found := each()) is not None):
            stack.enter_context(optimizer.averaged_params())
        return original(*args, **kwargs)
