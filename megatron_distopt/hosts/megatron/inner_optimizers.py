"""The inner optimizer in a Megatron of any generation: which of the host's own optimizers are
replaced, and with which options and param groups."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.checkpoint.param_groups import check_options
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, LayoutError
from megatron_distopt.optimizer.choice import adopt_instance, choose_inner
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.owners.whole_params import TrainedParams

#: By package, classes that can be replaced by another implementation of the same formula. A user's
#: own class of the same name is not among them.
_ADAMS = {
    "torch.optim": ("Adam", "AdamW"),
    "apex.optimizers": ("FusedAdam",),
    "deepspeed.ops.adam": ("FusedAdam", "DeepSpeedCPUAdam"),
    "transformer_engine.pytorch.optimizers": ("FusedAdam",),
}
_SGDS = {"torch.optim": ("SGD",), "apex.optimizers": ("FusedSGD",)}


def is_adam(optimizer: Optimizer) -> bool:
    """Whether an implementation of Adam can take its place."""
    return _is_of(optimizer, _ADAMS)


def is_sgd(optimizer: Optimizer) -> bool:
    """Whether torch's SGD can take its place."""
    return _is_of(optimizer, _SGDS)


def _is_of(optimizer: Optimizer, classes: Mapping[str, Sequence[str]]) -> bool:
    """Whether its class is one of `classes`: exported by the package, or of that name in one of its
    files. A subclass is not."""
    kind = type(optimizer)
    for module, names in classes.items():
        package = "torch.optim" if module == "torch.optim" else module.partition(".")[0]
        is_exported = any(kind is getattr(sys.modules.get(module), name, None) for name in names)
        if is_exported or (
            kind.__name__ in names and f"{kind.__module__}.".startswith(f"{package}.")
        ):
            return True
    return False


#: Options of param groups that torch's optimizers take. Others were added by the host's own inner
#: optimizer for itself.
_HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum")
#: Options that may have another form in another class: `eps` of Adafactor is a pair. If a group has
#: no value of its own, the class gets the config's value, if it takes that.
_IN_OTHER_FORMS = ("betas", "eps", "momentum")
#: Options that choose a class's kernels and not what it computes.
_ABOUT_KERNELS = (
    "foreach",
    "fused",
    "capturable",
    "set_grad_none",
    "master_weights",
    "fp32_optimizer_states",
)


def groups_of(optimizer: Optimizer, *, is_for_other_class: bool = False) -> list[dict[str, Any]]:
    """A host's param groups without the options that its own inner optimizer added for itself, such
    as "fused" and "foreach".

    `is_for_other_class`: the groups are for a class that a user named, and not for another
    implementation of the same class.
    """
    added = set(optimizer.defaults) - set(_HYPERPARAMETERS)
    usual = {key: optimizer.defaults.get(key) for key in _IN_OTHER_FORMS if is_for_other_class}
    return [
        {
            key: value
            for key, value in group.items()
            if key not in added and not (key in usual and value == usual[key])
        }
        for group in optimizer.param_groups
    ]


def unserved_options(optimizer: Optimizer) -> dict[str, Any]:
    """By name, options of a host's own Adam or SGD that its replacement does not support.

    They change its arithmetic, such as nesterov or amsgrad, and differ from the class's defaults.
    """
    parameters = inspect.signature(type(optimizer)).parameters
    usual = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name in optimizer.defaults
    }
    for name in (*_HYPERPARAMETERS, *_ABOUT_KERNELS, "decoupled_weight_decay"):
        usual.pop(name, None)
    groups = [optimizer.defaults, *optimizer.param_groups]
    if getattr(optimizer, "wd_after_momentum", False):  # apex's SGD
        groups.append({"wd_after_momentum": True})
        usual["wd_after_momentum"] = False
    return {
        name: group[name]
        for group in groups
        for name in usual
        if group.get(name, usual[name]) != usual[name]
    }


def inner_for(
    base: Optimizer,
    config: DistOptConfig,
    device_type: str,
    params: TrainedParams | None = None,
    *,
    always_replaced: bool = False,
) -> tuple[InnerChoice, Sequence[Mapping[str, Any]]]:
    """The inner optimizer and its param groups: the best implementation of the optimizer that the
    host built, or that optimizer itself.

    Args:
        base: the optimizer that the host built; a framework may have built one of another class.
        params: the params that are trained; a class that updates whole params needs them.
        always_replaced: whether an Adam or SGD of the host is always replaced.
    """
    kind = type(base).__name__
    is_named = "optimizer" in config.explicit
    is_known = is_adam(base) or is_sgd(base)
    unserved = unserved_options(base) if is_known else {}
    if unserved and (always_replaced or is_named or config.adam != "auto"):
        shown = ", ".join(f"{name}={value!r}" for name, value in unserved.items())
        raise ConfigError(
            f"The host's {kind} has {shown}, but the optimizer that replaces it does not support "
            "that. Drop these options, or drop the flag that replaces the host's optimizer."
        )
    if is_named or (is_known and not unserved):
        if is_sgd(base) and not is_named:
            config = replace(config, optimizer="sgd")
        choice = choose_inner(config, device_type, params)
        return choice, groups_of(base, is_for_other_class=choice.updates_whole_params)
    if config.adam != "auto":
        raise ConfigError(
            f"The option adam is {config.adam}, but the host's optimizer is {kind}. The option "
            "replaces only an Adam of torch, apex, DeepSpeed or TransformerEngine. Drop "
            f"--distopt-adam, or write --distopt-optimizer adam to replace {kind}."
        )
    return adopt_instance(base, params, config), base.param_groups


def plan_groups(
    named: Mapping[str, Parameter], torch_groups: Sequence[Mapping[str, Any]], choice: InnerChoice
) -> tuple[ParamGroup, ...]:
    """Param groups as for `torch.optim`, with names in place of params.

    `named` are the params that lie in a buffer. Each of them must be in exactly one group, and no
    other param in any group.
    """
    name_of = {param: name for name, param in named.items()}
    groups = []
    for index, group in enumerate(torch_groups):
        unknown = sum(param not in name_of for param in group["params"])
        if unknown:
            raise LayoutError(
                f"Param group {index} has {unknown} params that are in no buffer of the model. "
                "Leave frozen params and params of other models out of it."
            )
        options = {key: value for key, value in group.items() if key != "params"}
        check_options(index, options, choice)
        groups.append(ParamGroup(options, tuple(name_of[param] for param in group["params"])))
    times = Counter(name for group in groups for name in group.names)
    for name in named:
        if times[name] != 1:
            raise LayoutError(
                f"Param {name!r} is in {times[name]} param groups, but each trainable param must "
                "be in exactly 1. Put it into one group."
            )
    return tuple(groups)
