"""What is written into a Megatron's own files.

[Note: heads of other classes] A host keeps param groups in a file of its own, the head, and reads
them before the tensors. An option may mean something else in another class: `eps` of Adafactor is a
pair. So the head names a class that updates whole params, and a run with another optimizer does not
use these groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_distopt.checkpoint.load_plan import class_of
from megatron_distopt.checkpoint.param_groups import SCHEDULE
from megatron_distopt.optimizer.inner import InnerChoice

_CLASS = "updates_whole_params"


def head_with(
    groups: Sequence[Mapping[str, Any]], choice: InnerChoice, grad_scaler: Any
) -> dict[str, Any]:
    """The head with these param groups, and with the host's grad scaler, if it has one."""
    head: dict[str, Any] = {"optimizer": {"param_groups": groups, **_head_entry(choice)}}
    if grad_scaler is not None:
        head["grad_scaler"] = grad_scaler.state_dict()
    return head


def _head_entry(choice: InnerChoice) -> dict[str, str]:
    """What the head holds in addition to param groups. Empty for classes whose param groups have
    Adam's keys."""
    return {_CLASS: class_of(choice.name)} if choice.updates_whole_params else {}


def is_of_other_class(choice: InnerChoice, head: Mapping[str, Any]) -> bool:
    """Whether the param groups of a head are of another class, see [Note: heads of other
    classes]."""
    return head.get(_CLASS) != _head_entry(choice).get(_CLASS)


def options_of_run(args: object) -> frozenset[str]:
    """The options of param groups that a load does not change, from the arguments of a Megatron's
    script.

    Megatron itself loads them, so its --override-opt_param-scheduler changes only the learning rate
    that it logs.
    """
    names = ("use_checkpoint_opt_param_scheduler", "use_checkpoint_lr_scheduler")
    return frozenset() if any(getattr(args, name, False) for name in names) else SCHEDULE
