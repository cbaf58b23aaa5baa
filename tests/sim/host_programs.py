"""Trainings of the small fork of 2023 and of megatron-core, on the CPU and on the simulated
accelerator."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_distopt.comm import Group, all_gather_objects
from megatron_distopt.optimizer.low_precision.low_precision_tensor import memory_of
from tests.support.cases import Case
from tests.support.exact_core import variables
from tests.support.mini_fork import MiniFork
from tests.support.sim.machine import Event, Stream

_FORK = (
    "--use-distributed-optimizer --distopt-adam torch_fused --lr 0.01 --train-iters 3 "
    "--distopt-bucket-size 700"
)
_BOTH = "--distopt-overlap-grad-reduce yes --distopt-overlap-param-gather"
_REMAINDER = "--distopt-offload-fraction 0.5 --distopt-main-params-dtype remainder"
_CORE = Case("distopt", steps=3, precision="bf16", clip_grad=0.0)
_OVERLAP = _CORE.of(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=4000)

#: megatron-core's own flags for state on the host. Its arguments ask for the first where the second
#: is given.
_FLAGS = {
    "use_precision_aware_optimizer": True,
    "optimizer_cpu_offload": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
_BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def _flags(fraction: float, **more: Any) -> tuple[tuple[str, Any], ...]:
    own = {
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8": True,
        "optimizer_offload_fraction": fraction,
    }
    return tuple({**_FLAGS, **own, **more}.items())


#: On two ranks: flags of the fork, and cases of megatron-core. Nothing is clipped, because the norm
#: is added up in float64 on a device and in pieces of fp32 on the CPU.
FORK = {
    "bf16": f"{_FORK} --clip-grad 0 --bf16",
    "bf16 overlap, fp32 norms": f"{_FORK} --clip-grad 0 --bf16 --fp32-norms {_BOTH}",
    "fp16 that overflows": f"{_FORK} --clip-grad 0 --fp16 --initial-loss-scale 1e30 {_BOTH}",
    "tp2": f"{_FORK} --clip-grad 0 --bf16 --tensor-model-parallel-size 2 {_BOTH}",
    "pp2": f"{_FORK} --clip-grad 0 --bf16 --pipeline-model-parallel-size 2 --global-batch-size 12 "
    f"{_BOTH}",
    "host half": f"{_FORK} --clip-grad 0 --bf16 --fp32-norms "
    f"--distopt-offload-fraction 0.5 {_BOTH}",
    "host all, fp16": f"{_FORK} --clip-grad 0 --fp16 --initial-loss-scale 4096 --cpu-optimizer "
    "--cpu-torch-adam",
    "host half, remainders": f"{_FORK.replace('torch_fused', 'auto')} --clip-grad 0 --bf16 "
    f"{_REMAINDER} {_BOTH}",
    "reduced in bf16": f"{_FORK} --clip-grad 0 --bf16 --distopt-reduce-dtype bfloat16 {_BOTH}",
}
CORE = {
    "bf16": _CORE.of(dp=2),
    "bf16 overlap": _OVERLAP.of(dp=2),
    "fp16 overlap": _OVERLAP.of(dp=2, precision="fp16"),
    "average in the collective": _OVERLAP.of(dp=2, average_in_collective=True),
    "host half": _OVERLAP.of(dp=2),
    "host half, remainders": _OVERLAP.of(dp=2),
    "moved away and back": _OVERLAP.of(dp=2),
    "moved away and back in low precision": _OVERLAP.of(dp=2),
    "tp2": _OVERLAP.of(tp=2),
    "pp2": _OVERLAP.of(pp=2, tied=False),
    "its flags, half on the host": _OVERLAP.of(dp=2, num_microbatches=1, fields=_flags(0.5)),
    # What is on the host is in fp32, whichever dtype is asked for.
    "its flags, all on the host": _OVERLAP.of(
        dp=2, num_microbatches=1, fields=_flags(1.0, **_BF16_MOMENTS)
    ),
}
#: Variables of some of megatron-core's.
_HALF = {"OFFLOAD_FRACTION": "0.5"}
VARIABLES = {
    "host half": _HALF,
    "host half, remainders": {**_HALF, "MAIN_PARAMS_DTYPE": "remainder"},
    "moved away and back": {**_HALF, "MAIN_PARAMS_DTYPE": "remainder"},
    "moved away and back in low precision": {
        "MAIN_PARAMS_DTYPE": "remainder",
        "EXP_AVG_DTYPE": "int8",
        "EXP_AVG_SQ_DTYPE": "int8",
    },
}


@dataclass(frozen=True)
class Trained:
    """What a training leaves: losses, norms of the gradient, and this rank's params."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]

    def differs_from(self, other: Trained) -> str | None:
        """What is not as it has to be: losses and params to the bit, norms as far as fp32 pieces
        hold."""
        wrong = [
            name
            for name, param in self.params.items()
            if not torch.equal(param, other.params[name])
        ]
        if wrong or self.losses != other.losses:
            return f"losses {self.losses} where the CPU has {other.losses}; params {wrong}"
        # `_sum_of_squares` on the CPU: 2e-8 of the sum for 2**16 elements that are added up in
        # fp32.
        pairs = zip(self.norms, other.norms, strict=True)
        return (
            None
            if all(abs(a - b) <= 1e-6 * b for a, b in pairs)
            else f"norms {self.norms}, {other.norms}"
        )


