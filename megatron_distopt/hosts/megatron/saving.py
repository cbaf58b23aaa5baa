"""What goes into a Megatron's own files, and what a snapshot of it lacks.

[Note: heads of other classes] A host keeps param groups in a file of its own, the head, and reads
them before the tensors. Numbers of the same name are not the same in two classes: `eps` of
Adafactor is a pair. So the head names a class that updates whole params, and a run with another
optimizer leaves these groups alone."""

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
    """What the head says beside param groups; nothing for classes whose groups have the keys of
    Adam's."""
    return {_CLASS: class_of(choice.name)} if choice.updates_whole_params else {}


def is_of_other_class(choice: InnerChoice, head: Mapping[str, Any]) -> bool:
    """Whether param groups of a head mean something else here, see [Note: heads of other
    classes]."""
    return head.get(_CLASS) != _head_entry(choice).get(_CLASS)


def options_of_run(args: object) -> frozenset[str]:
    """The options of param groups that a load leaves as the run has them, from the arguments of a
    Megatron's script.

    Megatron takes them from the checkpoint, so that its --override-opt_param-scheduler moves the lr
    that it logs alone.
    """
    names = ("use_checkpoint_opt_param_scheduler", "use_checkpoint_lr_scheduler")
    return frozenset() if any(getattr(args, name, False) for name in names) else SCHEDULE
