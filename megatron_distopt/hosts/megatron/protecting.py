"""Makes snapshots in memory while an unmodified training script of a Megatron runs.

A snapshot is made when the script calls `train_step`: then everything is as its `save_checkpoint`
would find it. A snapshot is loaded when the script's `load_checkpoint` returns, because only then
is it known from which step the run continues.

[Note: beside the optimizer] A snapshot holds the optimizer state, from which all trained params are
rounded, and what `ScriptRun` adds. Frozen params and module buffers come from the host's checkpoint
or its initialization, as at every start of the script. That is right only if training does not
change them, so their versions are compared before each snapshot.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from inspect import signature
from pathlib import Path
from traceback import walk_stack
from types import ModuleType
from typing import Any

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from torch import Generator
from torch.nn import Module, Parameter

from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.checkpoint.whole_model import untrained_tensors
from megatron_distopt.comm import Group, all_gather_objects, raise_together
from megatron_distopt.device import CPU
from megatron_distopt.errors import CheckpointError, ConfigError, HostError, HostMismatchError
from megatron_distopt.formats.recognise import TRACKER
from megatron_distopt.hosts.watches.version_census import VersionCensus
from megatron_distopt.patch_points import OTHER, PatchPoint, Replacement, apply, in_force
from megatron_distopt.session import SessionCalls

_log = logging.getLogger("megatron_distopt")
_LEAVE_OUT = "leave --distopt-protect-every (MEGATRON_DISTOPT_PROTECT_EVERY) out"
_AT_EACH_START = "with it every start of the script is a new run, even after a lost node"
_STARTS_THERE = (
    "with it every start of the script goes back to that checkpoint, even after a lost node (to go "
    f"back once, write the iteration into {TRACKER} in the folder of --load)"
)
_LOADS_AGAIN = "the script loads weights again after its start"
_IN_MODULES = "modules hold the scales of fp8, and snapshots do not include modules"
#: Arguments of Megatrons' scripts that change from where a start continues, or what it needs for
#: that.
_REFUSED = {
    "finetune": _AT_EACH_START,
    "no_load_optim": _AT_EACH_START,
    "reset_iteration": _AT_EACH_START,
    "ckpt_step": _STARTS_THERE,
    "override_ckpt_iteration": _STARTS_THERE,
    "load_tag": _STARTS_THERE,
    "no_load_lr_state": _AT_EACH_START,
    "dataloader_save": "the position in the data is in files that are written only with the host's "
    "checkpoints",
    "perform_rl_step": _LOADS_AGAIN,
    "kd": _LOADS_AGAIN,
    "mos": _LOADS_AGAIN,
    "fp8_e4m3": _IN_MODULES,
    "fp8_hybrid": _IN_MODULES,
}
#: `load_checkpoint` and `train_step` of a host's script.
Script = tuple[PatchPoint, PatchPoint]


# --- the functions of the script that are replaced


def protect_script(
    optimizer: SessionCalls, script: Script, args: Any, device: torch.device
) -> None:
    """Collective: makes the host's training script take snapshots of its run and continue from
    them.

    Raises:
        ConfigError, HostError: on all ranks, if that is not possible.
    """
    load, step = script
    training: Any = sys.modules.get(step.module)
    session = optimizer.started()
    if session.protection is None or args is None or training is None:
        return

    def enter() -> None:
        check_arguments(args)
        if not step.is_replaced:
            ours = ((load, _load_checkpoint), (step, _train_step))
            try:
                apply(
                    [(point, partial(_replacement, function)) for point, function in ours], in_force
                )
            except HostError as error:
                raise type(error)(f"{error} Or {_LEAVE_OUT}.") from error
        if (found := getattr(training, load.attribute, None)) is not load.current:
            other = getattr(found, "__code__", found)  # says in which file it is
            raise HostMismatchError(
                f"{training.__name__}.{load.attribute} was replaced by {other}, but it must be "
                f"{load}. {OTHER}, or {_LEAVE_OUT}."
            )

    raise_together(enter, Group.of())
    session.enter_script(ScriptRun(optimizer, training, args, device))


def check_arguments(args: Any) -> None:
    """Refuses arguments of the host with which a restart could not continue the run."""
    if getattr(args, "load", None) is None:
        raise ConfigError(
            "--distopt-protect-every is set, but --load is not, so a restart does not know where "
            "to look for a checkpoint. Write --load FOLDER with the same folder as --save, or "
            f"{_LEAVE_OUT}."
        )
    of_core = {"fp8": _IN_MODULES} if getattr(args, "fp8_recipe", "delayed") == "delayed" else {}
    for name, reason in {**_REFUSED, **of_core}.items():
        if (value := getattr(args, name, None)) not in (None, False):
            raise ConfigError(
                f"{name}={value!r} cannot be combined with --distopt-protect-every: {reason}. Drop "
                f"--{name.replace('_', '-')}, or {_LEAVE_OUT}."
            )


def _replacement(ours: Callable[..., Any], original: Callable[..., Any]) -> Replacement:
    return Replacement(original, partial(ours, original))


def _run_of(optimizer: object) -> ScriptRun | None:
    script = optimizer.started().script if isinstance(optimizer, SessionCalls) else None
    return script if isinstance(script, ScriptRun) else None


def _load_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = signature(original).bind(*args, **kwargs).arguments
    run = _run_of(call.get("optimizer"))
    load = partial(original, *args, **kwargs)
    return (
        load()
        if run is None
        else run.load(load, next(iter(call.values())), call["opt_param_scheduler"])
    )


def _train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = signature(original).bind(*args, **kwargs).arguments
    run = _run_of(call["optimizer"])
    if run is not None:
        run.border(call["model"], call["opt_param_scheduler"])
    return original(*args, **kwargs)


# --- what they do


class ScriptRun:
    """Adds the state of a Megatron's script to snapshots, and restores it at a restart."""

    def __init__(
        self, optimizer: SessionCalls, training: ModuleType, args: Any, device: torch.device
    ) -> None:
        self._optimizer, self._training, self._args, self._device = (
            optimizer,
            training,
            args,
            device,
        )
        self._chunks: Sequence[Module] = ()
        self._num_borders, self._iteration = 0, -1
        self._census = VersionCensus({})  # of tensors that no snapshot has, when training began
        # random states of the ranks that hold one copy of the model
        self._random: Sequence[Any] = ()

    def load(self, load: Callable[[], Any], chunks: Sequence[Module], scheduler: Any) -> Any:
        """Collective: runs the host's load, then loads a newer snapshot, if there is one. Returns
        what the host's load would return for that step."""
        before = dict(vars(scheduler))  # its `load_state_dict` adds to the number of its steps
        loaded = load()
        iteration, *others = loaded if isinstance(loaded, tuple) else (loaded,)
        resumed = self._optimizer.resume(newer_than=iteration)
        if resumed is None:
            return loaded
        state, args = resumed.state, self._args
        is_same_model_parallel = tuple(state["model_parallel"]) == _model_parallel()

        def check() -> None:
            if (was := state["global_batch_size"]) != args.global_batch_size:
                raise ConfigError(
                    f"global_batch_size is {args.global_batch_size}, but it was {was} before the "
                    f"restart. Write --global-batch-size {was}; the number of ranks may change if "
                    "it divides that."
                )
            is_cut_otherwise = iteration == 0 and not is_same_model_parallel
            if is_cut_otherwise and any(
                isinstance(each, Parameter) for each in untrained_tensors(chunks).values()
            ):
                raise CheckpointError(
                    "The tensor- or pipeline-parallel size has changed, and the frozen params of "
                    "the model are neither in the snapshot nor in a checkpoint on disk. Start with "
                    "the sizes of the run before, or load a checkpoint that has the frozen params."
                )
            if Group.of().rank == 0:
                self._check_disk(resumed)

        raise_together(check, Group.of(), "resume")
        vars(scheduler).update(before)
        scheduler.load_state_dict(state["scheduler"])
        vars(args).update(state["counters"])
        update = getattr(self._training, "update_num_microbatches", None)
        if update is not None:
            update(args.consumed_train_samples)
        self._restore_random(resumed, is_same_model_parallel=is_same_model_parallel)
        if others and state["operations"] is not None:
            others[0] = state["operations"]
        return (resumed.step, *others) if isinstance(loaded, tuple) else resumed.step

    def _check_disk(self, resumed: Resumed) -> None:
        """Refuses a snapshot unless the checkpoint of this start is the one that was newest when
        the snapshot was made, or one that the run saved later."""
        found, was = _newest_on_disk(self._args.load), resumed.state["on_disk"]
        if found != was and not (found[0] == was[0] and found[1] > was[1]):
            named = [f"{text} in {file}{written}" for file, text, written in (found, was)]
            self._optimizer.started().refuse_change(resumed.step, *named)

    def _restore_random(self, resumed: Resumed, *, is_same_model_parallel: bool) -> None:
        """Does what the host does when it loads: at another data-parallel size, every rank takes
        the states of the first rank."""
        if getattr(self._args, "no_load_rng", False):
            return
        differs_by_data = getattr(self._args, "data_parallel_random_init", False)
        if resumed.is_same_size or (is_same_model_parallel and not differs_by_data):
            set_random_states(resumed.state["random"][_one_copy().rank], self._device)
        elif Group.of().rank == 0:
            _log.warning(
                "The random states of the run before were not restored, because the parallel sizes "
                "have changed. Random numbers are those of a new run."
            )

    def border(self, chunks: Sequence[Module], scheduler: Any) -> None:
        """Collective: before a step of the script."""
        iteration = self._args.curr_iteration
        if iteration <= self._iteration:
            raise HostError(
                f"args.curr_iteration is {iteration} after {self._iteration}, but it must grow "
                f"from step to step. Train with the host's pretrain, or {_LEAVE_OUT}."
            )
        self._iteration, self._num_borders = iteration, self._num_borders + 1
        if self._num_borders == 1:
            self._chunks, self._census = chunks, VersionCensus(untrained_tensors(chunks))
        elif self._num_borders == 2:  # the first snapshot may be long after the first step
            raise_together(self._check_others, Group.of(), "protect")
        self._optimizer.protect(iteration, partial(self._state, scheduler))

    def prepare_snapshot(self) -> None:
        """Collective: before a snapshot."""
        raise_together(self._check_others, Group.of(), "protect")
        self._random = all_gather_objects(random_states(self._device), _one_copy())

    def _check_others(self) -> None:
        """Refuses a model of which training changes tensors other than the updated params."""
        changed = self._census.changed(untrained_tensors(self._chunks))
        if changed:
            raise ConfigError(
                f"Training changes {changed[0]!r}, which snapshots do not include. "
                f"{_LEAVE_OUT[0].upper()}{_LEAVE_OUT[1:]}."
            )

    def _state(self, scheduler: Any) -> dict[str, Any]:
        args = vars(self._args).items()
        return {
            "scheduler": scheduler.state_dict(),
            "counters": {
                name: value for name, value in args if name.startswith(("consumed_", "skipped_"))
            },
            "global_batch_size": self._args.global_batch_size,
            "model_parallel": _model_parallel(),
            "random": self._random,
            "on_disk": _newest_on_disk(self._args.load) if Group.of().rank == 0 else None,
            "operations": _operations_so_far(),
        }


