"""What the fork's files have beside tensors, param groups, counts and the loss scale, and how a state is taken over."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.fork_groups import described, identity
from megatron_distopt.formats.megatron_2023.plain import Origin
from megatron_distopt.hosts.megatron_2023.built import BuiltOptimizer
from megatron_distopt.hosts.whole_params import is_of_other_class
from megatron_distopt.optimizer.inner import count_updates, restore, restore_group
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.owners.muon_options import is_muons_group

_log = logging.getLogger("megatron_distopt")

#: Which kernel updates is the choice of the run that loads.
_IMPLEMENTATION = ("params", "step", "fused", "foreach", "capturable", "differentiable", "maximize", "amsgrad")
_REMEDY = "Load a checkpoint of the same model, or start from its weights with --no-load-optim"
WHAT = "optimizer state"
OF_OTHER_MODEL = Origin(WHAT, _REMEDY)


def group_dicts(optimizer: BuiltOptimizer) -> list[dict[str, Any]]:
    """The param groups without params, with the keys that the fork's own inner optimizer has, and the update count.

    torch's Adam keeps the count in the state of each param, which a gathered file lacks; apex has it in the group.
    """
    step = updates_so_far(optimizer)
    counted = {} if step is None else {"step": step}
    return [
        {key: value if key in _IMPLEMENTATION else ours.get(key, value) for key, value in template.items()} | counted
        for template, ours in zip(optimizer.host_groups, optimizer.param_groups, strict=True)
    ]


def updates_so_far(optimizer: BuiltOptimizer) -> int | None:
    """The update count for a file; None for a class that does not count, whose moments mean something without one."""
    counted = count_updates(optimizer.sharded.inner)
    return 0 if counted is None and optimizer.sharded.plan.choice.is_adam else counted


def is_of_other_kind(optimizer: BuiltOptimizer, state: Mapping[str, Any]) -> bool:
    """Whether one of the run and the state has Muon or a class of whole params, so that their param groups are others.

    [Note: another kind of optimizer] in checkpoint/ says what is loaded then.
    """
    if is_of_other_class(optimizer.sharded.plan.choice, state["optimizer"]):
        return True
    both = (optimizer.param_groups, state["optimizer"]["param_groups"])
    ours, saved = (any(map(is_muons_group, groups)) for groups in both)
    return ours != saved


def check_head(optimizer: BuiltOptimizer, state: Mapping[str, Any]) -> None:
    """Refuses a `state_dict()` that does not belong to a gathered file of this run."""
    if "optimizer" not in state or "param_groups" not in state.get("optimizer", {}) or "state" in state["optimizer"]:
        got = f"one with {', '.join(map(str, state)) or 'nothing'}"
        raise OF_OTHER_MODEL.refused(got, "be that of a distributed optimizer with a gathered file")
    if not is_of_other_kind(optimizer, state):
        match_groups(optimizer.param_groups, state["optimizer"]["param_groups"])


def match_groups(ours: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The saved groups in the order of ours, by what tells them apart; equal ones keep their order."""
    left = list(saved)
    matched = []
    for mine in ours:
        like = [group for group in left if identity(group) == identity(mine)]
        if not like:
            got = f"none with {described(mine)} among {', '.join(map(described, saved)) or 'no groups'}"
            rule = "hold every group of the run"
            raise CheckpointError(refusal("param groups in the checkpoint", got, rule, _REMEDY))
        matched.append(like[0])
        left = [group for group in left if group is not like[0]]
    if left:
        got = f"{described(left[0])} besides those of the run"
        raise CheckpointError(refusal("param groups in the checkpoint", got, "be those of the run", _REMEDY))
    return matched


def load_groups(ours: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Takes the hyperparameters over, for those keys that ours have."""
    for mine, theirs in zip(ours, match_groups(ours, saved), strict=True):
        mine.update({key: theirs[key] for key in mine if key in theirs and key not in _IMPLEMENTATION})


def load_loss_scale(optimizer: BuiltOptimizer, state: Mapping[str, Any]) -> None:
    """Into the fork's grad scaler, where both have one."""
    scaler, saved = optimizer.grad_scaler, state.get("grad_scaler")
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)
    elif scaler is not None and optimizer.fp16:
        _log.warning("the checkpoint has no loss scale; it starts from the initial one")
    elif saved is not None:
        _log.warning("the checkpoint has a loss scale and this run has none; it is left out")


def saved_step(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]] = ()) -> int | None:
    """The update count of a saved optimizer, wherever its class kept it; None where it was lost.

    apex leaves it out in groups that had no param on the rank that wrote them.
    """
    return max((int(holder["step"]) for holder in [*groups, *states] if "step" in holder), default=None)


def check_update_count(optimizer: BuiltOptimizer, step: int | None) -> int | None:
    """The update count to go on from."""
    choice, given = optimizer.sharded.plan.choice, optimizer.sharded.config.resume_step
    if given is not None and step is not None and given != step:
        known, rule = f"{step} in the checkpoint", f"be the {given} of --distopt-resume-step"
        remedy = "Drop --distopt-resume-step: the checkpoint knows it"
        raise CheckpointError(refusal("update count", known, rule, remedy))
    if given is not None or step is not None:
        return given if given is not None else step
    if choice.is_adam:
        got = "none: torch's Adam keeps it where this file layout does not save it"
        remedy = "Write --distopt-resume-step N with the number of updates so far (iterations without skipped ones)"
        raise CheckpointError(refusal("update count in the checkpoint", got, "be there for Adam", remedy))
    return None


def check_moments(optimizer: BuiltOptimizer, what: str, found: Collection[str], *, may_be_none: bool = True) -> None:
    """Refuses the state of another class than the run's, which would be left out, or fail at the next step."""
    choice = optimizer.sharded.plan.choice
    if not choice.moments <= set(found) and (found or not may_be_none):
        got = f"with {', '.join(sorted(found)) or 'params alone'}"
        rule = f"hold {', '.join(sorted(choice.moments))} for {choice.name}"
        remedy = "Resume with the optimizer of the saved run, or start from its weights with --no-load-optim"
        raise CheckpointError(refusal(what, got, rule, remedy))


def install_state(
    optimizer: BuiltOptimizer, moments: Mapping[FlatParam, Mapping[str, Tensor]], step: int | None
) -> None:
    """Gives the inner optimizer its state back and rounds the loaded main params into the param buffers."""
    inner = optimizer.sharded.inner
    optimizer.sharded.forget_deferred_check()
    for group in inner.param_groups:
        restore_group(inner, group, step)
    for flat in optimizer.sharded.flat_params:
        # A count without moments is not what torch's classes keep before their first step.
        group, counted = inner.param_groups[flat.plan.key.group], step if moments[flat] else None
        restore(inner, group, flat.main, moments[flat], counted)
        flat.write_model()
