"""The fork's checkpoint calls: which files they write and read.

Where the fork gathers, the optimizer's tensors go into a folder of our own beside its file, or into
that file where --distopt-checkpoint-format gathered asks for it; loading takes what it finds. Else
they travel in every rank's `state_dict()`. Both also read the state of a run without the
distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron import get_args
from megatron.core import mpu

from megatron_distopt.checkpoint import Share, WholeModel, is_checkpoint, load_checkpoint
from megatron_distopt.checkpoint.folder import not_found, optimizer_folder_of, remove_checkpoint
from megatron_distopt.checkpoint.whole_model import load_loss_scale
from megatron_distopt.comm import exchange, raise_together
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import the_step
from megatron_distopt.formats.megatron_2023.plain import is_plain
from megatron_distopt.hosts.averaging import average_evaluation
from megatron_distopt.hosts.megatron_2023.built import BuiltOptimizer
from megatron_distopt.hosts.megatron_2023.fork_files import (
    RankState,
    check_head,
    group_dicts,
    is_of_other_kind,
    load_gathered,
    load_groups,
    load_rank_state,
    open_plain,
    open_rank_state,
    rank_state_dict,
    save_gathered,
)
from megatron_distopt.hosts.megatron_2023.forks import EVALUATE_POINT, has_gates
from megatron_distopt.hosts.megatron_2023.grad_buffers import expert_place, is_expert
from megatron_distopt.hosts.naming import (
    FROM_WEIGHTS,
    ModelRanks,
    canonical,
    global_names,
    placement_of,
)
from megatron_distopt.hosts.on_all_ranks import on_all_ranks
from megatron_distopt.hosts.saving import Saver, head_entry, hooks_of, options_of_run, protection_of
from megatron_distopt.optimizer.owners.muon_options import is_muons_group


class ForkCheckpoints(BuiltOptimizer):
    """What the optimizer answers to the fork's checkpointing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, whole = self.sharded.config, partial(whole_model_of, self)
        self._saver = Saver(config, self.everyone)
        self.protection = protection_of(
            config, whole, self.everyone, self.start.device, self._settle
        )
        self.hooks = hooks_of(self.protection, config, whole, self.everyone)
        #: Updates so far, as `load_state_dict` found them.
        self._head_step: int | None = None
        #: Whether `load_state_dict` brought the whole state: the call for a file that follows it
        #: has nothing to do.
        self._has_whole_state = False
        #: Puts back what `load_state_dict` changed, until the tensors are there too.
        self._take_back: Callable[[], None] | None = None
        average_evaluation([self], EVALUATE_POINT)

    def state_dict(self) -> dict[str, Any]:
        """What a gathered file lacks; with per-rank files all of this rank's state."""
        self.finish_param_gather()
        if not self.gathers_state:
            self.check_weights()
            return rank_state_dict(self, whole_model_of(self))
        named = head_entry(self.sharded.plan.choice)
        state: dict[str, Any] = {"optimizer": {"param_groups": group_dicts(self), **named}}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    @on_all_ranks
    def load_state_dict(self, state_dict: Mapping[str, Any], *unused: Any) -> None:
        """Collective: takes `state_dict()`, also of the fork's own optimizers, back; one child
        gives the iteration too.

        With a gathered file `load_parameter_state` has to follow.

        Raises:
            CheckpointError: on a rank that cannot take its state; nothing is changed on any rank
                then.
            RanksDisagreeError: on the others, with that rank's text.
        """
        self._has_whole_state = False
        for hook in self.hooks:
            hook.loaded()
        self.finish_param_gather()
        if not is_plain(state_dict) and self.gathers_state:
            raise_together(lambda: check_head(self, state_dict), self.everyone, "load")
            self._take_back = _undo_of(self)
            if not is_of_other_kind(self, state_dict):
                load_groups(self.param_groups, state_dict["optimizer"]["param_groups"])
            load_loss_scale(self.sharded.loss_scale, state_dict.get("grad_scaler") or {})
            self._head_step = the_step(state_dict["optimizer"]["param_groups"], "the checkpoint")
            return

        def opened() -> RankState:
            if is_plain(state_dict):
                return open_plain(self, state_dict)
            return open_rank_state(self, state_dict, whole_model_of(self))

        load_rank_state(self, raise_together(opened, self.everyone, "load"), state_dict)
        self._has_whole_state = True
        self._gather_written()

    def _gather_written(self) -> None:
        self.written.forget()
        self.communication.gather()
        self.finish_param_gather()

    def _begin_load(self) -> None:
        self.finish_param_gather()
        self._saver.finish()

    def _end_load(self) -> None:
        for hook in self.hooks:
            hook.loaded()
        self._gather_written()

    def _settle(self) -> None:
        """Collective: before a snapshot, and before averages take the place of params."""
        self.finish_param_gather()
        raise_together(self.check_weights, self.everyone, "protect")
        self._settle_script()

    @on_all_ranks
    def save_parameter_state(self, filename: str) -> None:
        """Collective: writes the tensors; nothing where the fork was told --no-save-optim.

        Every tensor- and pipeline-parallel rank has a folder of its own for its file.

        Raises:
            CheckpointError, OSError: on a rank that cannot write; the others raise
                RanksDisagreeError.
        """
        if getattr(get_args(), "no_save_optim", False):
            return
        self.finish_param_gather()
        raise_together(self.check_weights, self.everyone, "save")
        # ranks have names of their own
        folder = exchange(optimizer_folder_of(filename), self.everyone)[0]
        if self.sharded.config.checkpoint_format == "gathered":
            save_gathered(self, filename)

            def remove_older() -> None:
                if self.everyone.rank == 0 and is_checkpoint(folder):
                    remove_checkpoint(folder)

            raise_together(remove_older, self.everyone, "save")  # a load takes the file now
            return
        self._saver.save(folder, whole_model_of(self))

    @on_all_ranks
    def load_parameter_state(self, filename: str) -> None:
        """Collective: reads what is there, ours or the fork's, at any data-parallel size; after
        `load_state_dict`."""
        has_whole_state, self._has_whole_state = self._has_whole_state, False
        if has_whole_state or getattr(get_args(), "no_load_optim", False):
            return
        for hook in self.hooks:
            hook.loaded()
        self.finish_param_gather()
        self._saver.finish()  # what is being saved may be what is to be loaded
        folder = optimizer_folder_of(filename)
        found = (folder, is_checkpoint(folder), Path(filename).exists())
        folder, has_folder, has_file = exchange(found, self.everyone)[0]
        try:
            if has_folder:
                load_checkpoint(folder, whole_model_of(self), self.everyone)
            elif has_file:
                self._check_adams(filename)
                load_gathered(self, filename, self._head_step)
            else:
                raise not_found(folder, filename)
        except Exception:
            if self._take_back is not None:
                self._take_back()
            raise
        finally:
            self._take_back = None
        self._gather_written()

    def _check_adams(self, filename: str) -> None:
        choice = self.sharded.plan.choice
        if choice.updates_whole_params or any(map(is_muons_group, self.param_groups)):
            raise CheckpointError(
                f"Optimizer file {filename} holds the moments of Adam alone, and this run needs "
                f"the state of {choice.name if choice.updates_whole_params else 'Muon'}. Convert "
                "it with megatron-distopt convert --to distopt, or write --no-load-optim."
            )


