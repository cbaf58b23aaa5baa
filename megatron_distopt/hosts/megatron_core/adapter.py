"""How our optimizer gets into megatron-core's `get_megatron_optimizer`.

The host's own function runs: its param groups, its process groups, its chain. Only the two classes that it builds are
ours, and only while it runs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.nn import Module

from megatron_distopt.comm import Group, is_initialized, raise_together
from megatron_distopt.config import DistOptConfig, config_from_environment
from megatron_distopt.errors import HostMismatchError, refusal
from megatron_distopt.hosts.megatron_core.config import (
    check_model,
    check_parallel_state,
    merge_config,
    missing_parallel_state,
)
from megatron_distopt.hosts.megatron_core.facts import CHAIN, CLASS, CLASS_MAY_TAKE, CLASS_PARAMETERS, PATCH_POINT
from megatron_distopt.hosts.megatron_core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron_distopt.hosts.patch_points import Replacement, is_wanted, substituted
from megatron_distopt.hosts.report import announce, describe

__all__ = ["build", "replacement"]


def replacement(original: Callable[..., Any], options: DistOptConfig) -> Callable[..., Any]:
    """What takes the place of the host's function when the package is installed."""
    return Replacement(original, partial(build, original, options))


def build(
    original: Callable[..., Any],
    options: DistOptConfig,
    config: Any,
    model_chunks: Sequence[Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Collective: `original`, with our classes in place of the host's where its config asks for a distributed one."""
    if not is_wanted(config.use_distributed_optimizer):
        return original(config, model_chunks, *args, **kwargs)
    everyone = _everyone()
    call = inspect.signature(original).bind(config, model_chunks, *args, **kwargs).arguments
    merged = raise_together(lambda: _check(original, options, call), everyone)
    with substituted(original, {CLASS: partial(DistributedOptimizer, options=merged), CHAIN: ChainedOptimizer}):
        optimizer = original(config, model_chunks, *args, **kwargs)
    ours = optimizer.ours()  # megatron-core before 0.12 puts no chain around one optimizer
    for each in ours:
        each.check_start_up()
    if everyone.rank == 0:
        device = optimizer.get_loss_scale().device
        sharded = [each.sharded for each in ours]
        announce(describe("megatron-core", (PATCH_POINT,), sharded, device))
    return optimizer


def _everyone() -> Group:
    if not is_initialized():
        raise missing_parallel_state()
    return Group.of()


def _check(original: Callable[..., Any], options: DistOptConfig, call: Mapping[str, Any]) -> DistOptConfig:
    """Everything that this rank can see by itself."""
    _check_classes(original)
    check_parallel_state(call.get("pg_collection"))
    merged = merge_config(config_from_environment(os.environ, options), call["config"])
    check_model(call["model_chunks"], merged)
    return merged


def _check_classes(original: Callable[..., Any]) -> None:
    """The two names of the host that stand for ours while it runs, and what it gives to the first."""
    remedy = "Use a megatron-core that docs/hosts.md lists"
    for name in (CLASS, CHAIN):
        if name not in original.__globals__:
            raise HostMismatchError(refusal(str(PATCH_POINT), f"no {name} in its module", "know its classes", remedy))
    found = tuple(inspect.signature(original.__globals__[CLASS].__init__).parameters)[1:]
    if tuple(name for name in found if name not in CLASS_MAY_TAKE) != CLASS_PARAMETERS:
        rule = f"be ({', '.join(CLASS_PARAMETERS)})"
        raise HostMismatchError(refusal(f"constructor of {CLASS}", f"({', '.join(found)})", rule, remedy))
