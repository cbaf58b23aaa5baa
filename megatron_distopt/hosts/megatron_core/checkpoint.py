"""The host's checkpoint calls, for one optimizer and for a chain of them.

`save` and `load` are our own and need nothing of the host's. `save_parameter_state` and `load_parameter_state` are what
its training loop calls for checkpoints of its first kind, `sharded_state_dict` for those of its `dist_checkpointing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_distopt.checkpoint import is_checkpoint
from megatron_distopt.checkpoint.digests import DigestLog
from megatron_distopt.checkpoint.folder import folder_beside, not_found
from megatron_distopt.checkpoint.param_groups import NOT_OPTIONS
from megatron_distopt.comm import Group, exchange, exchange_together, raise_together
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_core.nameless import is_nameless
from megatron_distopt.formats.recognise import load_any
from megatron_distopt.hosts.heads import head_entry, is_of_other_class
from megatron_distopt.hosts.megatron_core.dist_checkpointing import (
    check_has_boxes,
    check_takes_boxes,
    load_sharded_state,
    state_to_load,
    state_to_save,
)
from megatron_distopt.hosts.megatron_core.resume import HasHostBuffers, load_nameless
from megatron_distopt.hosts.megatron_core.whole import HoldsState, whole_model_of
from megatron_distopt.hosts.saver import Saver
from megatron_distopt.optimizer.inner import count_updates


class CheckpointCalls(MegatronOptimizer):
    """What a class of ours answers to the host's checkpointing; mixed in before the host's class, as `StepCalls`."""

    _saver: Saver | None = None

    def ours(self) -> Sequence[HasHostBuffers]:
        """The optimizers whose state it is."""
        raise NotImplementedError

    @cached_property
    def hooks(self) -> Sequence[DigestLog]:
        """Called around each step and after a load; none without options that ask for them."""
        config = self.ours()[0].sharded.config
        if config.log_digests is None:
            return ()
        return (DigestLog(config, lambda: whole_model_of(self.ours()), Group.of()),)

    def check_is_there(self, what: str) -> None:
        """Collective: refuses `what` on all ranks where other code has emptied the state of one, see offload.py.

        Raises:
            LayoutError: on a rank where it is.
            RanksDisagreeError: on the others.
        """

        def check() -> None:
            for optimizer in self.ours():
                optimizer.offloaded.check_is_there()

        raise_together(check, self.ours()[0].stats_group, what)

    def save(self, folder: str | Path) -> None:
        """Collective: writes the state of all ranks, for any other layout of the same model.

        Args:
            folder: of the checkpoint, the same on all ranks; made where it is missing.

        Raises:
            CheckpointError: on a rank that cannot write; the folder holds what it held before.
            RanksDisagreeError: on the others.
        """
        self.check_is_there("save")
        self._saver = self._saver or Saver(self.ours()[0].sharded.config, Group.of())
        self._saver.save(Path(folder), whole_model_of(self.ours()))

    def finish_saving(self) -> None:
        """Collective: waits for a save in the background, where there is one; raises what went wrong in it."""
        if self._saver is not None:
            self._saver.finish()

    def load(self, folder: str | Path) -> None:
        """Collective: takes what `save` wrote, at this or any other layout, and gathers the params.

        Args:
            folder: of the checkpoint, the same on all ranks; also one that the host's own optimizer wrote. One in flat
                buffers without names is taken at the layout that wrote it, after the model's weights were loaded.

        Raises:
            CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
            RanksDisagreeError: on the others.
        """
        self.finish_saving()
        self.check_is_there("load")
        path, everyone = Path(folder), Group.of()
        nameless = exchange_together(lambda: not is_checkpoint(path) and is_nameless(path), everyone, "load")
        with self._new_params():
            if any(nameless):
                load_nameless(path, self.ours(), everyone, resume_step=self._resume_step)
            else:
                load_any(path, whole_model_of(self.ours()), everyone, resume_step=self._resume_step)

    def load_sharded(self, state: Mapping[str, Any]) -> None:
        """Collective: takes `sharded_state_dict` back from `dist_checkpointing.load`, and gathers the params.

        Raises: as `load`.
        """
        self.check_is_there("load")
        with self._new_params():
            load_sharded_state(whole_model_of(self.ours()), state, Group.of())

    @contextmanager
    def _new_params(self) -> Iterator[None]:
        """Collective: gathers the params that the block has written.

        A gather that is in flight is ended first: it would write over them, and the host would take it for ours.
        """
        chunks = list(dict.fromkeys(chunk for optimizer in self.ours() for chunk in optimizer.model_chunks))
        for group in [each for chunk in chunks for each in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]:
            if group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)
        yield
        for optimizer in self.ours():
            optimizer.written.forget()
        for hook in self.hooks:
            hook.loaded()
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)

    def save_parameter_state(self, filename: str) -> None:
        """Collective: `save`, into a folder beside the file that the host chose."""
        self.save(folder_beside(exchange(filename, Group.of())[0]))

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Collective: `load`, from the folder beside the file that the host names, or from that file.

        Args:
            filename: of the host, another one on every tensor- and pipeline-parallel rank.
            update_legacy_format: kept for the host.
        """
        first = exchange(filename, Group.of())[0]
        folder = folder_beside(first)
        found = exchange((is_checkpoint(folder), Path(first).exists()), Group.of())[0]
        if not any(found):
            raise not_found(folder, filename)
        # The host's own has a file in each folder of a model-parallel rank; all of them together are opened.
        self.load(folder if found[0] else folder.parent)

    @property
    def _resume_step(self) -> int | None:
        return self.ours()[0].sharded.config.resume_step

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any] | None = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Collective: the state of this rank, for `dist_checkpointing` to save or to fill, see dist_checkpointing.py.

        Args:
            model_sharded_state_dict: kept for the host; our names come from the model itself.
            is_loading: whether the host fills it.
            sharding_type, metadata: kept for the host; there is one format, for any layout.

        Raises:
            CheckpointError: this version of the host takes shards of a regular grid only.
        """
        check_takes_boxes()
        check_has_boxes(self.ours()[0].sharded.plan.choice)
        self.check_is_there("load" if is_loading else "save")
        model = whole_model_of(self.ours())
        return state_to_load(model) if is_loading else state_to_save(model, Group.of())

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: nothing is gathered on one rank."""
        _refuse("get_parameter_state_dp_zero")

    def load_parameter_state_from_dp_zero(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: nothing is gathered on one rank."""
        _refuse("load_parameter_state_from_dp_zero")


def _refuse(call: str) -> NoReturn:
    remedy = "Call save(folder) and load(folder)"
    raise CheckpointError(refusal(call, "called", "not gather the state on one rank", remedy))


def head_of(optimizer: HoldsState) -> dict[str, Any]:
    """What the host's own `state_dict` has: param groups without params, and the grad scaler."""
    step = count_updates(optimizer.sharded.inner)
    counted = {} if step is None else {"step": step}
    groups = [
        {key: value for key, value in group.items() if key != "params"} | counted for group in optimizer.param_groups
    ]
    state: dict[str, Any] = {"optimizer": {"param_groups": groups, **head_entry(optimizer.sharded.plan.choice)}}
    if optimizer.grad_scaler is not None:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


def check_head(optimizer: HoldsState, state: Mapping[str, Any]) -> None:
    """Whether `load_head` would take it.

    Raises:
        CheckpointError
    """
    remedy = "Load what optimizer.state_dict() returned, or start from the weights with --no-load-optim"
    if "param_groups" not in state.get("optimizer", {}):
        got = f"one with {', '.join(map(str, state)) or 'nothing'}"
        raise CheckpointError(refusal("optimizer state", got, "hold param groups", remedy))
    saved, ours = state["optimizer"]["param_groups"], optimizer.param_groups
    if is_of_other_class(optimizer.sharded.plan.choice, state["optimizer"]):
        return
    if len(saved) != len(ours):
        raise CheckpointError(refusal("number of param groups", len(saved), f"be {len(ours)}", remedy))


def load_head(optimizer: HoldsState, state: Mapping[str, Any]) -> None:
    """Takes `head_of` back; the tensors come with `load_parameter_state`, which then goes by name."""
    if not is_of_other_class(optimizer.sharded.plan.choice, state["optimizer"]):
        for group, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            group.update({key: saved[key] for key in group if key in saved and key not in NOT_OPTIONS})
    if optimizer.grad_scaler is not None and "grad_scaler" in state:
        optimizer.grad_scaler.load_state_dict(state["grad_scaler"])