def _newest_on_disk(folder: str) -> tuple[str, str, str]:
    """The file that names the newest checkpoint in --load, the iteration as a text that sorts like
    the number, and when the file was written."""
    file = Path(folder).resolve() / TRACKER
    with suppress(OSError):  # there is no file, or it is just being replaced
        iteration = file.read_text(encoding="utf-8").strip().zfill(7)
        written = datetime.fromtimestamp(file.stat().st_mtime, timezone.utc)
        return str(file), f"iteration {iteration}", f", written {written}"
    return str(file), "iteration (none)", ""


def _one_copy() -> Group:
    """The ranks over which one copy of the model is spread."""
    return Group.of(mpu.get_model_parallel_group())


def _model_parallel() -> tuple[int, int]:
    return mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()


def _operations_so_far() -> Any:
    """The floating-point operations that the host's `train` has counted; None if it counts none.

    `train` keeps the count in a local variable and passes it only to `save_checkpoint`. Its formula
    differs between versions, so the count is read from the caller's frame.
    """
    name = "num_floating_point_operations_so_far"
    found = (frame.f_locals.get(name) for frame, _ in walk_stack(sys._getframe()))
    return next((count for count in found if count is not None), None)


# --- random states


def random_states(device: torch.device) -> dict[str, Any]:
    """The random states that the host's checkpoints hold, without arrays and objects."""
    numpy: Any = np.random.get_state()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states().items()
    return {
        "python": random.getstate(),
        "numpy": [each.tolist() if isinstance(each, np.ndarray) else each for each in numpy],
        "torch": torch.get_rng_state(),
        "device": None if device.type == CPU else getattr(torch, device.type).get_rng_state(device),
        # Where CUDA graphs are captured, the host tracks generators in place of states.
        "tracked": {
            name: each.get_state() if isinstance(each, Generator) else each
            for name, each in tracked
        },
    }


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restores what `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    if device.type != CPU:
        getattr(torch, device.type).set_rng_state(states["device"], device)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracked = dict(tracker.get_states())
    for name, state in states["tracked"].items():
        if isinstance(tracked.get(name), Generator):
            tracked[name].set_state(state)
        else:
            tracked[name] = state
    tracker.set_states(tracked)
