"""How our optimizer gets into megatron-core: the host's factory runs and builds our two classes.

[Note: the constructor is the patch point] Frameworks copy `get_megatron_optimizer`, call the
functions below it, or wrap it, and import the classes by value. All of them construct
`DistributedOptimizer`, so its `__init__` is replaced: an object of exactly the host's class becomes
one of ours before anything is allocated. A subclass that others wrote cannot become ours and is
refused. So the host's own optimizer is never built while the package is active.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer as HostChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer as HostDistributedOptimizer,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.nn import Module

from megatron_distopt.comm import Group, is_initialized, meet, raise_together
from megatron_distopt.config import DistOptConfig, config_from_environment
from megatron_distopt.errors import ConfigError, HostMismatchError
from megatron_distopt.hosts.megatron.flag import is_used, is_wanted
from megatron_distopt.hosts.megatron.protecting import protect_script
from megatron_distopt.hosts.megatron_core.checkpoint import check_script_can_save, look_at_loads
from megatron_distopt.hosts.megatron_core.core_muon import is_layer_wise_muon
from megatron_distopt.hosts.megatron_core.facts import (
    ADOPTED,
    CLASS,
    CLASS_MAY_TAKE,
    CLASS_PARAMETERS,
    FIRST_ORDER,
    LAYER_WISE,
    NOT_CALLED,
    SCRIPT,
    arguments,
)
from megatron_distopt.hosts.megatron_core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron_distopt.hosts.megatron_core.translate import (
    TranslatedConfig,
    check_model,
    check_parallel_state,
    merge_config,
)
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.patch_points import Undos, substituted
from megatron_distopt.stand_ins import code_of

#: Packages from which methods of the host's classes may come.
_KNOWN = ("_abc", "builtins", "megatron", "megatron_distopt", "torch")


def build(
    original: Callable[..., Any],
    options: DistOptConfig,
    config: Any,
    model_chunks: Sequence[Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Collective: calls `original`. If its config asks for a distributed optimizer, the
    constructors build ours."""
    name, hint = getattr(config, "optimizer", FIRST_ORDER[0]), ""
    if name not in FIRST_ORDER:  # the host resets its flag, and a run may expect this package
        hint = (
            f"; optimizer is {name!r}, but it must be adam or sgd, or muon over buffers that the "
            "host shards"
        )
    if not is_used(
        config.use_distributed_optimizer or is_layer_wise_muon(config, model_chunks), hint
    ):
        return original(config, model_chunks, *args, **kwargs)
    check_parallel_state(is_initialized())
    call = inspect.signature(original).bind(config, model_chunks, *args, **kwargs).arguments

    def merge() -> TranslatedConfig:
        check_class()
        has_groups = (
            call.get("pg_collection") is not None or parallel_state.model_parallel_is_initialized()
        )
        check_parallel_state(has_groups)
        merged, choice = _merge(options, config, model_chunks)
        check_script_can_save(choice)
        return merged

    merged = raise_together(merge, Group.of())
    constructors = Undos()
    _replace_constructors(options, merged, constructors)
    try:
        with substituted(vars(config), _as_usual_adam(config, merged)):
            optimizer = original(config, model_chunks, *args, **kwargs)
    finally:
        constructors.undo()
    optimizer.started()  # megatron-core before 0.12 puts no chain around one optimizer
    protect_script(optimizer, SCRIPT, arguments(), optimizer.ours()[0].sharded.device)
    return optimizer


def _as_usual_adam(config: Any, merged: TranslatedConfig) -> dict[str, object]:
    """The values of config fields with which the host builds a plain fp32 Adam or SGD on the
    device, which ours replaces. For Muon, it builds an Adam.

    They are set in the config itself and not in a copy, because the optimizer keeps the object.
    """
    usual: dict[str, object] = {
        "use_precision_aware_optimizer": False,
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8": False,
        "optimizer_cpu_offload": False,
    }
    if merged.muon is not None:
        usual |= {"optimizer": "adam", "use_distributed_optimizer": True, LAYER_WISE: False}
    return {name: value for name, value in usual.items() if name in vars(config)}


def take_over(options: DistOptConfig, undos: Undos) -> None:
    """Replaces the constructors and the host's load. Environment variables and the host's configs
    add to `options`."""
    if not hasattr(HostDistributedOptimizer.__init__, "replaces"):
        check_class()
        _replace_constructors(options, None, undos)
    look_at_loads(undos)


