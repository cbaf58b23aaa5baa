"""Records what a Megatron's training script computes, by step and rank, for `megatron-distopt
compare`.

Each rank writes into a file of its own and communicates nothing, so that the recording does not
change the run. Weights and main params are read before an update, when the forward pass has used
the weights and no gather is in progress. So the effect of an update is seen one step later. Two
optimizers may give an element's main param to different ranks, so each rank writes what it has.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.checkpoint.tensor_file import bits_of
from megatron_distopt.comm import Group, all_gather_objects
from megatron_distopt.device import CPU
from megatron_distopt.errors import HostError, UnknownHostError
from megatron_distopt.hosts.megatron.naming import names_by_param
from megatron_distopt.hosts.megatron_2023.facts import STEP_POINT
from megatron_distopt.hosts.megatron_core.facts import SCRIPT_STEP_POINT
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.patch_points import REMEDY, Undos
from megatron_distopt.plugin.fixes import Fix, apply_fixes, needed_fixes
from megatron_distopt.plugin.fork_source import importable_host

# The folder in which ranks write, the number of steps, and the fraction by which the learning rate
# is increased (0 for none). They are not options: only `compare` sets them.
RECORD_VARIABLE = "_MEGATRON_DISTOPT_RECORD"
ITERATIONS_VARIABLE = "_MEGATRON_DISTOPT_ITERATIONS"
NUDGE_VARIABLE = "_MEGATRON_DISTOPT_NUDGE"
# how many elements a rank records in each step, and how many of each param at least
_SAMPLED, _OF_ONE = 8192, 32


@dataclass(frozen=True)
class RecordedParam:
    """A param on one rank."""

    name: str
    numel: int
    sampled: int  # number of elements whose values are written
    is_matrix: bool
    epsilon: float  # of its dtype: the distance from 1 to the next number
    # the same for the dtype in which its gradient is added up, which optimizers may choose
    grad_epsilon: float = field(compare=False)


def record_training(folder: str | Path, iterations: float = math.inf, nudge: float = 0.0) -> Undos:
    """Wraps the `train_step` of the installed Megatron when it is imported.

    Args:
        folder: where the files are written.
        iterations: the number of steps after which all ranks exit with status 0.
        nudge: the fraction by which the learning rate is increased in each update.

    Raises:
        UnknownHostError: if no Megatron can be imported.
    """
    why, after = (
        ("each step is recorded", "megatron-distopt compare reads it"),
        functools.partial(_wrap, Path(folder), iterations, nudge),
    )
    points = SCRIPT_STEP_POINT, STEP_POINT
    fixes = [Fix(point.module, rf"^def {point.attribute}\b", *why, after=after) for point in points]
    needed = needed_fixes(importable_host(sys.path), fixes)
    if not needed:
        raise UnknownHostError(f"There is no {' or '.join(map(str, points))} to record. {REMEDY}.")
    undos = Undos()
    apply_fixes(needed, undos)
    return undos


def _wrap(folder: Path, iterations: float, nudge: float, module: ModuleType, undos: Undos) -> None:
    original = vars(module)["train_step"]
    recorder = _StepRecorder(folder, iterations, nudge, original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        return recorder.step(*args, **kwargs)

    undos.replace(module, "train_step", train_step)


class _StepRecorder:
    """Writes the file of this rank."""

    def __init__(
        self, folder: Path, iterations: float, nudge: float, train_step: Callable[..., Any]
    ) -> None:
        self._folder, self._train_step = folder, train_step
        self._num_left, self._nudge = iterations, nudge
        self._params = dict[str, Parameter]()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step of the script, and writes what it computed."""
        # other code that wraps `train_step` may give it any signature
        given = [*args, *kwargs.values()]
        optimizer = next((each for each in given if hasattr(each, "get_loss_scale")), None)
        lists = (each for each in given if isinstance(each, (list, tuple)))
        chunks = next((each for each in lists if each and isinstance(each[0], Module)), None)
        if optimizer is None or chunks is None:
            raise HostError(
                f"train_step was called with {', '.join(type(each).__name__ for each in given)}, "
                "but a recording needs a list of model chunks and an optimizer of Megatron's. Give "
                "these to train_step as Megatron does."
            )
        if not self._params:
            self._begin(chunks)
        started, update = time.perf_counter(), optimizer.step
        kept = {"step": update} if "step" in vars(optimizer) else {}
        seen = dict[str, Any]()

        def step(*args: Any, **kwargs: Any) -> Any:
            # This is queued on the device; the CPU waits for the results after the step.
            params = [*self._params.values()]
            # the sum of the bits of all elements, each read as an integer
            bits = torch.stack([bits_of(param.detach()).sum(dtype=torch.int64) for param in params])
            sample = torch.cat([self._sample_of(param).float() for param in params])
            mains = torch.cat(self._sample_of_mains(optimizer))
            seen.update(bits=bits, sample=sample, mains=mains)
            with _nudged(optimizer, self._nudge):
                seen["result"] = update(*args, **kwargs)
            return seen["result"]

        optimizer.step = step
        try:
            result = self._train_step(*args, **kwargs)
        finally:
            del optimizer.step
            vars(optimizer).update(kept)
        if not seen:  # some scripts end in the middle of a step
            return result
        updated, norm, *_ = seen["result"]
        measured = {
            "started": started,
            "loss": _loss_of(result[0]),
            "norm": math.nan if norm is None else float(norm),
            "loss_scale": float(optimizer.get_loss_scale()),
            "skipped": not updated,
            "memory": _peak_nbytes(seen["sample"].device),
            "bits": seen["bits"].tolist(),
            "sample": _as_text(seen["sample"]),
            "mains": _as_text(seen["mains"]),
        }
        self._file.write(json.dumps(measured) + "\n")
        self._num_left -= 1
        if not self._num_left:
            all_gather_objects(None, Group.of())  # no rank exits while another still waits for it
            raise SystemExit(0)
        return result

    def _begin(self, chunks: Sequence[Module]) -> None:
        # the launcher may have started this rank on another node
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / f"{Group.of().rank:06}.jsonl").open("a", 1, encoding="utf-8")
        self._names = names_by_param(chunks)
        self._params = {name: param for param, name in self._names.items()}
        head = [asdict(self._recorded(name)) for name in self._params]
        self._file.write(json.dumps(head) + "\n")

    def _recorded(self, name: str) -> RecordedParam:
        param = self._params[name]
        grad = getattr(param, "main_grad", None)
        return RecordedParam(
            name=name,
            numel=param.numel(),
            sampled=len(self._sample_of(param)),
            is_matrix=param.ndim > 1,
            epsilon=torch.finfo(param.dtype).eps,
            grad_epsilon=torch.finfo(param.dtype if grad is None else grad.dtype).eps,
        )

    def _sample_of(self, param: Tensor) -> Tensor:
        return param.detach().flatten()[:: self._stride(param.numel())]

    def _stride(self, numel: int) -> int:
        at_most = max(_OF_ONE, _SAMPLED // len(self._params))
        return numel // at_most | 1  # odd, so that it does not pick a single column of a matrix

    def _sample_of_mains(self, optimizer: Any) -> list[Tensor]:
        """The main params of the sampled elements, by param; nan if this rank does not have one."""
        samples = {
            name: torch.full_like(self._sample_of(param), math.nan, dtype=torch.float32)
            for name, param in self._params.items()
        }
        for name, start, main in _main_params(optimizer, self._names):
            stride = self._stride(self._params[name].numel())
            first = -(-start // stride)
            part = main.detach().flatten()[first * stride - start :: stride]
            samples[name][first : first + len(part)] = part
        return [*samples.values()]


@contextmanager
def _nudged(optimizer: Any, nudge: float) -> Iterator[None]:
    """Within it the learning rates of all groups are increased by the fraction `nudge`."""
    groups = optimizer.param_groups if nudge else []
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * (1 + nudge)
    yield
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _main_params(
    optimizer: Any, names: Mapping[Parameter, str]
) -> Iterator[tuple[str, int, Tensor]]:
    """The main params of 16-bit params on this rank: the param's name, the first element, and the
    values."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        sharded = getattr(each, "sharded", None)
        if isinstance(sharded, ShardedOptimizer):
            yield from _our_main_params(sharded)
        else:
            yield from _hosts_main_params(each, names)


def _our_main_params(sharded: ShardedOptimizer) -> Iterator[tuple[str, int, Tensor]]:
    for flat in sharded.flat_params:
        if not flat.owns_memory:
            continue
        main = as_plain(flat.main)
        for shard in flat.plan.shards:
            yield shard.name, shard.in_param.start, flat.cut(main, shard)


def _hosts_main_params(
    optimizer: Any, names: Mapping[Parameter, str]
) -> Iterator[tuple[str, int, Tensor]]:
    """The same for a Megatron's own optimizer, from attributes that all of them have."""
    held = vars(optimizer)
    if "shard_fp32_from_float16_groups" in held:
        params, mains = held["model_float16_groups"], held["shard_fp32_from_float16_groups"]
        find = getattr(optimizer, "get_model_param_range_map", None)
        find = find or optimizer._get_model_param_range_map
    else:
        params = held.get("float16_groups", ())
        mains = held.get("fp32_from_float16_groups", ())
        find = None
    for param, main in zip(chain(*params), chain(*mains), strict=True):
        if main is not None:  # the inner optimizer keeps the others
            yield names[param], find(param)["param"].start if find else 0, main


def _loss_of(losses: Mapping[str, Any]) -> float:
    """The first loss that a step has logged. Some Megatrons log a sum and a number of tokens."""
    loss, *counts = torch.as_tensor([*losses.values(), math.nan][0]).flatten().tolist()
    return float(loss / counts[0] if counts else loss)


def _peak_nbytes(device: torch.device) -> int:
    if device.type == CPU:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return int(getattr(torch, device.type).max_memory_allocated(device))


def _as_text(sample: Tensor) -> str:
    return base64.b64encode(sample.cpu().numpy().tobytes()).decode()
