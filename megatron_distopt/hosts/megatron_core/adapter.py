"""How our optimizer gets into megatron-core's `get_megatron_optimizer`.

The host's own function runs: its param groups, its process groups, its chain. Only the two classes that it builds are
ours, and only while it runs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from torch.nn import Module

from megatron_distopt.comm import Group, is_initialized, raise_together
from megatron_distopt.config import DistOptConfig, Switch, config_from_environment, switch_from
from megatron_distopt.errors import ConfigError, SeamMismatchError, refusal
from megatron_distopt.hosts.megatron_core.chain import ChainedOptimizer
from megatron_distopt.hosts.megatron_core.config import (
    check_model,
    check_parallel_state,
    merge_config,
    missing_parallel_state,
)
from megatron_distopt.hosts.megatron_core.facts import CHAIN, CLASS, CLASS_PARAMETERS, SEAM
from megatron_distopt.hosts.megatron_core.optimizer import DistributedOptimizer
from megatron_distopt.hosts.megatron_core.report import announce, describe

__all__ = ["build", "get_megatron_optimizer", "replacement"]


def get_megatron_optimizer(
    config: Any, model_chunks: Sequence[Module], *args: Any, options: DistOptConfig | None = None, **kwargs: Any
) -> Any:
    """Collective: megatron-core's function of that name, with our optimizer, without installing anything.

    Args:
        config: the host's OptimizerConfig; without `use_distributed_optimizer` the host's own optimizer comes back.
        model_chunks: wrapped by the host's DistributedDataParallel.
        options: ours; MEGATRON_DISTOPT_* variables override them.
        args, kwargs: whatever else the host's function takes.

    Returns:
        The host's ChainedOptimizer (a subclass) with our optimizers in it.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before training.
    """
    current: Any = getattr(import_module(SEAM.module), SEAM.attribute, None)
    original = current.original if hasattr(current, "original") else SEAM.find()
    return build(original, options or DistOptConfig(), config, model_chunks, *args, **kwargs)


def replacement(original: Callable[..., Any], options: DistOptConfig) -> Callable[..., Any]:
    """What takes the place of the host's function when the package is installed."""
    ours = partial(build, original, options)
    ours.original = original  # type: ignore[attr-defined]
    ours.__doc__ = original.__doc__
    return ours


def build(
    original: Callable[..., Any],
    options: DistOptConfig,
    config: Any,
    model_chunks: Sequence[Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Collective: `original`, with our classes in place of the host's where its config asks for a distributed one."""
    switch = switch_from(os.environ)
    if switch is Switch.OFF or not config.use_distributed_optimizer:
        _check_not_required(switch)
        return original(config, model_chunks, *args, **kwargs)
    everyone = _everyone()
    call = inspect.signature(original).bind(config, model_chunks, *args, **kwargs).arguments
    merged = raise_together(lambda: _check(original, options, call), everyone)
    with _our_classes(original, merged):
        optimizer = original(config, model_chunks, *args, **kwargs)
    for each in optimizer.chained_optimizers:
        each.check_start_up()
    if everyone.rank == 0:
        announce(describe(optimizer.chained_optimizers, merged))
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
    remedy = "Use megatron-core 0.16, which this adapter was tested on"
    for name in (CLASS, CHAIN):
        if name not in original.__globals__:
            raise SeamMismatchError(refusal(str(SEAM), f"no {name} beside it", "know its classes", remedy))
    found = tuple(inspect.signature(original.__globals__[CLASS].__init__).parameters)[1:]
    if found != CLASS_PARAMETERS:
        rule = f"be ({', '.join(CLASS_PARAMETERS)})"
        raise SeamMismatchError(refusal(f"constructor of {CLASS}", f"({', '.join(found)})", rule, remedy))


def _check_not_required(switch: Switch) -> None:
    if switch is Switch.REQUIRE:
        rule, remedy = "be used when MEGATRON_DISTOPT=require", "Add --use-distributed-optimizer, or unset the variable"
        raise ConfigError(refusal("run", "without use_distributed_optimizer", rule, remedy))


@contextmanager
def _our_classes(original: Callable[..., Any], options: DistOptConfig) -> Iterator[None]:
    ours: Mapping[str, Any] = {CLASS: partial(DistributedOptimizer, options=options), CHAIN: ChainedOptimizer}
    host = original.__globals__
    before = {name: host[name] for name in ours}
    host.update(ours)
    try:
        yield
    finally:
        host.update(before)
