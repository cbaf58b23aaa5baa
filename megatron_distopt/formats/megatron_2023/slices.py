"""The optimizer state of the whole model as one model file has it: what every writer of a fork's files needs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.file_state import NUM_SKIPPED, OURS, check_rounds
from megatron_distopt.formats.megatron_2023.model_file import ModelFile
from megatron_distopt.formats.megatron_2023.param_groups import Kept, WrittenGroup, written_groups
from megatron_distopt.layout import Span

__all__ = ["Slices", "check_all_written"]


@dataclass(frozen=True, eq=False)
class Slices:
    """A model file and the state that is written for it.

    Args:
        file: of the model.
        source: of the whole model.
        kept: from the fork's files that are converted.
        progress: called with bytes as they are read.
    """

    file: ModelFile
    source: Source
    kept: Kept
    progress: Callable[[int], None] = lambda nbytes: None
    _last: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """What is kept for each element in addition to the main param."""
        return tuple(sorted({kind_of(key) for key in self.source.tensors} - {MAIN}))

    @cached_property
    def groups(self) -> list[WrittenGroup]:
        """Param groups of this file."""
        return written_groups(self.file, self.source.head.groups, self.kept)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the params that the optimizer updates, in the order in which the fork registers them."""
        return tuple(sorted(number for group in self.groups for number in group.members))

    @property
    def step(self) -> int | None:
        """Updates so far."""
        return max((record.step for record in self.source.head.groups if record.step is not None), default=None)

    @property
    def is_16_bit(self) -> bool:
        """Whether the fork keeps main params apart from the model's."""
        told = self.file.option("fp16") or self.file.option("bf16")
        return bool(told) or any(self.file.params[number].has_main for number in self.trained)

    @torch.no_grad()
    def read(self, kind: str, number: int) -> Tensor:
        """This file's part of a tensor, contiguous, in the param's shape; zeros where nothing was kept.

        Raises:
            CheckpointError: it does not fit the model.
        """
        known = self._last.get(kind)
        if known is None or known[0] != number:  # a param on the border of two ranks is asked for twice
            self._last[kind] = known = (number, self._cut(kind, number))
        return known[1]

    def _cut(self, kind: str, number: int) -> Tensor:
        param = self.file.params[number]
        key, shape, placement = key_of(kind, param.name), tuple(param.model.shape), param.placement
        if key not in self.source.tensors:
            return torch.zeros(shape)
        if self.source.tensors[key].shape != placement.global_shape:
            got, remedy = f"of shape {list(self.source.tensors[key].shape)}", "Give the state and the model of one save"
            rule = f"have the shape {list(placement.global_shape)} of the model in {self.file.path}"
            raise CheckpointError(refusal(f"tensor {key!r}", got, rule, remedy))
        whole, local = self.source.read(key), torch.empty(shape, dtype=torch.float32)
        for piece in placement.pieces(Span(0, local.numel())):
            stretch = local.view(-1)[piece.in_param.as_slice()].view(piece.sizes)
            stretch[piece.inside.as_slices()] = whole[piece.in_global.as_slices()]
        if kind == MAIN:
            check_rounds(local, param, self.file)
        self.progress(local.numel() * local.element_size())
        return local

    def also_saved(self) -> dict[str, Any]:
        """Entries that forks save with the optimizer or with the model."""
        return dict(self.kept.also_saved)

    def model_state(self, ranks: int | None = None) -> dict[str, Any]:
        """The entries of the model file that are the model's.

        Args:
            ranks: data-parallel, where the files fit no other number; the file's arguments say so then.
        """
        gone = {"optimizer", OURS, *self.also_saved()}
        state = {key: value for key, value in self.file.state.items() if key not in gone}
        if ranks is not None and "args" in state:
            state["args"] = Namespace(**{**vars(state["args"]), "data_parallel_size": ranks})
        return state

    def grad_scaler(self) -> dict[str, Any]:
        """The loss scale as the entry of a fork's state, where there is one."""
        if self.kept.grad_scaler is not None:
            return {"grad_scaler": dict(self.kept.grad_scaler)}
        scale = self.source.head.loss_scale
        if not scale:
            return {}
        trackers = {"growth_tracker": int(scale["good_steps"]), "hysteresis_tracker": int(scale["tolerated"])}
        return {"grad_scaler": {"scale": torch.tensor([scale["scale"]]), **trackers}}

    def step_in_state(self) -> dict[str, int]:
        """The update count where torch's and DeepSpeed's classes look for it; both take a number."""
        return {} if self.step is None or not self.kinds else {"step": self.step}

    def skipped(self) -> dict[str, int]:
        """Steps that were skipped, where there are any; for an entry of this package's own."""
        count = self.source.head.num_skipped
        return {NUM_SKIPPED: count} if count else {}

    def ours(self) -> dict[str, Any]:
        """That entry, for a file in which it holds nothing else."""
        return {OURS: self.skipped()} if self.skipped() else {}

    def inner_groups(self) -> Iterator[dict[str, Any]]:
        """Param groups as torch's state dict has them, without params."""
        for group in self.groups:
            yield dict(group.options)


def check_all_written(slices: list[Slices]) -> None:
    """Whether every param of the source is in one of the model files.

    Raises:
        CheckpointError
    """
    here = {each.file.params[number].name for each in slices for number in each.trained}
    source = slices[0].source
    foreign = [name_of(key) for key in source.tensors if kind_of(key) == MAIN and name_of(key) not in here]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        got = f"{', '.join(map(repr, foreign[:3]))}{more}, which no model file has"
        rule = f"hold the params of the model files in {slices[0].file.folder.parent}"
        raise CheckpointError(refusal("optimizer state", got, rule, "Give the state and the model of one save"))
