"""The inner optimizer in a Megatron of any generation: which of the host's own are replaced, and
with which options and param groups."""

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

#: Classes that can be replaced by another implementation of the same formula, by package; a user's
#: own class of the same name is not meant.
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
    """Whether it is what a package exports, or calls so in one of its files; a class that inherits
    from it is not."""
    kind = type(optimizer)
    for module, names in classes.items():
        package = "torch.optim" if module == "torch.optim" else module.partition(".")[0]
        is_exported = any(kind is getattr(sys.modules.get(module), name, None) for name in names)
        if is_exported or (
            kind.__name__ in names and f"{kind.__module__}.".startswith(f"{package}.")
        ):
            return True
    return False


#: What torch's optimizers take from a param group; what else a host's own inner optimizer wrote
#: there is its own.
_HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum")
#: Those that a class of another name has in another form: `eps` of Adafactor is a pair. Where a
#: group has no value of its own, the class gets that of the config as far as it can take it.
_IN_OTHER_FORMS = ("betas", "eps", "momentum")
#: Options of a class that say how it computes, and not what.
_ABOUT_KERNELS = (
    "foreach",
    "fused",
    "capturable",
    "set_grad_none",
    "master_weights",
    "fp32_optimizer_states",
)


def groups_of(optimizer: Optimizer, *, is_for_other_class: bool = False) -> list[dict[str, Any]]:
    """A host's param groups without what its own inner optimizer added (its "fused" and "foreach"
    are not ours).

    `is_for_other_class`: for a class that a user named, and not for another implementation of the
    same.
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
    """Options of a host's own Adam or SGD that change its arithmetic and that our choice for it
    does not have, by name.

    These are values that differ from what its class has by default, as nesterov or amsgrad.
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
    """The inner optimizer and its param groups: the best implementation of what the host built, or
    that very object.

    Args:
        base: what the host built; a framework may have put one of another class in its place.
        params: those that are trained; a class that updates whole params needs them.
        always_replaced: whether an Adam or SGD of the host is never used itself.
    """
    kind = type(base).__name__
    is_named = "optimizer" in config.explicit
    is_known = is_adam(base) or is_sgd(base)
    unserved = unserved_options(base) if is_known else {}
    if unserved and (always_replaced or is_named or config.adam != "auto"):
        shown = ", ".join(f"{name}={value!r}" for name, value in unserved.items())
        raise ConfigError(
            f"The host's {kind} has {shown}, and what takes its place does not have that. Drop one "
            "of the two: these options, or the flag that replaces the host's optimizer."
        )
    if is_named or (is_known and not unserved):
        if is_sgd(base) and not is_named:
            config = replace(config, optimizer="sgd")
        choice = choose_inner(config, device_type, params)
        return choice, groups_of(base, is_for_other_class=choice.updates_whole_params)
    if config.adam != "auto":
        raise ConfigError(
            f"The option adam is {config.adam} with the host's own {kind}, and takes the place of "
            "an Adam of torch, apex, DeepSpeed or TransformerEngine alone. Drop --distopt-adam, or "
            "write --distopt-optimizer adam to replace it."
        )
    return adopt_instance(base, params, config), base.param_groups


def plan_groups(
    named: Mapping[str, Parameter], torch_groups: Sequence[Mapping[str, Any]], choice: InnerChoice
) -> tuple[ParamGroup, ...]:
    """Param groups as for `torch.optim`, with names in place of params.

    Each of `named`, the params that lie in a buffer, must be in exactly one, and no other param in
    any.
    """
    name_of = {param: name for name, param in named.items()}
    groups = []
    for index, group in enumerate(torch_groups):
        unknown = sum(param not in name_of for param in group["params"])
        if unknown:
            raise LayoutError(
                f"In param group {index}, {unknown} params are in no buffer of the model. Leave "
                "out frozen and foreign params."
            )
        options = {key: value for key, value in group.items() if key != "params"}
        check_options(index, options, choice)
        groups.append(ParamGroup(options, tuple(name_of[param] for param in group["params"])))
    times = Counter(name for group in groups for name in group.names)
    for name in named:
        if times[name] != 1:
            raise LayoutError(
                f"The param {name!r} is in {times[name]} param groups, and must be in exactly 1. "
                "Give every trainable param one group."
            )
    return tuple(groups)