def _replace_constructors(
    options: DistOptConfig, merged: TranslatedConfig | None, undos: Undos
) -> None:
    """Replaces both constructors. `merged` has the options that all ranks have checked; None if
    each constructor has to merge and check them."""
    of_host, of_hosts_chain = (
        getattr(kind.__init__, "replaces", kind.__init__)
        for kind in (HostDistributedOptimizer, HostChainedOptimizer)
    )
    undos.replace(HostDistributedOptimizer, "__init__", _constructor(of_host, options, merged))
    undos.replace(HostChainedOptimizer, "__init__", _chain_constructor(of_hosts_chain))


def check_class() -> None:
    """Refuses a constructor with other parameters, and replaced methods of the host that ours would
    replace in turn."""
    found = tuple(inspect.signature(HostDistributedOptimizer.__init__).parameters)[1:]
    if tuple(name for name in found if name not in CLASS_MAY_TAKE) != CLASS_PARAMETERS:
        raise HostMismatchError(
            f"The constructor of {CLASS} takes ({', '.join(found)}), but it must take "
            f"({', '.join(CLASS_PARAMETERS)}). Use a megatron-core that docs/hosts.md lists."
        )
    lost: dict[str, str] = {}
    for ours, host in (
        (DistributedOptimizer, HostDistributedOptimizer),
        (ChainedOptimizer, HostChainedOptimizer),
    ):
        added = [vars(base) for base in ours.__mro__ if base not in host.__mro__]
        for base, name in product(host.__mro__, sorted(NOT_CALLED.union(*added))):
            modules = [module for module, _ in code_of(vars(base).get(name))]
            others = [each for each in modules if each.split(".")[0] not in _KNOWN]
            is_adopted = ADOPTED.issuperset((name, each) for each in others)
            # the host's __init__ of MegatronOptimizer runs in ours
            if not is_adopted and (base, name) != (MegatronOptimizer, "__init__"):
                lost[f"{base.__module__}.{base.__qualname__}.{name}"] = others[0]
    if lost:
        owners = ", ".join(sorted({*lost.values()}))
        raise HostMismatchError(
            f"{owners} has replaced {', '.join(lost)}. This package replaces the same methods, so "
            "those changes would be lost. Switch the patches off, or, if they wrap the host's own "
            "methods, write import megatron.core.optimizer and NAME = NAME.__wrapped__ for each."
        )


def _constructor(
    original: Callable[..., None], options: DistOptConfig, merged: TranslatedConfig | None
) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_wanted(True):
            original(self, *args, **kwargs)
            return
        if type(self) is not HostDistributedOptimizer:
            raise ConfigError(
                f"{type(self).__module__}.{type(self).__qualname__} is a subclass of {CLASS}, and "
                "megatron_distopt cannot replace subclasses. Build the host's own class, or set "
                "MEGATRON_DISTOPT=0."
            )
        call = inspect.signature(original).bind(self, *args, **kwargs).arguments
        decided = merged
        if decided is None:  # ranks with the same params always construct together
            data = Group.of(call["data_parallel_group"])
            meet(data)
            decided, _ = raise_together(
                lambda: _merge(options, call["config"], call["model_chunks"]), data
            )
        self.__class__ = DistributedOptimizer
        self.__init__(*args, merged=decided, **kwargs)

    construct.replaces = original  # type: ignore[attr-defined]
    return construct


def _merge(
    options: DistOptConfig, config: Any, chunks: Sequence[Module]
) -> tuple[TranslatedConfig, InnerChoice | None]:
    merged = merge_config(config_from_environment(os.environ, options), config)
    return merged, check_model(chunks, merged)


def _chain_constructor(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(self: Any, chained_optimizers: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        ours = [
            optimizer
            for optimizer in chained_optimizers
            if isinstance(optimizer, DistributedOptimizer)
        ]
        if ours and (len(ours) != len(chained_optimizers) or kind is not HostChainedOptimizer):
            others = {
                type(other).__name__ for other in chained_optimizers if other not in ours
            } or {kind.__name__}
            raise ConfigError(
                f"The distributed optimizer is chained with {', '.join(sorted(others))}, but a "
                "chain may hold only distributed optimizers of this package. Use adam or sgd for "
                "all params, or set MEGATRON_DISTOPT=0."
            )
        if not ours and kind is HostChainedOptimizer:
            is_wanted(False)  # raises if MEGATRON_DISTOPT=require
        original(self, chained_optimizers, *args, **kwargs)
        if ours:
            self.__class__ = ChainedOptimizer
            self.started()

    construct.replaces = original  # type: ignore[attr-defined]
    return construct
