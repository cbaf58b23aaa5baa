"""Records what a Megatron's training script computes, by step and rank, for `megatron-distopt
compare`.

Each rank writes into a file of its own and communicates nothing, so that the run stays what it is.
Weights are read before an update, when the forward pass has used them and no gather is under way:
what it does is seen a step later.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.comm import Group, exchange
from megatron_distopt.device import CPU
from megatron_distopt.errors import HostError, UnknownHostError
from megatron_distopt.hosts.base import named_params
from megatron_distopt.hosts.fixes import Fix, Undo, apply_fixes, needed_fixes
from megatron_distopt.hosts.fork_source import importable_host
from megatron_distopt.hosts.megatron_2023.forks import STEP_POINT
from megatron_distopt.hosts.megatron_core.facts import SCRIPT_STEP_POINT
from megatron_distopt.hosts.patch_points import REMEDY

# the folder in which ranks write, and how many steps; no options, `compare` alone sets them
RECORD_VARIABLE = "_MEGATRON_DISTOPT_RECORD"
ITERATIONS_VARIABLE = "_MEGATRON_DISTOPT_ITERATIONS"
# elements whose values a rank writes in each step, and of one param at least
_SAMPLED, _OF_ONE = 8192, 32


@dataclass(frozen=True)
class RecordedParam:
    """A param on one rank."""

    name: str
    numel: int
    sampled: int  # elements whose values are written
    is_matrix: bool
    epsilon: float  # of its dtype: the distance from 1 to the next number


class RecordedRun:
    """What the ranks of this node have recorded in a folder, also while they write on.

    A rank measures in each step: `started` (s), `loss` and `norm` (nan where there is none),
    `loss_scale`, `skipped`, `memory` (peak in bytes, of the process where the device is the CPU),
    `bits` (by param, the sum of the bits of all elements as integers), `sample` (values of some
    elements, fp32 in base64).
    """

    def __init__(self, folder: Path) -> None:
        texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.jsonl"))]
        ranks = [[json.loads(line) for line in text.split("\n")[:-1]] for text in texts]
        # of all ranks
        self.params = [RecordedParam(**param) for rank in ranks for param in (rank or [[]])[0]]
        # that all ranks have finished; by rank
        self.steps = [*zip(*(rank[1:] for rank in ranks), strict=False)]

    def values(self, what: str) -> list[float]:
        """Something measured, by step, of the first rank that has it."""
        by_rank = ([float(each[what]) for each in step] for step in self.steps)
        return [
            next((value for value in values if not math.isnan(value)), math.nan)
            for values in by_rank
        ]

    def bits(self, number: int) -> list[int]:
        return [bits for each in self.steps[number] for bits in each["bits"]]

    def weights(self, number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        samples = b"".join(base64.b64decode(each["sample"]) for each in self.steps[number])
        return np.frombuffer(samples, np.float32).astype(np.float64)


def record_training(folder: str | Path, iterations: float = math.inf) -> Undo:
    """Wraps the `train_step` of the Megatron that can be imported, when it is.

    Args:
        folder: of the files.
        iterations: steps after which all ranks leave with status 0, wherever the training began.

    Raises:
        UnknownHostError: there is no Megatron.
    """
    why, after = (
        ("each step is recorded", "megatron-distopt compare reads it"),
        functools.partial(_wrap, Path(folder), iterations),
    )
    points = SCRIPT_STEP_POINT, STEP_POINT
    fixes = [Fix(point.module, rf"^def {point.attribute}\b", *why, after=after) for point in points]
    needed = needed_fixes(importable_host(sys.path), fixes)
    if not needed:
        raise UnknownHostError(
            f"{' or '.join(map(str, points))} is to be recorded, and is not here. {REMEDY}."
        )
    return apply_fixes(needed)


def _wrap(folder: Path, iterations: float, module: ModuleType) -> Undo:
    original = vars(module)["train_step"]
    recorder = _StepRecorder(folder, iterations, original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        return recorder.step(*args, **kwargs)

    vars(module).update(train_step=train_step)
    return lambda: vars(module).update(train_step=original)


class _StepRecorder:
    """Writes the file of this rank."""

    def __init__(self, folder: Path, iterations: float, train_step: Callable[..., Any]) -> None:
        self._folder, self._train_step, self._params = folder, train_step, dict[str, Parameter]()
        self._num_left = iterations

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step of the script, and writes what it computed."""
        # whoever wraps `train_step` may give it any signature
        given = [*args, *kwargs.values()]
        optimizer = next((each for each in given if hasattr(each, "get_loss_scale")), None)
        lists = (each for each in given if isinstance(each, (list, tuple)))
        chunks = next((each for each in lists if each and isinstance(each[0], Module)), None)
        if optimizer is None or chunks is None:
            raise HostError(
                f"train_step was called with {', '.join(type(each).__name__ for each in given)}, "
                "and is recorded with a list of model chunks and an optimizer of Megatron's. Give "
                "them to it as Megatron does."
            )
        if not self._params:
            self._begin(chunks)
        started, update = time.perf_counter(), optimizer.step
        kept, seen = {"step": update} if "step" in vars(optimizer) else {}, list[Any]()

        def step(*args: Any, **kwargs: Any) -> Any:
            # The device reads them in passing, and the CPU waits for it after the step.
            params = self._params.values()
            integers = (
                param.detach().view(getattr(torch, f"int{8 * param.element_size()}"))
                for param in params
            )
            bits = torch.stack([each.sum(dtype=torch.int64) for each in integers])
            seen[:] = bits, torch.cat([*map(self._sample_of, params)])
            seen.append(update(*args, **kwargs))
            return seen[-1]

        optimizer.step = step
        try:
            result = self._train_step(*args, **kwargs)
        finally:
            del optimizer.step
            vars(optimizer).update(kept)
        if not seen:  # some scripts end in the middle of a step
            return result
        bits, sample, (updated, norm, *_) = seen
        # Some Megatrons log a sum and a number of tokens, and stages before the last nothing.
        loss, *counts = torch.as_tensor([*result[0].values(), math.nan][0]).flatten().tolist()
        device, memory = sample.device, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if device.type != CPU:
            memory = getattr(torch, device.type).max_memory_allocated(device)
        text, scale = (
            base64.b64encode(sample.cpu().numpy().tobytes()).decode(),
            float(optimizer.get_loss_scale()),
        )
        norm, loss = math.nan if norm is None else float(norm), loss / counts[0] if counts else loss
        measured = {
            "started": started,
            "loss": loss,
            "norm": norm,
            "loss_scale": scale,
            "skipped": not updated,
        }
        measured |= {"memory": memory, "bits": bits.tolist(), "sample": text}
        self._file.write(json.dumps(measured) + "\n")
        self._num_left -= 1
        if not self._num_left:
            exchange(None, Group.of())  # nobody leaves while another rank waits for it
            raise SystemExit(0)
        return result

    def _begin(self, chunks: Sequence[Module]) -> None:
        # the launcher may have started this rank on another node
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / f"{Group.of().rank:06}.jsonl").open("a", 1, encoding="utf-8")
        self._params = named_params(chunks)
        sizes = (
            (p.numel(), len(self._sample_of(p)), p.ndim > 1, torch.finfo(p.dtype).eps)
            for p in self._params.values()
        )
        head = [
            asdict(RecordedParam(name, *size))
            for name, size in zip(self._params, sizes, strict=True)
        ]
        self._file.write(json.dumps(head) + "\n")

    def _sample_of(self, param: Tensor) -> Tensor:
        at_most = max(_OF_ONE, _SAMPLED // len(self._params))
        # odd: not one column of a matrix
        return param.detach().flatten()[:: param.numel() // at_most | 1].float()