def train_fork(name: str, device: str) -> Trained:
    """Collective."""
    fork = MiniFork.imported()
    for module in [
        each for key, each in sys.modules.items() if key.split(".")[0] in ("megatron", "pretrain")
    ]:
        if hasattr(module, "DEVICE"):
            module.DEVICE = device  # type: ignore[attr-defined]
    run = fork.train(*FORK[name].split())
    norms = [float(each.grad_norm) for each in run.iterations if each.grad_norm is not None]
    return Trained(run.losses, norms, {key: param.cpu() for key, param in run.params.items()})


def prepare_core(device: str) -> None:
    """Makes a device the one where megatron-core's models and batches are."""
    import megatron_on_cpu
    from megatron.core import parallel_state

    from tests.support import gpt

    os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
    gpt.DEVICE = megatron_on_cpu._CPU = torch.device(device)
    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        parallel_state._GLOBAL_MEMORY_BUFFER.buffer.clear()


def train_core(name: str, device: str) -> Trained:
    """Collective."""
    from tests.support import gpt

    prepare_core(device)
    with streams_of(device), variables(VARIABLES.get(name, {})):
        case = CORE[name] if device != "cpu" else CORE[name].of(fields=())
        with contextlib.closing(gpt.Training(case)) as training:
            steps = []
            for _ in range(case.steps):
                steps.append(training.step())
                if name.startswith("moved away"):
                    by_data, saves = name.endswith("precision") and len(steps) == 1, len(steps) == 1
                    _move(training.optimizer, device, by_data=by_data, saves=saves)
            if case.fields:
                _check_places(training.optimizer, dict(case.fields)["optimizer_offload_fraction"])
            params = {key: param.cpu() for key, param in training.params().items()}
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    assert {*map(type, norms)} <= {float}, "as the host's"
    return Trained([float(step.loss) for step in steps], norms, params)


def _move(optimizer: Any, device: str, *, by_data: bool, saves: bool) -> None:
    """Away and back, with a save in between; `by_data` as verl does it."""
    moves: list[Callable[[], object]] = [optimizer.offload_to_cpu, optimizer.restore_from_cpu]
    if by_data:
        moves = [
            partial(_move_by_data, optimizer, "cpu"),
            partial(_move_by_data, optimizer, device),
        ]
    moves[0]()
    for part in optimizer.chained_optimizers:
        kept = [
            each
            for main, state in part.optimizer.state.items()
            for each in (main, *state.values())
            if each.dim()
        ]
        seconds = [
            main.stored.second.device for main in part.optimizer.state if hasattr(main, "stored")
        ]
        assert {each.device for tensor in kept for each in memory_of(tensor)} | {*seconds} == {
            torch.device("cpu")
        }
    with tempfile.TemporaryDirectory() as own:
        if saves:
            optimizer.save(all_gather_objects(own, Group.of())[0])
            all_gather_objects(None, Group.of())  # the first rank may remove it
    moves[1]()


def _move_by_data(optimizer: Any, device: str) -> None:
    for part in optimizer.chained_optimizers:
        for main in (main for group in part.shard_fp32_from_float16_groups for main in group):
            main.data = main.data.to(device)
        for state in part.optimizer.state.values():
            state.update({name: state[name].to(device) for name in ("exp_avg", "exp_avg_sq")})


def _check_places(optimizer: Any, fraction: float) -> None:
    """The fraction that was asked for is on the host, in fp32: whole buckets, until it is
    reached."""
    states = [
        state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()
    ]
    moments = [memory_of(state["exp_avg"])[0] for state in states]
    on_host = sum(each.numel() for each in moments if each.device.type == "cpu")
    share = on_host / sum(each.numel() for each in moments)
    assert fraction <= share + 0.1 and (share < 0.8 or fraction == 1.0), share
    assert {each.dtype for each in moments if each.device.type == "cpu"} == {torch.float32}


def streams_of(device: str) -> contextlib.AbstractContextManager[object]:
    """megatron-core's streams are those of the device, not the stand-ins of a CPU."""
    if device == "cpu":
        return contextlib.nullcontext()
    own = {
        name: getattr(torch.sim, name)
        for name in ("current_stream", "default_stream", "stream", "synchronize")
    }
    return mock.patch.multiple(torch.cuda, Stream=Stream, Event=Event, **own)


def train(host: str, name: str, device: str) -> Trained:
    """Collective."""
    os.environ["MEGATRON_DISTOPT_ACCELERATOR"] = "torch"
    return train_fork(name, device) if host == "fork" else train_core(name, device)
