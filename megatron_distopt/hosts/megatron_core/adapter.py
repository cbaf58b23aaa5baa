"""How our optimizer gets into megatron-core's `get_megatron_optimizer`.

The host's own function runs: its param groups, its process groups, its chain. Only the two classes that it builds are
ours, see takeover.py.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.nn import Module

from megatron_distopt.comm import Group, is_initialized, raise_together
from megatron_distopt.config import DistOptConfig, config_from_environment
from megatron_distopt.hosts.base import is_used
from megatron_distopt.hosts.megatron_core.config import (
    Merged,
    check_model,
    check_parallel_state,
    merge_config,
    missing_parallel_state,
)
from megatron_distopt.hosts.megatron_core.dist_checkpointing import check_script_can_save
from megatron_distopt.hosts.megatron_core.facts import FIRST_ORDER
from megatron_distopt.hosts.megatron_core.muon import as_adam, is_hosts_muon, is_layer_wise_muon
from megatron_distopt.hosts.megatron_core.precision import in_full_precision
from megatron_distopt.hosts.megatron_core.start import start_together
from megatron_distopt.hosts.megatron_core.takeover import check_class, constructing, taken_over
from megatron_distopt.hosts.megatron_core.takeover import take_over as take_over  # hosts/detect.py calls it
from megatron_distopt.hosts.patch_points import Replacement


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
    """Collective: `original`, whose constructors build ours where its config asks for a distributed optimizer."""
    if not is_used(config.use_distributed_optimizer or is_layer_wise_muon(config, model_chunks), _why_reset(config)):
        return original(config, model_chunks, *args, **kwargs)
    everyone = _everyone()
    call = inspect.signature(original).bind(config, model_chunks, *args, **kwargs).arguments
    merged = raise_together(lambda: _check(options, call), everyone)
    with taken_over(options), constructing(merged), in_full_precision(config), as_adam(config, merged.muon):
        optimizer = original(config, model_chunks, *args, **kwargs)
    start_together(optimizer.ours())  # megatron-core before 0.12 puts no chain around one optimizer
    return optimizer


def _why_reset(config: Any) -> str:
    """A run may expect this package where the host resets its flag, as it does for SOAP."""
    name = getattr(config, "optimizer", FIRST_ORDER[0])
    if config.use_distributed_optimizer or name in FIRST_ORDER:
        return ""
    if is_hosts_muon(config):
        return f"; with optimizer={name!r} it is used over buffers that the host shards (its layer-wise layout)"
    return f"; the host resets it for optimizer={name!r}"


def _everyone() -> Group:
    if not is_initialized():
        raise missing_parallel_state()
    return Group.of()


def _check(options: DistOptConfig, call: Mapping[str, Any]) -> Merged:
    """Everything that this rank can see by itself."""
    check_class()
    check_parallel_state(call.get("pg_collection"))
    merged = merge_config(config_from_environment(os.environ, options), call["config"])
    choice = check_model(call["model_chunks"], merged)
    check_script_can_save(sys.modules.get("megatron.training.global_vars"), choice)
    return merged
