"""What the file layouts of the Megatrons of 2023 have in common: param groups, update count, loss scale.

The fork's checkpointing calls `state_dict` and `load_state_dict` on every rank; where it gathers also
`save_parameter_state` and `load_parameter_state`. What we write there the fork's own optimizer can read, and the other
way round. The state of a run without the distributed optimizer is only read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.param_groups import described, identity
from megatron_distopt.formats.megatron_2023.plain import inner_of, plain_params
from megatron_distopt.formats.megatron_2023.saved import ExpectedParam, Origin, SavedParam, has_begun
from megatron_distopt.layout import ParamShard
from megatron_distopt.optimizer import FlatParam, ShardedOptimizer, count_updates, moments_of, restore, restore_group

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = [
    "check_groups",
    "check_head",
    "check_moments",
    "check_plain",
    "check_step",
    "check_step_of",
    "group_dicts",
    "install_state",
    "load_groups",
    "load_loss_scale",
    "load_plain",
    "moment_keys",
    "saved_step",
    "shards_of",
    "updates_so_far",
]

_log = logging.getLogger("megatron_distopt")

#: Which kernel updates is the choice of the run that loads.
_IMPLEMENTATION = ("params", "step", "fused", "foreach", "capturable", "differentiable", "maximize", "amsgrad")
_REMEDY = "Load a checkpoint of the same model, or start from its weights with --no-load-optim"
_OF_OTHER_MODEL = Origin("optimizer state", _REMEDY)


def group_dicts(optimizer: DistributedOptimizer) -> list[dict[str, Any]]:
    """The param groups without params, with the keys that the fork's own inner optimizer has, and the update count.

    torch's Adam keeps the count in the state of each param, which a gathered file lacks; apex has it in the group.
    """
    step = updates_so_far(optimizer)
    counted = {} if step is None else {"step": step}
    return [
        {key: value if key in _IMPLEMENTATION else ours.get(key, value) for key, value in template.items()} | counted
        for template, ours in zip(optimizer.host_groups, optimizer.param_groups, strict=True)
    ]


def updates_so_far(optimizer: DistributedOptimizer) -> int | None:
    """The update count for a file; None for a class that does not count, whose moments mean something without one."""
    counted = count_updates(optimizer.sharded.inner)
    return 0 if counted is None and optimizer.sharded.plan.choice.is_adam else counted


def check_head(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Whether the `state_dict()` that belongs to a gathered file can be taken.

    Raises:
        CheckpointError
    """
    if "optimizer" not in state or "param_groups" not in state.get("optimizer", {}) or "state" in state["optimizer"]:
        got = f"one with {', '.join(map(str, state)) or 'nothing'}"
        rule = "be that of a distributed optimizer with a gathered file"
        raise CheckpointError(refusal("optimizer state", got, rule, _REMEDY))
    check_groups(optimizer.param_groups, state["optimizer"]["param_groups"])


def check_groups(ours: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The saved groups in the order of ours, by what tells them apart; equal ones keep their order.

    Raises:
        CheckpointError: a group of ours is not among them, or one too many is.
    """
    left = list(saved)
    matched = []
    for mine in ours:
        like = [group for group in left if identity(group) == identity(mine)]
        if not like:
            got = f"none with {described(mine)} among {', '.join(map(described, saved)) or 'no groups'}"
            raise CheckpointError(
                refusal("param groups in the checkpoint", got, "hold every group of the run", _REMEDY)
            )
        matched.append(like[0])
        left = [group for group in left if group is not like[0]]
    if left:
        got = f"{described(left[0])} besides those of the run"
        raise CheckpointError(refusal("param groups in the checkpoint", got, "be those of the run", _REMEDY))
    return matched


def load_groups(ours: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Takes the hyperparameters over, for those keys that ours have."""
    for mine, theirs in zip(ours, check_groups(ours, saved), strict=True):
        mine.update({key: theirs[key] for key in mine if key in theirs and key not in _IMPLEMENTATION})


def saved_step(groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]] = ()) -> int | None:
    """The update count of a saved optimizer, wherever its class kept it; None where it was lost.

    apex leaves it out in groups that had no param on the rank that wrote them.
    """
    return max((int(holder["step"]) for holder in [*groups, *states] if "step" in holder), default=None)


def check_step_of(optimizer: DistributedOptimizer, inner: Mapping[str, Any]) -> int | None:
    """`check_step` of torch's own state dict; the count of one that has no state is 0 unless the flag says more."""
    step = saved_step(inner["param_groups"], list(inner["state"].values()))
    is_known = step is not None or optimizer.sharded.config.resume_step is not None
    return check_step(optimizer, step) if is_known or has_begun(inner) else 0


def check_step(optimizer: DistributedOptimizer, step: int | None) -> int | None:
    """The update count to go on from.

    Raises:
        CheckpointError: Adam needs one and it is unknown, or the file and the flag say different ones.
    """
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


