"""Records what each step of a training computed, for tests that compare trainings to the bit.

A record has a checksum of the reduced gradient, the main param, its average and each moment of
every param. Each is of the whole tensor, so it does not depend on how ranks share the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import kind_of
from megatron_distopt.checkpoint.whole_model import WholeModel, owned_pieces
from megatron_distopt.comm import Group, all_gather_objects
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.inner_state import count_updates
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.step import StepDecision
from megatron_distopt.session.host_state import HostState
from megatron_distopt.session.run_session import Session

#: Kind ("grad", or one of a checkpoint) and name of the param.
Key = tuple[str, str]


@dataclass(frozen=True)
class RecordedStep:
    """The gradients of a step and the state after it. A start has the state alone."""

    number: int
    checksums: Mapping[Key, str]
    updated: bool | None = None  # False for a skipped step, None for a start
    norm: str = field(default="", compare=False)  # of the gradient, with all digits


#: What a training computed, by the number of the step.
Steps = dict[int, RecordedStep]


def differing(one: RecordedStep, other: RecordedStep) -> list[Key]:
    """What both have with different bits."""
    both = [key for key in one.checksums if key in other.checksums]
    return [key for key in both if one.checksums[key] != other.checksums[key]]


def parted(one: Steps, other: Steps) -> dict[int, list[Key]]:
    """What differs, by the steps that both recorded and in which something does."""
    both = {number: differing(one[number], other[number]) for number in one.keys() & other}
    return {number: keys for number, keys in both.items() if keys}


def assert_resumed(straight: Steps, resumed: Steps, first: int, last: int) -> None:
    """A training with Adam that went on after step `first` is the one that was never stopped, to
    the bit; and in that one all gradients and state have changed by the `last` step."""
    assert [*straight] == [*range(last + 1)]
    assert [*resumed] == [*range(first, last + 1)]
    assert parted(straight, resumed) == {}
    end = straight[last]
    assert {kind for kind, _ in end.checksums} == {"grad", "main", "exp_avg", "exp_avg_sq"}
    changed = {name for _, name in differing(straight[0], end)}
    assert changed == {name for _, name in end.checksums}


@contextmanager
def recorded_steps(path: Path) -> Iterator[None]:
    """Around the construction of an optimizer, whose steps are recorded in a file from then on. It
    replaces nothing that a training without records calls."""
    begin = Session.__init__

    def begin_recorded(self: Session, host: HostState, of_all: Session | None = None) -> None:
        begin(self, host, of_all)
        self.hooks += (_StepRecorder(path, host, self.everyone),)  # type: ignore[assignment]

    with mock.patch.object(Session, "__init__", begin_recorded):
        yield


def read_steps(path: Path) -> Steps:
    """By number. A start replaces the steps after the checkpoint that it goes on from."""
    steps: Steps = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        number, updated = record["number"], record["updated"]
        checksums = {(kind, name): checksum for kind, name, checksum in record["checksums"]}
        if updated is None:
            steps = {earlier: step for earlier, step in steps.items() if earlier <= number}
        if updated is not None or number not in steps:
            steps[number] = RecordedStep(number, checksums, updated, record["norm"])
        else:  # what the start has found, beside what the step before it had computed
            before = steps[number]
            checksums = {**before.checksums, **checksums}
            steps[number] = RecordedStep(number, checksums, before.updated, before.norm)
    return steps


class _StepRecorder:
    """Called around each step, on all ranks."""

    def __init__(self, path: Path, host: HostState, group: Group) -> None:
        self._path, self._host, self._group = path, host, group
        self._number: int | None = None  # None before the first step of a start
        self._grads: dict[Key, str] = {}

    @torch.no_grad()
    def before(self) -> None:
        model = self._host.whole()
        if self._number is None:
            self._number = _count_steps(model, self._group)
            self._write(_checksums(model, self._group, of_grads=False))
        self._grads = _checksums(model, self._group, of_grads=True)

    @torch.no_grad()
    def after(self, decision: StepDecision) -> None:
        assert self._number is not None, "a step ends that did not begin"
        self._number += 1
        state = _checksums(self._host.whole(), self._group, of_grads=False)
        self._write(self._grads | state, decision)

    def loaded(self) -> None:
        self._number = None

    def _write(self, checksums: Mapping[Key, str], decision: StepDecision | None = None) -> None:
        if self._group.rank == 0:
            record = {
                "number": self._number,
                "updated": None if decision is None else decision.updated,
                "norm": "" if decision is None else repr(decision.norm),
                "checksums": [(*key, checksum) for key, checksum in checksums.items()],
            }
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def _count_steps(model: WholeModel, group: Group) -> int:
    """Collective: updated and skipped ones."""
    optimizers = [share.optimizer for share in model.shares]
    counts = [(count_updates(each.inner) or 0) + each.num_skipped for each in optimizers]
    return max(all_gather_objects(max(counts), group))


def _checksums(model: WholeModel, group: Group, *, of_grads: bool) -> dict[Key, str]:
    """Collective: of whole tensors."""
    boxes: list[tuple[Key, Box, Tensor]] = []
    for owned in owned_pieces(model):
        name = owned.placement.name
        if not owned.share.writes(owned.shard.name):
            continue
        tensors: dict[str, Any] = {"grad": owned.view(owned.flat.grad)}
        if not of_grads:
            tensors = {kind_of(key): tensor for key, tensor in owned.tensors()}
        for kind, tensor in tensors.items():
            boxes.append(((kind, name), owned.piece.in_global, as_plain(tensor).cpu().clone()))
    of_key: dict[Key, list[tuple[Box, Tensor]]] = {}
    for of_rank in all_gather_objects(boxes, group):
        for key, box, tensor in of_rank:
            of_key.setdefault(key, []).append((box, tensor))
    return {key: _checksum(parts) for key, parts in sorted(of_key.items())}


def _checksum(parts: list[tuple[Box, Tensor]]) -> str:
    ends = [[slice_.stop for slice_ in box.as_slices()] for box, _ in parts]
    whole = parts[0][1].new_zeros([max(of_dim) for of_dim in zip(*ends, strict=True)])
    for box, tensor in parts:
        whole[box.as_slices()] = tensor
    bits = whole.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()
