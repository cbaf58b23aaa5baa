"""Params of a model that is also wrapped in torch's DistributedDataParallel (DDP), as some
frameworks do without being asked.

[Note: gradients under DDP] DDP averages `param.grad` over all ranks before backward ends, so it is
the gradient of the whole model, and torch's clipping or a framework's may read and change it. It
stays torch's own tensor, in the param's dtype as DDP demands. The step copies it into the grad
buffer and reduces it like any other gradient: the average of equal values is the same value, so a
change that a user made on all ranks is kept. This costs one more reduce-scatter and twice the
memory of the gradients; a model that is not wrapped trains faster and in less memory.

DDP's `join()` serves ranks with unequal numbers of batches. On a rank that has run out of batches
it takes part in DDP's collectives, but not in those of a step, so the other ranks would wait in the
step forever. It is refused.

DDP averages only after a forward pass through it, outside its `no_sync()`. After any other backward
torch's own optimizer would use each rank's own gradients, and the params of the ranks would drift
apart. This is refused on all ranks. A communication hook or a process group may also fail to
average over all ranks, so where there is one, the ranks compare a checksum of the gradients that
DDP left. A param that DDP was asked to ignore is refused in a param group.

DDP lays out its buckets by the strides that it finds, and later reads them by the current strides.
So params keep theirs: see [Note: memory order] in layout/spans.py.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_distopt.buffers import GradSlot, memory_order
from megatron_distopt.errors import ConfigError, DistOptError, LayoutError
from megatron_distopt.hosts.torch.params import is_updated

#: Attribute of a DistributedDataParallel: whether a forward pass prepared the averaging of the next
#: backward. Absent before the first one.
_PREPARES = "_distopt_prepares"
NO_JOIN = (
    "join() does not work with an optimizer of distribute(...), because every step needs all "
    "ranks. Give all ranks the same number of batches, for example with "
    "DistributedSampler(..., drop_last=True). Or do not wrap the model in DistributedDataParallel, "
    "and let a rank that has run out of batches call optimizer.zero_grad() and optimizer.step() as "
    "often as the others do."
)
#: DDP's own attribute, which is set whenever averaging is prepared.
_DDPS_OWN = "require_forward_param_sync"


class _AllDDP:
    """All instances of DistributedDataParallel in this process, watched from the first optimizer
    on."""

    def __init__(self) -> None:
        self.models: WeakSet[DistributedDataParallel] = WeakSet()
        #: Number of instances so far.
        self.count = 0
        self._is_watching = False

    def watch(self) -> None:
        """Finds the instances that exist, and from then on each one as it is made."""
        if self._is_watching:
            return
        self._is_watching = True
        for each in gc.get_objects():
            if DistributedDataParallel in type(each).__mro__ and hasattr(each, "module"):
                self._add(each, "module")
        register_module_module_registration_hook(self._add)

    def _add(self, module: Module, name: str, child: Module | None = None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self.models.add(module)
            self.count += 1
            module.register_forward_pre_hook(_before_forward)


def _before_forward(model: DistributedDataParallel, _: Any) -> None:
    """Notes that averaging is prepared. torch.compile may compile it along with the model, so it
    only sets an attribute."""
    if model._join_config.enable and any(map(is_updated, model.parameters())):
        raise ConfigError(NO_JOIN)
    if torch.is_grad_enabled():
        setattr(model, _PREPARES, model.require_backward_grad_sync)


def _is_prepared(model: Module | None) -> bool:
    """Whether DDP averages in the next backward.

    Lightning prepares each backward of a manual optimization by itself, without a forward pass, and
    sets DDP's own attribute to True. `_forget` made it an int after the last step, so True is new.
    """
    was_forgotten = hasattr(model, _PREPARES)
    is_by_framework = was_forgotten and getattr(model, _DDPS_OWN, None) is True
    return is_by_framework or getattr(model, _PREPARES, False)


def _forget(model: Module) -> None:
    """Notes that the averaging of a backward has ended. DDP reads its attribute as a bool, and an
    int means the same to it."""
    setattr(model, _PREPARES, False)
    setattr(model, _DDPS_OWN, int(getattr(model, _DDPS_OWN)))


_all_ddp = _AllDDP()


class DDPWatch:
    """Which params of an optimizer are also in DDP, and whether DDP averaged their gradients."""

    def __init__(self, *, overlaps: bool) -> None:
        self._overlaps = overlaps  # whether the optimizer itself reduces gradients in backward
        #: By the id of a param, all instances that have it: one that was dropped may exist until
        #: Python collects it.
        self._models_of: dict[int, tuple[ReferenceType[DistributedDataParallel], ...]] = {}
        self._count = 0
        #: The same for the params to whose gradients backward has added since the last step.
        self.used: dict[int, tuple[ReferenceType[DistributedDataParallel], ...]] = {}
        #: Of these, those that DDP did not average in the last backward.
        self._not_averaged: set[int] = set()
        _all_ddp.watch()

    def has(self, param: Parameter) -> bool:
        """Whether DDP averages the gradient of a param."""
        if self._count != _all_ddp.count:  # the first backward after one was made
            self._count, self._models_of = _all_ddp.count, {}
            for model in _all_ddp.models:
                for name, each in model.module.named_parameters():
                    # One that was frozen when DDP was made is never one of its params.
                    if each.requires_grad and name not in model.parameters_to_ignore:
                        self._models_of[id(each)] = (*self._models_of.get(id(each), ()), ref(model))
        models = self._models_of.get(id(param))
        return models is not None and any(model() is not None for model in models)

    def arrived(self, param: Parameter) -> None:
        """Notes that backward has added to the gradient of a param that DDP has."""
        models = self.used[id(param)] = self._models_of[id(param)]
        is_averaged = any(_is_prepared(model()) for model in models)
        (self._not_averaged.discard if is_averaged else self._not_averaged.add)(id(param))

    def complaint(self, slots: Sequence[GradSlot]) -> DistOptError | None:
        """What was wrong with the backward passes through DDP since the last step; called before a
        step."""
        if ignored := [slot.name for slot in slots if is_ignored(slot.param)]:
            return trained_though_ignored(ignored[0])
        if any(model.mixed_precision is not None for model in self.used_models):
            return ConfigError(
                "DistributedDataParallel(mixed_precision=...) trains copies of the params, which "
                "the distributed optimizer cannot update. Leave mixed_precision out, and use "
                "torch.autocast or a model in bfloat16."
            )
        if self._not_averaged:
            return LayoutError(
                "A model is wrapped in DistributedDataParallel, but the last backward did not "
                "average its gradients. For the last backward of a step call the wrapped model "
                "outside of its no_sync(), or do not wrap the model."
            )
        if self._overlaps:
            return ConfigError(
                "overlap_grad_reduce is True, but the model is wrapped in DistributedDataParallel, "
                "which already averages its gradients. Leave overlap_grad_reduce out, or do not "
                "wrap the model."
            )
        return None

    def sum_of_hooked(self, slots: Sequence[GradSlot], num_ranks: int) -> int:
        """A checksum of the gradients that DDP left, for `num_ranks` ranks to compare.

        0 where DDP itself averaged them over that many ranks. Otherwise a communication hook may
        have done something else, and the checksum waits for the device.
        """
        if not any(
            model._comm_hooks or model.process_group.size() < num_ranks
            for model in self.used_models
        ):
            return 0
        grads = [slot.param.grad for slot in slots if self.has(slot.param)]
        return int(
            sum(grad.contiguous().view(torch.uint8).sum() for grad in grads if grad is not None)
        )

    @property
    def used_models(self) -> set[DistributedDataParallel]:
        """The models whose backward ran since the last step."""
        return {
            model
            for models in self.used.values()
            for reference in models
            if (model := reference()) is not None
        }

    def end_round(self) -> None:
        """Forgets what was prepared: the next backward needs a forward pass of its own."""
        for model in self.used_models:
            _forget(model)
        self.used.clear()
        self._not_averaged.clear()


def is_ignored(tensor: Tensor | None) -> bool:
    """Whether a user asked DDP to ignore a param or module buffer, so that each rank keeps its
    own."""
    return getattr(tensor, "_ddp_ignored", False)


def trained_though_ignored(name: str) -> LayoutError:
    return LayoutError(
        f"Param {name!r} is in the distributed optimizer, but DistributedDataParallel was told to "
        "ignore it (_set_params_and_buffers_to_ignore_for_model), so each rank has its own value. "
        "This optimizer gives all ranks the same params. Leave the param out of it, and train it "
        "with torch.optim.AdamW([param])."
    )


def check_strides(named: Mapping[str, Parameter]) -> None:
    """Refuses params in DDP whose strides are about to change: DDP writes gradients by the strides
    that it found, and reads them by the current ones."""
    watch = DDPWatch(overlaps=False)
    for name, param in named.items():
        if memory_order(param) and watch.has(param):
            raise LayoutError(
                f"Param {name!r} of shape {tuple(param.shape)} has strides {param.stride()} and is "
                "in DistributedDataParallel. An optimizer that updates whole params needs it "
                "contiguous. Write param.data = param.data.contiguous() before "
                "DistributedDataParallel wraps the model, or wrap the model after distribute(...)."
            )
