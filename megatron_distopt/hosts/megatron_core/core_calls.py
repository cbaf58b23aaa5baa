"""The host's calls that make steps and checkpoints, for one optimizer or a chain of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, cast

import torch
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer as HostDistributedOptimizer,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch._compile import _disable_dynamo

from megatron_distopt.checkpoint import is_checkpoint
from megatron_distopt.checkpoint.folder import not_found, optimizer_folder_of
from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.comm import Group, all_gather_objects, raise_together
from megatron_distopt.compatibility import Feature
from megatron_distopt.device import CPU
from megatron_distopt.errors import AccessError, CheckpointError
from megatron_distopt.hosts.megatron.averaging import average_evaluation
from megatron_distopt.hosts.megatron_core.checkpoint import (
    FOLDER,
    HEAD,
    check_head,
    check_is_cut,
    load_head,
    loadable,
    look_at_loads,
    state_to_load,
    state_to_save,
    takes_boxes,
)
from megatron_distopt.hosts.megatron_core.facts import CLASS_POINT, EVALUATE_POINT, PATCH_POINT
from megatron_distopt.hosts.megatron_core.model import CoreState, check_is_there
from megatron_distopt.hosts.megatron_core.model_parallel import OneOptimizer, PreparedStep
from megatron_distopt.hosts.megatron_core.step import (
    CoreStep,
    changed_grads,
    check_between_steps,
    prepared_of,
    show_grads,
)
from megatron_distopt.hosts.report import describe
from megatron_distopt.hosts.start import compare_ranks, try_statistics
from megatron_distopt.optimizer.main_params import MainGrads
from megatron_distopt.optimizer.step import (
    StepAction,
    check_gradients,
    clip_divisor,
    run_step,
    update_params,
)
from megatron_distopt.patch_points import in_force
from megatron_distopt.session import Session, SessionCalls
from megatron_distopt.session.announce import announce
from megatron_distopt.session.on_all_ranks import on_all_ranks

_log = logging.getLogger("megatron_distopt")

#: Methods that the host's own `step` calls of each optimizer.
_PARTS_OF_STEP = frozenset(
    (
        "prepare_grads",
        "get_parameters",
        "get_grad_norm",
        "clip_grad_norm",
        "count_zeros",
        "step_with_ready_grads",
    )
)


class CoreCalls(MegatronOptimizer, SessionCalls):
    """The methods of our classes that the host calls.

    It is a base of ours before the host's class, and inherits from the host's base first. Otherwise
    an object of the host's class could not become one of ours, see get_in.py.
    """

    #: None until `started` was called.
    session: Session | None = None  # type: ignore[assignment]
    #: The host reads norms of some params here; such params are refused at the start.
    grad_norms_by_group: Mapping[str, float] = MappingProxyType({})

    def ours(self) -> Sequence[OneOptimizer]:
        """The optimizers of this chain, or this optimizer itself."""
        return cast("Sequence[OneOptimizer]", getattr(self, "chained_optimizers", [self]))

    @property
    def stats_group(self) -> Group:  # type: ignore[override]
        """All ranks that hold a part of the model."""
        first: Any = self.ours()[0]
        # megatron-core 0.9 calls it model-parallel.
        name = "get_grad_stats_parallel_group"
        find = getattr(first, name, None) or first.get_model_parallel_group
        return Group.of(find())

    def started(self) -> Session:
        """The session. The first call is collective: it compares ranks and logs what is active.

        An optimizer that a framework constructs by itself is started by its first step: until then
        it may become a part of a chain, whose optimizers start together.
        """
        if self.session is None:
            ours = self.ours()
            _start([optimizer for optimizer in ours if optimizer.session is None])
            self.session = Session(CoreState(ours))
            for optimizer in ours:
                optimizer.join(self.session)
        return self.session

    def join(self, of_all: Session) -> None:
        """Gives this optimizer the session of its chain, so that it waits for copies of a snapshot
        before its state changes."""
        if self.session is None:
            self.session = Session(CoreState(self.ours()), of_all)

    # --- steps

    @_disable_dynamo
    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Collective: the whole step.

        Returns:
            (updated, gradient norm, zeros or None), like the host's own. A step whose norm is above
            `grad_norm_skip_threshold` is skipped.

        Raises:
            LayoutError, RanksDisagreeError: on all ranks, if params or groups of one rank cannot be
                used.
        """
        if self._is_overridden():
            return cast("tuple[bool, float | None, int | None]", super().step())
        ours, session = self.ours(), self.started()
        config = ours[0].config
        threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
        step = CoreStep.of(
            ours,
            session.hooks,
            clip_grad=config.clip_grad,
            largest_norm=threshold,
            needs_norm=threshold < math.inf,
        )
        decision = run_step(step)[0]
        if decision.action is StepAction.TOO_LARGE and step.everyone.rank == 0:
            _log.info(
                "The step was skipped: its gradient norm %s is above grad_norm_skip_threshold %s.",
                decision.norm,
                threshold,
            )
        is_made = decision.action is StepAction.UPDATE
        if decision.found_inf is not None:
            is_made = decision.updated
        if not is_made and decision.action is not StepAction.TOO_LARGE:
            return False, None, None
        zeros = (decision.stats.num_zeros or 0) if config.log_num_zeros_in_grad else None
        return is_made, decision.norm, zeros

    def _is_overridden(self) -> bool:
        """Whether other code has replaced methods that the host's own step calls."""
        return any(
            not _PARTS_OF_STEP.isdisjoint(vars(optimizer)) for optimizer in (self, *self.ours())
        )

    @_disable_dynamo
    def prepare_grads(self) -> bool:
        """Collective: measures all gradients and decides. Returns True if the step must be skipped.

        Otherwise the main params have their unscaled gradients in `grad`, where they can be changed
        until the update.
        """
        hooks = self.started().hooks
        step = CoreStep.of(self.ours(), hooks, clip_grad=0.0, needs_norm=True)
        gradients, decisions = check_gradients(step)
        is_skipped = decisions[0].action is StepAction.SKIP
        for optimizer, grads, decision in zip(self.ours(), gradients.main, decisions, strict=True):
            divisor = decision.divisor if is_skipped else 1.0
            optimizer.prepared = PreparedStep(grads, replace(decision, divisor=divisor))
            if not is_skipped:
                show_grads(optimizer, grads, decision.divisor)
        return is_skipped

    def _collect_main_grad_data_for_unscaling(self) -> NoReturn:
        """Raises, as does the other part of the host's own step that has no counterpart here."""
        raise AccessError(
            "_collect_main_grad_data_for_unscaling or _unscale_main_grads_and_check_for_nan was "
            "called, but this optimizer unscales gradients in the update. Call prepare_grads(), "
            "which returns whether the step must be skipped."
        )

    _unscale_main_grads_and_check_for_nan = _collect_main_grad_data_for_unscaling

    def get_grad_norm(self) -> float:
        """The norm of the averaged, unscaled gradient. Called after `prepare_grads`."""
        if self._is_overridden():
            return float(super().get_grad_norm())
        return prepared_of(self.ours()[0]).decision.norm

    def count_zeros(self) -> int:
        """The number of zeros in the whole gradient, if the host's config counts them. Called after
        `prepare_grads`."""
        return prepared_of(self.ours()[0]).decision.stats.num_zeros or 0

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Makes the next update clip and returns the norm before clipping. Called after
        `prepare_grads`."""
        norm = self.get_grad_norm()
        for optimizer in self.ours():
            before = prepared_of(optimizer)
            divisor = before.decision.divisor * clip_divisor(norm, clip_grad)
            optimizer.prepared = PreparedStep(
                before.grads, replace(before.decision, divisor=divisor)
            )
        return norm

    @_disable_dynamo
    def step_with_ready_grads(self) -> bool:
        """Collective: updates all optimizers, then gathers the params once. Called after
        `prepare_grads`."""
        if self not in self.ours() and self._is_overridden():
            return bool(super().step_with_ready_grads())
        prepared = [prepared_of(optimizer) for optimizer in self.ours()]
        grads = list[MainGrads]()
        for optimizer, before in zip(self.ours(), prepared, strict=True):
            optimizer.prepared = None
            grads.append(changed_grads(optimizer, before.grads))
        step = CoreStep.of(self.ours(), self.started().hooks)
        decisions = [before.decision for before in prepared]
        with torch.no_grad():
            update_params(step, grads, decisions)
            step.end(decisions)
        return True

    # --- where the state is

    def offload_to_cpu(self) -> None:
        """Moves this rank's main params and moments to CPU memory, between two phases of training.

        A step is refused until `restore_from_cpu`; a save and a load work. fp32 params are their
        own main params and stay in the host's param buffers. megatron-core has the call since 0.15.
        """
        for optimizer in self.ours():
            check_is_cut(optimizer.sharded.plan.choice, Feature.MOVED_STATE, "offload_to_cpu()")
        if self.session is not None:
            self.session.finish_saving()
            self.session.wait_for_snapshot()
        for optimizer in self.ours():
            optimizer.offloaded.move_to(torch.device(CPU))

    def restore_from_cpu(self) -> None:
        """Moves back to the device what `offload_to_cpu` has moved."""
        for optimizer in self.ours():
            optimizer.offloaded.move_to(optimizer.sharded.device)

    # --- the host's checkpoints

    @on_all_ranks
    def load_state_dict(self, state_dict: Any) -> None:
        """Collective: loads a `state_dict()`, or a `sharded_state_dict()` that
        `dist_checkpointing.load` has filled.

        Raises:
            CheckpointError: on a rank that cannot take its state; nothing is changed on any rank
                then.
            RanksDisagreeError: on the other ranks.
        """
        session = self.started()
        if isinstance(state_dict, Mapping) and isinstance(folder := state_dict.get(FOLDER), str):
            self.load(folder)
            return
        if isinstance(state_dict, Mapping) and (HEAD in state_dict or FOLDER in state_dict):
            with session.loading():
                model = session.host.whole()
                load_state(lambda: loadable(model, state_dict), model, session.everyone)
            return
        session.wait_for_snapshot()
        check_is_there(self.ours(), "load")
        if self not in self.ours():  # the host's chain gives each optimizer its own state
            super().load_state_dict(state_dict)
            session.note_loaded()
            return
        (optimizer,) = self.ours()
        raise_together(lambda: check_head(optimizer, state_dict), optimizer.stats_group, "load")
        load_head(optimizer, state_dict)

    @on_all_ranks
    def save_parameter_state(self, filename: str) -> None:
        """Collective: saves into a folder beside the file that the host names, or with
        `checkpoint_format="gathered"` into that file."""
        if self._writes_hosts_own():
            super().save_parameter_state(filename)
        else:
            self.save(optimizer_folder_of(all_gather_objects(filename, Group.of())[0]))

    def _writes_hosts_own(self) -> bool:
        """Collective: whether the host's own methods write the checkpoint, see [Note: aligned
        lists]."""
        session = self.started()
        session.forget_newest()
        if session.config.checkpoint_format != "gathered":
            return False
        if not hasattr(HostDistributedOptimizer, "_get_main_param_and_optimizer_states"):
            raise CheckpointError(
                "checkpoint_format is 'gathered', which this megatron-core cannot write. Leave "
                "checkpoint_format out."
            )
        session.finish_saving()
        check_is_there(self.ours(), "save")
        return True

    @on_all_ranks
    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Collective: loads from the folder beside the file that the host names, or from that file.

        Args:
            filename: named by the host; each tensor- and pipeline-parallel rank has another one.
            update_legacy_format: kept for the host.
        """
        first = all_gather_objects(filename, Group.of())[0]
        folder = optimizer_folder_of(first)
        found = all_gather_objects((is_checkpoint(folder), Path(first).exists()), Group.of())[0]
        if not any(found):
            raise not_found(folder, filename)
        # The host's own has a file in each folder of a model-parallel rank. The folder above holds
        # all of them.
        self.load(folder if found[0] else folder.parent)

    @on_all_ranks
    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any] | None = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Collective: the state of this rank, for `dist_checkpointing` to save or to fill.

        Args:
            model_sharded_state_dict: used only for the host's own format.
            is_loading: whether the host will fill the result.
            sharding_type, metadata: used only for the host's own format; ours loads at any layout.

        Raises:
            CheckpointError: if this version of the host saves only shards of a regular grid.
        """
        choice = self.ours()[0].sharded.plan.choice
        check_is_cut(choice, Feature.HOST_BOXES, "sharded_state_dict()")
        session = self.started()
        if is_loading:
            session.wait_for_snapshot()
            check_is_there(self.ours(), "load")
            look_at_loads(in_force)
            return state_to_load(session.host.whole())
        check_is_there(self.ours(), "save")
        if self._writes_hosts_own():
            given = {"sharding_type": sharding_type, "metadata": metadata}
            given = {name: value for name, value in given.items() if value is not None}
            of_host = super().sharded_state_dict(model_sharded_state_dict, False, **given)
            return cast("dict[str, Any]", of_host)
        takes_boxes(must=True)
        return state_to_save(session.host.whole(), session.everyone)


def _start(optimizers: Sequence[OneOptimizer]) -> None:
    """Collective: compares ranks and logs what is active, once for each optimizer."""
    for optimizer in optimizers:
        raise_together(partial(check_between_steps, optimizer), optimizer.stats_group)
        sharded, options = optimizer.sharded, vars(optimizer.ddp_config)
        try_statistics(sharded.device, optimizer.stats_group)
        compare_ranks(
            optimizer.named,
            sharded.plan,
            [(buffer.layout, buffer.grad.dtype) for buffer in sharded.buffers],
            Group.of(optimizer.data_parallel_group),
            host_options=tuple(f"{name}={value!r}" for name, value in sorted(options.items())),
        )
    if optimizers:
        average_evaluation(optimizers, EVALUATE_POINT)
    if optimizers and Group.of().rank == 0:
        started = [optimizer.sharded for optimizer in optimizers]
        points = (PATCH_POINT, CLASS_POINT)
        announce(describe("megatron-core", points, started, started[0].device))
