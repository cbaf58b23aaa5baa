"""A model on this rank: its params, grads and optimizer state, and how params are added later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import (
    GradSlot,
    LocalGrad,
    ShardedBuffer,
    allocate_grads,
    memory_order,
    move_into_buffer,
)
from megatron_distopt.checkpoint import is_checkpoint, read_manifest
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.whole_model import Share, WholeModel, without_wrappers
from megatron_distopt.comm import (
    Communicator,
    Field,
    all_gather_objects,
    compare,
    raise_together,
    share_initial,
    sum_over,
)
from megatron_distopt.hosts.start import named_params, spec_of
from megatron_distopt.hosts.torch.buffers import ParamSet, plan_sets
from megatron_distopt.hosts.torch.ddp import is_ignored
from megatron_distopt.hosts.torch.gather import ParamGather
from megatron_distopt.hosts.torch.grads import Grads
from megatron_distopt.hosts.torch.module_buffers import ModuleBuffers, modules_with_buffers
from megatron_distopt.hosts.torch.params import Params
from megatron_distopt.hosts.torch.translate import ModelPlan, check_trained, name_groups
from megatron_distopt.hosts.watches.watched_params import telling_of_aliases
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.optimizer.step import act_on_deferred_notice
from megatron_distopt.session import HostState
from megatron_distopt.session.run_session import FIRST_RANK


class ShardedModel(HostState):
    """The params, grads and optimizer state of a model on this rank; all ranks agree on its plan.

    `announce_drop` is collective: it tells all ranks that a round of gradients ends without a step.
    """

    # loads of folders and snapshots so far
    num_loads = 0
    # params in a group that have no state yet: frozen, empty or new; the same on all ranks
    untrained: dict[str, Parameter]

    def __init__(self, plan: ModelPlan, announce_drop: Callable[[ShardedModel], None]) -> None:
        config, chunks, data = plan.step.config, plan.chunks, plan.data
        self.config, self.device, self.chunks, self._plan = config, plan.device, chunks, plan
        # ranks with the same params; ranks with any part of the model
        self.data, self.everyone = data, plan.step.stats_group()
        self.placements: dict[str, Placement] = {}
        self.communicator = Communicator(
            data,
            plan.how,
            overlap_grads=bool(config.overlap_grad_reduce) and data.size > 1,
            overlap_params=config.overlap_param_gather,
        )
        self.grads = Grads(
            self.communicator, plan.step.loss_scale, config, partial(announce_drop, self)
        )
        self.gather = ParamGather(self.communicator, chunks)
        buffers, slots = self._allocate(plan.sets)
        trained = {slot.param for slot in slots}
        outside: list[Tensor] = [param for param in plan.named.values() if param not in trained]
        if plan.broadcast_buffers:
            outside += [buffer for chunk in chunks for buffer in chunk.buffers()]
        outside = [tensor for tensor in outside if not tensor.is_meta]  # meta ones have no values
        sums = tuple(
            int(buffer.param.view(torch.uint8).sum()) for buffer in buffers if data.size > 1
        )
        # equal sums mean that ranks drew equal values
        self.had_same_values = len(set(all_gather_objects(sums, data))) == 1
        share_initial(
            [
                *(buffer.param for buffer in buffers),
                *(tensor.data for tensor in outside if not is_ignored(tensor)),
            ],
            data,
            plan.device,
        )
        self.sharded = ShardedOptimizer(buffers, plan.step)
        self.optimizers = [self.sharded]
        self.params = Params(chunks, plan.torch_groups, self.sharded)
        self._take_over(plan.sets, buffers, slots)
        follows = plan.broadcast_buffers and data.size > 1
        modules = modules_with_buffers(chunks) if follows else {}
        self.module_buffers = ModuleBuffers(modules, data, plan.device) if modules else None

    # --- the params that train

    def _allocate(self, sets: Iterable[ParamSet]) -> tuple[list[ShardedBuffer], list[GradSlot]]:
        def shown(name: str, view: Tensor) -> Tensor:
            """Returns what `param.grad` will be: on one rank the gradient itself, else a LocalGrad;
            see [Note: param.grad]."""
            return (
                view.detach()
                if self.data.size == 1
                else LocalGrad.of(view, name, self.grads.zeroing)
            )

        buffers, slots = [], list[GradSlot]()
        for each in sets:
            with telling_of_aliases(each.named):
                param = move_into_buffer(
                    each.named, each.layout, keeps_strides=self._plan.keeps_strides
                )
            grad, of_set = allocate_grads(each.named, each.layout, each.grad_dtype, shown)
            buffers.append(ShardedBuffer(each.layout, self.data.rank, grad, param))
            slots += of_set
        return buffers, slots

    def _take_over(
        self, sets: Sequence[ParamSet], buffers: Sequence[ShardedBuffer], slots: Sequence[GradSlot]
    ) -> None:
        for each in sets:
            self.params.add(each.named)
            for name, param in each.named.items():
                self.placements[name] = replace(
                    self._plan.placement(name, param), order=memory_order(param)
                )
        self.params.learn_groups()
        self.communicator.add(buffers, buffers)
        self.grads.add(buffers, slots)
        self.gather.add({name: param for each in sets for name, param in each.named.items()})
        self.find_untrained()

    def find_untrained(self) -> None:
        members = {param for group in self._plan.torch_groups for param in group["params"]}
        without_slot = members - {slot.param for slot in self.grads.slots}
        self.untrained = {
            name: param
            for name, param in named_params(self.chunks).items()
            if param in without_slot
        }
        self.grads.guard(self.untrained)

    def params_to_begin(self) -> list[str]:
        """Names of params in a group that have a gradient but no state, because they were frozen
        or empty before."""
        return [
            name
            for name, param in self.untrained.items()
            if param.grad is not None and param.numel()
        ]

    def begin_training_with_grads(self) -> None:
        """Collective: begins to train the untrained params that have a gradient on any rank."""
        if self.untrained:
            number = torch.tensor([float(len(self.params_to_begin()))], device=self.device)
            sum_over(number, self.everyone)
            if number.item():
                self.begin_training_of(self.params_to_begin())

    def begin_training_of_saved(self, saved: Iterable[str]) -> None:
        """Collective: makes room for the saved state of params that are frozen here; they use it
        when they are unfrozen."""
        names = {without_wrappers(name) for name in saved}
        self.begin_training_of(name for name in self.untrained if without_wrappers(name) in names)

    def begin_training_of(self, names: Iterable[str]) -> None:
        """Collective: begins to train the params that any rank has named, except empty ones.
        Refuses them before it changes anything."""
        wanted = {name for named in all_gather_objects(list(names), self.data) for name in named}
        added = {
            name: param
            for name, param in reversed(self.untrained.items())
            if name in wanted and param.numel()
        }
        check = partial(check_trained, added, self.config, keeps_strides=self._plan.keeps_strides)
        raise_together(check if added else lambda: None, self.everyone)
        sets = plan_sets(added, self.config, self.data.size)
        specs = tuple(
            f"{spec_of(name, param)} {memory_order(param)}" for name, param in added.items()
        )
        raise_together(
            lambda: compare([Field("params that begin to train", specs)], self.data), self.everyone
        )
        buffers, slots = self._allocate(sets)
        share_initial([buffer.param for buffer in buffers], self.data, self.device)
        self.sharded.extend(buffers, name_groups(self._plan.torch_groups, added))
        self._take_over(sets, buffers, slots)

    # --- what a session asks for

    def whole(self) -> WholeModel:
        untrained = (name for names in self._untrained().values() for name in names)
        frozen = frozenset([*named_params(self.chunks), *untrained]) - self.placements.keys()
        sizes = {
            "ranks": self.everyone.size,
            "data_parallel": self.data.size,
            FIRST_RANK: self.everyone.global_rank(0),
        }
        return WholeModel(
            [self.share()], frozen=frozen, about={"host": "any torch module", **sizes}
        )

    @torch.no_grad()
    def bring_up_to_date(self, *, is_read: bool = True) -> None:
        """Collective: brings the state up to date before it is read, or (`is_read=False`) before it
        is replaced."""
        self.gather.finish()
        act_on_deferred_notice([self.sharded])
        raise_together(
            partial(self.params.follow, is_read=is_read), self.everyone, "the check of params"
        )

    def begin_load(self) -> None:
        self.bring_up_to_date(is_read=False)

    def begin_training(self, saved: Manifest) -> None:
        if self.untrained:
            self.begin_training_of_saved(saved.names)

    def read(self, folder: Path) -> None:
        if self.untrained and is_checkpoint(folder):
            saved = raise_together(lambda: read_manifest(folder), self.everyone, "load")
            self.begin_training_of_saved(saved.names)
        super().read(folder)

    def loaded(self) -> None:
        self.num_loads += 1
        self.params.options.sync()

    def gather_written(self) -> None:
        self.gather.gather_now()
        self.params.forget()

    # --- what lies where

    def share(self) -> Share:
        self.sharded.check_has_params("save or load")
        excluded = self._plan.step.excluded_from_norm
        return Share(
            self.sharded, self.placements, lambda name: not excluded(name), self._untrained()
        )

    def _untrained(self) -> dict[int, tuple[str, ...]]:
        """The params without state, by group. A group without any params has a made-up name here,
        so that a checkpoint keeps its options."""
        both = zip(
            name_groups(self._plan.torch_groups, self.untrained),
            self.sharded.plan.groups,
            strict=True,
        )
        return {
            number: untrained.names or (f"param group {number}",)
            for number, (untrained, trained) in enumerate(both)
            if untrained.names or not trained.names
        }

    def release(self) -> None:
        """Ends the distributed optimizer: the params are torch's again."""
        self.gather.release()
        self.grads.release()
        self.params.release()
