"""The optimizer of the forks of 2023.

The class is a subclass of the fork's own, and uses its reductions over tensor- and
pipeline-parallel groups. It does not run the fork's constructor, which works only on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from megatron import get_args
from megatron.optimizer.distrib_optimizer import DistributedOptimizer as HostDistributedOptimizer
from megatron.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.optim import Optimizer

from megatron_distopt.comm import Field, Group, all_gather_objects, compare, raise_together
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import AccessError, HostError
from megatron_distopt.hosts.megatron.averaging import average_evaluation
from megatron_distopt.hosts.megatron.timers import timed
from megatron_distopt.hosts.megatron_2023.buffers import main_grads
from megatron_distopt.hosts.megatron_2023.checkpoint import ForkCheckpoints
from megatron_distopt.hosts.megatron_2023.facts import EVALUATE_POINT
from megatron_distopt.hosts.megatron_2023.model import ForkModel
from megatron_distopt.hosts.megatron_2023.plan import StartPlan, plan_start
from megatron_distopt.hosts.megatron_2023.step import ForkStep, add_up_over_model_ranks
from megatron_distopt.hosts.megatron_2023.watch import Watch
from megatron_distopt.hosts.start import begin_communication, clear_grads
from megatron_distopt.optimizer.inner_state import is_torchs
from megatron_distopt.optimizer.step import StepAction, run_step
from megatron_distopt.session import Session, SessionCalls
from megatron_distopt.session.on_all_ranks import on_all_ranks


class DistributedOptimizer(SessionCalls, HostDistributedOptimizer):
    """Collective: an object of the fork's class that holds the sharded step instead of the fork's
    own state.

    Args:
        optimizer: the fork's base optimizer over model params; only its class, hyperparameters and
            groups are used.
        clip_grad: largest gradient norm; 0 for no clipping.
        log_num_zeros_in_grad: count zeros at every step.
        params_have_main_grad: kept for the fork; always True with contiguous buffers.
        use_contiguous_buffers_in_local_ddp: must be set.
        fp16, bf16, params_dtype: kept for the fork; every param keeps its own dtype.
        grad_scaler: the fork's, or None.
        models: chunks, wrapped by the fork's local DistributedDataParallel.
        options: the options of this package; None for those of the fork's arguments and
            MEGATRON_DISTOPT_* variables.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before anything is
            moved or trained.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip_grad: float,
        log_num_zeros_in_grad: bool,
        params_have_main_grad: bool,
        use_contiguous_buffers_in_local_ddp: bool,
        fp16: bool,
        bf16: bool,
        params_dtype: torch.dtype,
        grad_scaler: Any,
        models: Sequence[Module],
        *,
        options: DistOptConfig | None = None,
    ) -> None:
        self.stats_group = everyone = Group.of()
        decided = raise_together(
            lambda: plan_start(
                optimizer, clip_grad, log_num_zeros_in_grad, grad_scaler, models, options
            ),
            everyone,
        )
        # The collectives are tried with these options. Everything else is compared later.
        compare([Field("options", decided.plan.config.described())], everyone)
        groups = [decided.data, *(buffer.group for buffer in decided.buffers)]
        dtypes = {
            *(buffer.dtype for buffer in decided.buffers),
            *(param.dtype for param in decided.named.values()),
        }
        begin_communication(
            decided.plan.config, decided.how, decided.device, everyone, groups, dtypes
        )
        start = raise_together(decided.overlapping, everyone)
        MegatronOptimizer.__init__(
            self,
            optimizer,
            clip_grad,
            log_num_zeros_in_grad,
            params_have_main_grad,
            use_contiguous_buffers_in_local_ddp,
            models,
        )
        start = start.in_buckets(self._params_changed_after_backward(start))
        self.fork = ForkModel(start, models, grad_scaler, host_is_torchs=is_torchs(optimizer))
        self.sharded = self.fork.sharded
        self.optimizer = self.sharded.inner
        self.grad_scaler, self.fp16, self.bf16 = grad_scaler, fp16, bf16
        self.params_dtype = params_dtype
        self.session = Session(self.fork)
        self._checkpoints = ForkCheckpoints(self.fork, self.session)
        average_evaluation([self], EVALUATE_POINT)

    def _params_changed_after_backward(self, start: StartPlan) -> frozenset[str]:
        """Collective: the params to whose gradients the fork adds after backward. Found by a trial
        on zeros, if any rank has buckets."""
        if not any(all_gather_objects(start.overlap.bucket_size is not None, self.stats_group)):
            return frozenset()
        found: set[str] = set()
        grads = {
            name: grad for plan in start.buffers for name, grad in main_grads(plan.params).items()
        }
        with Watch(grads, found.add):
            add_up_over_model_ranks(self, get_args(), None)
        return frozenset().union(*all_gather_objects(found, start.data))

    # --- the fork's calls that make a step

    @_disable_dynamo
    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        """Collective: the model-parallel sums, then the reduce-scatter. The average is taken in
        `step`."""
        self.fork.used_grads.look()
        with self.fork.communication.watch:
            add_up_over_model_ranks(self, args, timers)
        with timed(timers, args, "grads-reduce-scatter"):
            self.fork.communication.reduce()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, args: Any = None, timers: Any = None) -> tuple[bool, float | None, int | None]:
        """Collective: measures the gradients, decides, updates this rank's shards and rounds them.
        Called after `reduce_model_grads`.

        Returns:
            (True, gradient norm, zeros or None); the norm is None without clipping. (False, None,
            None) if the step was skipped. With a deferred check (`ShardedOptimizer.defers_check`)
            norm and zeros are 0-D tensors.

        Raises:
            NonFiniteGradError: on all ranks, if a gradient is not finite and `nonfinite` is
                "raise"; one step later with a deferred check.
            LayoutError, RanksDisagreeError: on all ranks, if params, grads or groups of one rank
                cannot be used; also deferred.
            HostError: if it was called with a closure.
        """
        if callable(args):
            raise HostError(
                "step was called with a closure, but it takes the fork's arguments and timers. "
                "Compute the loss before, and call step(args, timers)."
            )
        step = ForkStep(
            fork=self.fork,
            protection=self.session.protection,
            optimizers=[self.sharded],
            everyone=self.stats_group,
            hooks=self.session.hooks,
            shows_inner=True,
            timer=partial(timed, timers, args),
        )
        (decision,) = run_step(step)
        if decision.action is StepAction.SKIP:
            return False, None, None
        # Both were done while the gradient was measured.
        with step.timer("optimizer-clip-main-grad"), step.timer("optimizer-count-zeros"):
            norm, num_zeros = decision.norm_to_log, decision.zeros_to_log
        return True, norm if self.clip_grad > 0 else None, num_zeros

    @_disable_dynamo
    @torch.no_grad()
    def gather_model_params(self, args: Any = None, timers: Any = None) -> None:
        """Collective: gathers the new params on every rank."""
        with timed(timers, args, "params-all-gather"):
            self.fork.communication.gather()
        self.fork.used_grads.mark()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops `param.grad`, or zeroes it. The fork zeroes its own grad buffers; other buffers are
        zeroed here.

        With an overlapped reduce-scatter it is collective after a backward that no step followed.
        """
        clear_grads(self.fork.start.named.values(), set_to_none=set_to_none)
        self.fork.communication.drop()

    def get_loss_scale(self) -> Tensor:
        """fp32 [1]."""
        return self.sharded.loss_scale.scale

    def get_model_parallel_group(self) -> None:
        """None, because statistics are summed over all ranks."""

    def clip_grad_norm(self, *_: Any) -> NoReturn:
        """Raises, as do the other parts of the fork's own step: no fork calls them outside of
        it."""
        raise AccessError(
            "A part of the fork's own step was called: clip_grad_norm, count_zeros, "
            "get_main_grads_for_grad_norm or get_model_param_range_map. This optimizer does not "
            "have the tensors for it. Call step(args, timers), which clips by --clip-grad and "
            "returns the gradient norm, and with --log-num-zeros-in-grad the number of zeros."
        )

    count_zeros = get_main_grads_for_grad_norm = get_model_param_range_map = clip_grad_norm

    # --- its calls about params and state

    def finish_param_gather(self) -> None:
        """Waits until all params are gathered and no snapshot reads the state.

        With --distopt-overlap-param-gather, call it before code outside of a forward pass reads or
        changes params. The model's `state_dict()` and the calls of this optimizer do it by
        themselves.
        """
        self.session.wait_for_snapshot()
        self.fork.communication.params.finish()

    def reload_model_params(self) -> None:
        """Copies model params that were changed into the main params.

        One fork calls it after every resume. Main params that still round to the model params are
        more precise and stay.
        """
        self.sharded.check_has_params("reload_model_params")
        self.finish_param_gather()
        self.fork.reload_main_params()

    def state_dict(self) -> dict[str, Any]:
        """The state that a gathered file does not have. In a fork with per-rank files, all of this
        rank's state."""
        self.finish_param_gather()
        return self._checkpoints.state_dict()

    @on_all_ranks
    def load_state_dict(self, state_dict: Mapping[str, Any], *unused: Any) -> None:
        """Collective: loads a `state_dict()` of this optimizer or of the fork's own.

        With a gathered file `load_parameter_state` has to follow. One fork gives the iteration as
        well, which is not used.

        Raises:
            CheckpointError: on a rank that cannot take its state; nothing is changed on any rank
                then.
            RanksDisagreeError: on the other ranks, with that rank's text.
        """
        self._checkpoints.load_state_dict(state_dict)

    @on_all_ranks
    def save_parameter_state(self, filename: str) -> None:
        """Collective: writes the tensors, unless --no-save-optim is set.

        Every tensor- and pipeline-parallel rank has a folder of its own for its file.

        Raises:
            CheckpointError, OSError: on a rank that cannot write; the others raise
                RanksDisagreeError.
        """
        if not getattr(get_args(), "no_save_optim", False):
            self.finish_param_gather()
            self._checkpoints.save(filename)

    @on_all_ranks
    def load_parameter_state(self, filename: str) -> None:
        """Collective: reads our folder or the fork's file, at any data-parallel size. Called after
        `load_state_dict`."""
        self._checkpoints.load(filename)