def check_moments(
    optimizer: DistributedOptimizer, what: str, found: Collection[str], *, may_be_none: bool = True
) -> None:
    """Whether this is the state of the class that the run has: another's would be left out, or fail at the next step.

    Args:
        optimizer: that would take the state.
        what: the state's name in the error.
        found: keys of the tensors as large as a param.
        may_be_none: whether a state from before the first step has none.

    Raises:
        CheckpointError
    """
    choice = optimizer.sharded.plan.choice
    wanted = choice.moments
    if not wanted <= set(found) and (found or not may_be_none):
        got = f"with {', '.join(sorted(found)) or 'params alone'}"
        rule = f"hold {', '.join(sorted(wanted))} for {choice.name}"
        remedy = "Resume with the optimizer of the saved run, or start from its weights with --no-load-optim"
        raise CheckpointError(refusal(what, got, rule, remedy))


def load_loss_scale(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Into the fork's grad scaler, where both have one."""
    scaler, saved = optimizer.grad_scaler, state.get("grad_scaler")
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)
    elif scaler is not None and optimizer.fp16:
        _log.warning("the checkpoint has no loss scale; it starts from the initial one")
    elif saved is not None:
        _log.warning("the checkpoint has a loss scale and this run has none; it is left out")


def moment_keys(optimizer: ShardedOptimizer) -> set[str]:
    """What the inner optimizer keeps for each element, as far as this rank can tell."""
    return {key for flat in optimizer.flat_params for key in moments_of(optimizer.inner, flat.main)}


def shards_of(optimizer: ShardedOptimizer) -> dict[str, tuple[FlatParam, ParamShard]]:
    """By param name what this rank owns; at most one shard a param, because each lies in one bucket."""
    return {shard.name: (flat, shard) for flat in optimizer.flat_params for shard in flat.plan.shards}


def install_state(
    optimizer: DistributedOptimizer, moments: Mapping[FlatParam, Mapping[str, Tensor]], step: int | None
) -> None:
    """Gives the inner optimizer its state back and rounds the main params into the param buffers.

    Args:
        optimizer: whose main params are loaded.
        moments: of every flat param; taken over.
        step: the update count; None for a class that does not count.
    """
    inner = optimizer.sharded.inner
    optimizer.sharded.forget_deferred_check()
    for group in inner.param_groups:
        restore_group(inner, group, step)
    for flat in optimizer.sharded.flat_params:
        # A count without moments is not what torch's classes keep before their first step.
        group, counted = inner.param_groups[flat.plan.key.group], step if moments[flat] else None
        restore(inner, group, flat.main, moments[flat], counted)
        flat.write_model()


def check_plain(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Whether `load_plain` would take it.

    Raises:
        CheckpointError
    """
    inner = inner_of(state)
    may_be_none = not has_begun(inner)
    for each in _plain_params(optimizer, state):
        check_moments(optimizer, "optimizer state", each.moments, may_be_none=may_be_none)
    check_step_of(optimizer, inner)


@torch.no_grad()
def load_plain(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Takes this rank's shards of the state of a run without the distributed optimizer; after `check_plain`.

    Every rank has all of it. The params are not gathered yet.
    """
    inner, owned = inner_of(state), shards_of(optimizer.sharded)
    load_groups(optimizer.param_groups, inner["param_groups"])
    load_loss_scale(optimizer, state)
    for buffer in optimizer.sharded.buffers:
        buffer.collect()  # fp32 params came with the model, and packed ones are copies of it
    moments: dict[FlatParam, dict[str, Tensor]] = {flat: {} for flat in optimizer.sharded.flat_params}
    for saved in _plain_params(optimizer, state):
        if saved.name not in owned:
            continue
        flat, shard = owned[saved.name]
        if saved.main is not None:
            flat.cut(flat.main, shard).copy_(saved.main.reshape(-1)[shard.in_param.as_slice()])
        for key, tensor in saved.moments.items():
            whole = moments[flat].setdefault(key, torch.zeros_like(flat.main))
            flat.cut(whole, shard).copy_(tensor.reshape(-1)[shard.in_param.as_slice()])
    install_state(optimizer, moments, check_step_of(optimizer, inner))


def _plain_params(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> Iterator[SavedParam]:
    """Every param of the run with what was saved of it.

    Raises:
        CheckpointError: a group has other params.
    """
    named, groups = optimizer.start.named, inner_of(state)["param_groups"]
    matched = check_groups(optimizer.param_groups, groups)
    for group, saved in zip(optimizer.sharded.plan.groups, matched, strict=True):
        place = next(place for place, each in enumerate(groups) if each is saved)
        expected = [
            ExpectedParam(name, tuple(named[name].shape), named[name].dtype is not torch.float32)
            for name in group.names
        ]
        yield from plain_params(state, place, expected, _OF_OTHER_MODEL)