def _undo_of(optimizer: BuiltOptimizer) -> Callable[[], None]:
    """What puts hyperparameters and loss scale back as they are now."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    scale = optimizer.sharded.loss_scale.state_dict()

    def undo() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        optimizer.sharded.loss_scale.load_state_dict(scale)

    return undo


def whole_model_of(optimizer: BuiltOptimizer) -> WholeModel:
    """How this rank's params lie in the whole model, by their attributes, the fork's groups and its
    arguments."""
    optimizer.sharded.check_has_params("save or load")
    named, plan = optimizer.start.named, optimizer.start.plan
    tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    expert = next((expert_place(param) for param in named.values() if is_expert(param)), (0, 1))
    ranks = ModelRanks(
        tensor,
        tensor,
        expert,
        has_gates(get_args()),
        "language_model.embedding.word_embeddings.weight",
    )
    names = global_names(optimizer.models, ranks)
    placements = {
        name: placement_of(names[param], param, ranks, is_expert=is_expert(param))
        for name, param in named.items()
    }
    frozen = frozenset(name for param, name in names.items() if not param.requires_grad)
    about = {
        "host": "a Megatron of 2023",
        "ranks": optimizer.everyone.size,
        "data_parallel": optimizer.start.data.size,
        "tensor_parallel": tensor[1],
        "pipeline_parallel": mpu.get_pipeline_model_parallel_world_size(),
        "expert_parallel": expert[1],
    }
    share = Share(optimizer.sharded, placements, lambda name: not plan.excluded_from_norm(name))
    return WholeModel([share], canonical, frozen, about, FROM_WEIGHTS, options_of_run(get_args()))
