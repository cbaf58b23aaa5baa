"""The calls of the optimizer that `distribute` returns about its state: in torch's format, and in
checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.checkpoint.folder import is_checkpoint, read_manifest
from megatron_distopt.checkpoint.load_torch_state import load_torch_state_dict, names_with_state
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.checkpoint.torch_state import (
    StateByParam,
    TorchParams,
    full_state_dict,
    refuse_write,
    torch_state_dict,
)
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.errors import CheckpointError, ConfigError, LayoutError, refusal
from megatron_distopt.formats.recognise import load_any
from megatron_distopt.hosts.base import named_params
from megatron_distopt.hosts.on_all_ranks import on_all_ranks
from megatron_distopt.hosts.saving import ProtectedCalls, Saver, untrained_tensors
from megatron_distopt.hosts.torch.model import FIRST_RANK, ShardedModel
from megatron_distopt.optimizer.step import StepDecision


class StateCalls(ProtectedCalls, Optimizer):
    """A `torch.optim.Optimizer` whose state is that of the sharded params of a model."""

    _model: ShardedModel
    _saver: Saver
    #: False until torch's constructor is done, which sets attributes that are made when they are
    #: read here.
    _is_built = False
    #: Of what the model has beside the params that train, as training began, by name.
    _versions: Mapping[str, int] = MappingProxyType({})
    last_step: StepDecision | None = None
    #: Whether a folder or a snapshot was loaded.
    _was_loaded = False
    #: Whole state that `state_dict()` returns until the next step or load; on the rank that
    #: `consolidate` named.
    _consolidated: dict[int, Any] | None = None

    @property
    def state(self) -> Any:
        """The state by param, made when it is read; see [Note: torch's format] in
        checkpoint/torch_state.py.

        On several ranks its values are shards, which torch.distributed.checkpoint saves.
        """
        if not self._is_built:
            return {}
        self._check_torchs_format("state")
        is_empty = self._model.sharded.plan.choice.updates_whole_params
        names = {} if is_empty else self._names_of_grouped()
        return StateByParam(self._torch_params(), names, self.reset_state)

    @state.setter
    def state(self, value: Any) -> None:
        """Lets all state begin anew where it is empty; torch's constructor sets one, too."""
        if value:
            refuse_write()
        if self._is_built:
            self.reset_state()

    __setstate__ = refuse_write

    @torch.no_grad()
    def reset_state(
        self, params: Iterable[Parameter] | None = None, *, scale: Mapping[str, float] | None = None
    ) -> None:
        """Lets the optimizer state of params begin anew, on all ranks alike and between two steps.

        As `optimizer.state.pop(param)` in torch: moments are zero or absent, and the count of
        updates is 0. Values of params, their main params and averages stay, and so does what a
        class of your own writes into its param groups. Ranks compare their resets in the next step.

        Examples:
            >>> import torch, torch.distributed as dist, megatron_distopt
            >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            >>> model = torch.nn.Linear(4, 2)
            >>> adamw = torch.optim.AdamW(model.parameters())
            >>> optimizer = megatron_distopt.distribute(model, adamw)
            >>> model(torch.ones(3, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> optimizer.reset_state([model.weight])
            >>> [int(optimizer.state[param]["step"]) for param in model.parameters()]
            [0, 1]
            >>> dist.destroy_process_group()

        Args:
            params: that this optimizer has; all of them where None.
            scale: multiplies moments instead, as `state[param]["exp_avg"].mul_(0.1)` does:
                `{"exp_avg": 0.1}`. Counts and other moments stay.

        Raises:
            LayoutError: a param is in no param group.
            ConfigError: the inner optimizer keeps no moment that `scale` names, or is an Adam that
                counts the updates of a whole param group.
        """
        name_of = self._names_of_grouped()
        names = sorted(name_of.get(param, "") for param in (name_of if params is None else params))
        if "" in names:
            got, remedy = f"{names.count('')} in no param group", "Give params of the optimizer"
            raise LayoutError(refusal("params of reset_state", got, "be in a group", remedy))
        if self.protection is not None:
            self.protection.wait_for_copy()
        self.sharded.reset_state(names, scale)
        self._model.params.options.note_reset(names, scale)
        self._consolidated = None

    def _names_of_grouped(self) -> dict[Parameter, str]:
        names = {param: name for name, param in named_params(self._model.chunks).items()}
        return {param: names[param] for group in self.param_groups for param in group["params"]}

    def _torch_params(self) -> TorchParams:
        name_of, model = self._names_of_grouped(), self._model
        names = [[name_of[param] for param in group["params"]] for group in self.param_groups]
        empty = {
            name: tuple(param.shape)
            for param, name in name_of.items()
            if param.requires_grad and not param.numel()
        }
        return TorchParams(
            model.share(), names, self.param_groups, model.data, model.everyone, empty
        )

    def _check_torchs_format(
        self, call: str, loaded: Mapping[Any, Any] = MappingProxyType({})
    ) -> None:
        """Refuses torch's format, which is cut by element, where whole params are updated, whose
        state owners have; not while there is no state, which frameworks ask for at the start."""
        choice = self._model.sharded.plan.choice
        if choice.updates_whole_params and (self.last_step or self._was_loaded or loaded):
            features = {
                Feature.WHOLE_PARAMS: choice.name,
                Feature.TORCH_FORMAT: f"optimizer.{call}",
            }
            check_compatible(self._model.config, features)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state in torch's own format; no collective.

        On one rank `torch.save` writes it, and `torch.optim.AdamW` loads it. On several ranks its
        values are shards: `torch.distributed.checkpoint` saves them, on all ranks, and `torch.save`
        refuses them. `save(folder)` and `full_state_dict()` are other ways.
        """
        self._check_torchs_format("state_dict()")
        self._model.gather.finish()
        self._model.params.follow()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = torch_state_dict(self._torch_params())
        if self._consolidated is not None:
            state["state"] = self._consolidated
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    @torch.no_grad()
    @on_all_ranks
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective: takes a state in torch's format, of `state_dict()`, `full_state_dict()` or an
        optimizer of torch.

        Raises:
            CheckpointError: on all ranks, where one of them cannot take its state; nothing is
                changed then.
        """
        self._check_torchs_format("load_state_dict()", state_dict.get("state", {}))
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, dict(state_dict)) or state_dict
        self._model.bring_up_to_date(is_read=False)
        if self._model.waiting:
            self._model.grow_to(names_with_state(self._torch_params(), state_dict))
        load_torch_state_dict(self._torch_params(), state_dict)
        self._after_load()
        self._model.params.forget_followed()
        self._model.params.doubt()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @torch.no_grad()
    @on_all_ranks
    def full_state_dict(self) -> dict[str, Any]:
        """Collective: the whole state in torch's format on rank 0, gathered param by param; empty
        on the others."""
        self._check_torchs_format("full_state_dict()")
        self._model.bring_up_to_date()
        return full_state_dict(self._torch_params())

    @on_all_ranks
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective: until the next step or load, `state_dict()` on rank 0 is `full_state_dict()`,
        for `torch.save`.

        For frameworks that save `state_dict()` of rank 0 alone. Some of them call this by
        themselves, as they do for `torch.distributed.optim.ZeroRedundancyOptimizer`.

        Args:
            to: 0; no other rank of the data-parallel group can have it.

        Raises:
            ConfigError: another rank.
        """
        if to != 0:
            raise ConfigError(
                refusal("to", to, "be 0", "Leave it out, and call torch.save on rank 0")
            )
        whole = self.full_state_dict()
        self._consolidated = whole.get("state")

    @on_all_ranks
    def save(self, folder: str | Path) -> None:
        """Collective: writes the state of all ranks, for any other data-parallel size.

        Args:
            folder: of the checkpoint, the same on all ranks; made where it is missing.

        Raises:
            CheckpointError: on a rank that cannot write; the folder holds what it held before.
            RanksDisagreeError: on the others.
        """
        self._model.bring_up_to_date()
        raise_together(lambda: self._check_folder(Path(folder)), self._model.everyone, "save")
        self._saver.save(Path(folder), self._model.whole())
        self.note_newest()

    def _check_folder(self, folder: Path) -> None:
        """Refuses a folder in which another process group of the job saves, which would be
        replaced."""
        group = self._model.everyone
        if group.rank == 0 and group.size < Group.of(None).size and is_checkpoint(folder):
            first = read_manifest(folder).about.get(FIRST_RANK, group.global_rank(0))
            if first != group.global_rank(0):
                raise CheckpointError(
                    f"Checkpoint {folder} is that of the process group of rank {first}, and must "
                    "be of one process group. Give each group a folder of its own."
                )

    def finish_saving(self) -> None:
        """Collective: waits for a save in the background (`async_save`); raises what went wrong in
        it."""
        self._saver.finish()

    @torch.no_grad()
    @on_all_ranks
    def load(self, folder: str | Path) -> None:
        """Collective: takes what `save` wrote, at this or any other size, and gathers the params.

        Args:
            folder: of the checkpoint, the same on all ranks; also one of other software that has
                these param names.

        Raises:
            CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
            RanksDisagreeError: on the others.
        """
        self._begin_load()
        if self._model.waiting and is_checkpoint(Path(folder)):
            self._grow_to_saved(
                raise_together(lambda: read_manifest(Path(folder)), self._model.everyone, "load")
            )
        load_any(Path(folder), self._model.whole(), self._model.everyone)
        self._end_load()
        self.note_newest()

    def protect(self, step: int, state: Callable[[], Any] = lambda: None) -> None:
        super().protect(step, lambda: {"state": state(), "beside": self._changed_untrained()})

    def _changed_untrained(self) -> dict[str, Tensor]:
        """Buffers, whose changes torch's norms do not count, and frozen params that were changed
        since a start."""
        found = untrained_tensors(self._model.chunks)
        return {
            name: tensor
            for name, tensor in found.items()
            if self._versions.get(name) != tensor._version or not isinstance(tensor, Parameter)
        }

    @torch.no_grad()
    def resume(self, newer_than: int = -1) -> Resumed | None:
        resumed, found = super().resume(newer_than), untrained_tensors(self._model.chunks)
        if resumed is not None:
            saved = resumed.state["beside"]
            is_cut_otherwise = (
                not resumed.is_same_size and self._model.data.size != self._model.everyone.size
            )
            if saved and (
                is_cut_otherwise or any(saved[name].shape != found[name].shape for name in saved)
            ):
                raise CheckpointError(
                    "The snapshot has buffers of a model that is cut otherwise. Start at the sizes "
                    "of the run before."
                )
            for name, tensor in saved.items():
                found[name].copy_(tensor)
            resumed = replace(resumed, state=resumed.state["state"])
        self._versions = {name: tensor._version for name, tensor in found.items()}
        return resumed

    @property
    def protection(self) -> Protection | None:  # type: ignore[override]
        return self._model.protection

    def _begin_load(self) -> None:
        self.finish_saving()
        self._model.bring_up_to_date(is_read=False)

    def _grow_to_saved(self, manifest: Manifest) -> None:
        if self._model.waiting:
            self._model.grow_to(manifest.names)

    def _end_load(self) -> None:
        self._was_loaded = True
        self._after_load()
        self._gather_written()

    def _settle(self) -> None:
        self._model.bring_up_to_date()

    def _gather_written(self) -> None:
        self._model.gather.gather_now()
        self._model.params.forget()

    def _after_load(self) -> None:
        self._model.params.options.exchange()
        self._consolidated = None
        for step_hook in self._model.hooks:
            step_hook.loaded()
