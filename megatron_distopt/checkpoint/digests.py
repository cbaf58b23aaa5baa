"""Digests of a run: checksums by param of gradients and of all that is kept, which
`megatron-distopt diff` compares.

[Note: digest] The digest of a tensor is the sum over its elements of (bits of the value, as an
integer) times (a weight of the element's place in the whole param), mod 2**64. Integers add up to
the same in any order, so ranks and pieces are summed as they come: the digest of a param is the
same at any data-, tensor- and pipeline-parallel size, and on any device. It is of the bits, so -0.0
and 0.0 differ, and a NaN is a number like any other.

The weight of an element is the product of one odd number of 64 pseudorandom bits for each of its
indices. One element that differs therefore always changes the digest. Values have at most 32 bits
(an 8-byte value counts as two), so among tensors that differ in several elements one in about 2**32
has the same digest, whichever bits differ: the product does not lose what the sign bit says, as one
of 32 bits would. It is a checksum against chance, not against an adversary. Source: multilinear
hashing; Lemire and Kaser, "Strongly universal string hashing is fast" (2014), section 3.

[Note: digest file] Rank 0 appends JSON lines to one file. Each start of a run (a process that
begins to train, or a checkpoint that a running one loads) writes a head, which says after which
step it begins, and the state there. A start takes the place of all later steps of the starts before
it, as training does that is resumed from a checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.manifest import kind_of
from megatron_distopt.checkpoint.whole_model import OwnedPiece, WholeModel, shards_of
from megatron_distopt.comm import Group, exchange, exchange_together, raise_together, sum_over
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Span
from megatron_distopt.optimizer.inner_state import count_updates
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.step import StepDecision
from megatron_distopt.version import VERSION

#: The kind of the reduced gradient; main params and what else is kept have the kinds that they have
#: in checkpoints.
GRADS = "grad"
#: What a digest is of: kind, and name of the param in the whole model.
DigestKey: TypeAlias = tuple[str, str]

_FORMAT = "megatron-distopt digests 1"
#: Elements that are summed at once: on the CPU they stay in the cache, elsewhere it limits the
#: memory (8 bytes each).
_AT_ONCE_ON_CPU, _AT_ONCE = 1 << 17, 1 << 22
#: Weights of this many indices of a dimension are kept.
_NUM_KEPT = 1 << 16
#: As signed integers of 64 bits, which is what torch has. Source: splitmix64 (Steele, Lea, Flood
#: 2014).
_STEP, _FIRST, _SECOND = (
    each - (1 << 64) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Indices of different dimensions have different weights, or a matrix would have the digest of its
#: transpose.
_APART = 1 << 40
_log = logging.getLogger("megatron_distopt")


# --- the digest of a tensor


def bits_of(values: Tensor) -> Tensor:
    """The bits of each element as an integer: nan equals nan, and -0.0 differs from 0.0."""
    return values.view(_INTEGERS[values.element_size()])


def digest_of(values: Tensor, offsets: Sequence[int]) -> Tensor:
    """The digest of a box of a param; those of boxes that make up the param add up to its digest.

    Args:
        values: of the box.
        offsets: of its first element in the param, one for each dimension.

    Returns:
        int64 0-D, to be taken mod 2**64.

    >>> whole = torch.arange(12.0).view(3, 4)
    >>> parts = digest_of(whole[:, :1], (0, 0)) + digest_of(whole[:, 1:], (0, 1))
    >>> bool(parts == digest_of(whole, (0, 0)))
    True
    """
    if values.element_size() == 8:  # becomes two integers, in a further dimension
        values = values.contiguous().unsqueeze(-1).view(torch.int32)
        offsets = (*offsets, 0)
    sums = bits_of(values)
    for dim in reversed(range(sums.dim())):
        start, stop = offsets[dim], offsets[dim] + sums.shape[-1]
        if stop <= _NUM_KEPT:
            weights = _kept_weights(dim, sums.device)[start:stop]
        else:
            weights = _made_weights(dim, start, stop, sums.device)
        sums = (sums * weights).sum(-1)
    return sums.long()


@lru_cache(maxsize=16)
def _kept_weights(dim: int, device: torch.device) -> Tensor:
    """Made on the CPU, because the streams of all later steps read them: the copy has ended when it
    returns."""
    return _made_weights(dim, 0, _NUM_KEPT, torch.device(CPU)).to(device)


def _made_weights(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """An odd pseudorandom number for each index, by splitmix64; torch shifts with the sign, which
    is cut off."""
    first, last = dim * _APART + start + 1, dim * _APART + stop + 1
    numbers = torch.arange(first, last, dtype=torch.int64, device=device) * _STEP
    for by, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        numbers = (numbers ^ ((numbers >> by) & ((1 << (64 - by)) - 1))) * factor
    return numbers | 1


# --- the digests of a model


def local_digests(model: WholeModel, *, of_grads: bool) -> dict[DigestKey, Tensor]:
    """What this rank adds to the digests of the model, of which each element is counted on one
    rank. int64 0-D each.

    Either of gradients as they were reduced, neither divided nor clipped, or of main params,
    averages and moments, of the values that they stand for.
    """
    sums, device = dict[DigestKey, Tensor](), model.shares[0].optimizer.device
    at_once = _AT_ONCE_ON_CPU if device.type == CPU else _AT_ONCE
    written = ((share, *each) for share in model.shares for each in shards_of(share.optimizer))
    for share, flat, shard in (each for each in written if each[0].writes(each[2].name)):
        placement, whole = share.placements[shard.name], shard.in_param
        for start in range(whole.start, whole.stop, at_once):
            for piece in placement.pieces(Span(start, min(start + at_once, whole.stop))):
                owned = OwnedPiece(share, flat, shard, placement, piece)
                kept = (
                    []
                    if of_grads
                    else [(kind_of(name), tensor) for name, tensor in owned.tensors()]
                )
                for kind, tensor in kept or [(GRADS, owned.view(flat.grad))]:
                    key = kind, placement.name
                    part = digest_of(as_plain(tensor), piece.in_global.offsets).to(device)
                    sums[key] = sums[key] + part if key in sums else part
    return sums


# --- logging them


class DigestLog:
    """Writes a record of digests every `log_digests` steps. A host calls it in each step, and only
    if there is one.

    `model` returns what this rank holds now; of `group`, all ranks that hold a part of the model,
    the first one writes.
    """

    def __init__(
        self, config: DistOptConfig, model: Callable[[], WholeModel], group: Group
    ) -> None:
        self._every, self._path = config.log_digests or 1, Path(config.digest_file)
        self._model, self._group = model, group
        self._num_steps: int | None = None  # None before the first step of a start
        self._grads: dict[DigestKey, Tensor] | None = None
        # of all that is summed, the same on all ranks in the same order
        self._keys: dict[DigestKey, None] = {}
        self._is_writing = group.rank == 0

    @torch.no_grad()
    def before(self) -> None:
        """Collective in the first step of a start: digests gradients that are reduced, and not
        divided or clipped yet.

        Raises:
            CheckpointError: on the rank that cannot write; RanksDisagreeError on the others.
        """
        if self._num_steps is None:
            self._num_steps = self._begin()
        is_due = (self._num_steps + 1) % self._every == 0
        self._grads = local_digests(self._model(), of_grads=True) if is_due else None

    @torch.no_grad()
    def after(self, decision: StepDecision) -> None:
        """Collective if a record is due: digests the state after the step, which was made or
        skipped."""
        self._num_steps = (self._num_steps or 0) + 1
        if self._grads is not None:
            model = self._model()
            groups = [
                group for share in model.shares for group in share.optimizer.inner.param_groups
            ]
            # Options are read here, before a scheduler changes them for the next step.
            facts = {
                **{
                    name: [_json_number(group.get(name)) for group in groups]
                    for name in ("lr", "weight_decay")
                },
                "updated": decision.updated,
                "norm": _json_number(decision.norm),
                "divisor": _json_number(decision.unclipped),
            }
            self._record(self._num_steps, self._grads | local_digests(model, of_grads=False), facts)
            self._grads = None

    def loaded(self) -> None:
        """Notes that a state was loaded: the next step begins another start."""
        self._num_steps = None

    def _begin(self) -> int:
        """Collective: writes the head and the state of a start; returns the number of steps so
        far."""
        model = self._model()
        optimizers = [share.optimizer for share in model.shares]
        num_steps = max((count_updates(each.inner) or 0) + each.num_skipped for each in optimizers)
        num_steps = max(exchange_together(lambda: num_steps, self._group, "digests"))
        versions = {
            "adam": optimizers[0].plan.choice.name,
            "torch": torch.__version__,
            "megatron_distopt": VERSION,
        }
        head = {
            "format": _FORMAT,
            "step": num_steps,
            "every": self._every,
            "about": {**model.about, **versions},
        }

        def begin_file() -> None:
            with disk.refused(
                f"digest file {self._path}", "be writable. Name another with digest_file"
            ):
                if self._is_writing:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                self._append(head)

        raise_together(begin_file, self._group, "digests")
        self._keys = {}
        self._record(num_steps, local_digests(model, of_grads=False), {})
        return num_steps

    def _record(
        self, step: int, local: Mapping[DigestKey, Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Collective: adds up what the ranks have counted, and writes it. The CPU waits for the
        device."""
        nothing = torch.zeros(
            (), dtype=torch.int64, device=self._model().shares[0].optimizer.device
        )
        while True:
            is_known = local.keys() <= self._keys.keys()
            totals = torch.stack(
                [nothing + (not is_known), *(local.get(key, nothing) for key in self._keys)]
            )
            sum_over(totals, self._group)
            num_unaware, *digests = totals.tolist()
            if not num_unaware:
                break
            # A rank has something that others do not know of yet. In the file params have the names
            # of every host.
            self._keys.update(
                dict.fromkeys(key for keys in exchange([*local], self._group) for key in keys)
            )
            names = {name: self._model().canonical(name) for _, name in self._keys}
            is_unique = len({*names.values()}) == len(names)
            self._write(
                {
                    "tensors": [
                        (kind, names[name] if is_unique else name) for kind, name in self._keys
                    ]
                }
            )
        self._write(
            {"step": step, **facts, "digests": [f"{digest % (1 << 64):x}" for digest in digests]}
        )

    def _write(self, record: Mapping[str, Any]) -> None:
        """Appends a record. Training goes on without digests where the disk does not take it."""
        try:
            self._append(record)
        except OSError as error:
            _log.error(
                "digests could not be written to %s, and none are from now on: %s",
                self._path,
                error,
            )
            self._is_writing = False

    def _append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, on rank 0, in one call, so that a run that is killed leaves at most its
        last unfinished."""
        if self._is_writing:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(
                    ("\n" if "format" in record else "")
                    + json.dumps(record, separators=(",", ":"))
                    + "\n"
                )


def _json_number(value: Any) -> float | str | None:
    """A number that JSON has; one that is kept on a device is left out."""
    if not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else str(value)


# --- reading them


@dataclass(frozen=True)
class LoggedStep:
    """What was logged of a step; the state is that after it. Step 0 is the state before the first
    one."""

    number: int
    digests: Mapping[DigestKey, str]  # as hexadecimal numbers
    facts: Mapping[str, Any]  # learning rates, norm and such; empty for the state at a start


@dataclass(frozen=True)
class LoggedRun:
    """All that a run has logged."""

    path: Path
    every: int  # steps between two records, of the last start
    steps: Mapping[int, LoggedStep]


def is_digest_file(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'"{_FORMAT}"'.encode() in file.read(len(_FORMAT) + 32)


def finished_lines(path: Path) -> list[str]:
    """Lines of a file that a run appends to, without one that it has not written to its end."""
    return path.read_text("utf-8", errors="replace").split("\n")[:-1]


def read_run(path: Path) -> LoggedRun:
    """Reads what all starts of a run have logged.

    Raises:
        CheckpointError: a line is not what it should be; only the last one may be unfinished.
    """
    every, steps = 1, dict[int, LoggedStep]()
    keys: list[DigestKey] = []
    for number, line in enumerate(finished_lines(path), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if "format" in record:
                every = record["every"]
                steps = {n: step for n, step in steps.items() if n <= record["step"]}
            elif "tensors" in record:
                keys = [(kind, name) for kind, name in record["tensors"]]
            else:
                digests = dict(zip(keys, record.pop("digests"), strict=True))
                step = record.pop("step")
                # The state at a start replaces the one that the run had there, whose gradients and
                # facts stay.
                before = steps.get(step, LoggedStep(step, {}, {}))
                steps[step] = LoggedStep(
                    number=step,
                    digests={**before.digests, **digests},
                    facts={**before.facts, **record},
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"Line {number} of the digest file {path} is damaged: {type(error).__name__}: "
                f"{error}. Remove the line, or compare another run."
            ) from error
    return LoggedRun(path, every, steps)


def differing(one: LoggedStep, other: LoggedStep) -> list[DigestKey]:
    """What both have with different digests, in the order of the first."""
    both = [key for key in one.digests if key in other.digests]
    return [key for key in both if one.digests[key] != other.digests[key]]
