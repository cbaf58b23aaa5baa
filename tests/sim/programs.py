"""Training programs that run on the CPU and on the simulated accelerator alike, and what they
leave.

Gradients are those of tests/support/models.py, whose sums are exact, so that both leave the same
bits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_distopt import TorchDistributedOptimizer, distribute
from megatron_distopt.checkpoint.protect.snapshots import held
from megatron_distopt.checkpoint.tensor_file import TensorReader
from megatron_distopt.comm import Group, group_nodes, shared_memory
from megatron_distopt.device import on_stream
from megatron_distopt.errors import DistOptError
from tests.support.models import Params, exact_grads

MICROBATCHES = 2
#: More operations than a step has.
_MANY = 1000
#: Of `distribute`, for all programs of this process.
options: dict[str, Any] = {"accelerator": "torch"}


@dataclass(frozen=True)
class Program:
    """What a user's script does."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of `distribute`
    dtype: torch.dtype = torch.float32  # of the params
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of some of them
    steps: int = 4  # how many
    bad: int | None = None  # the step in which a gradient is not finite
    variant: str = "plain"  # what is done beside plain training
    muon: bool = False  # whether Muon updates the params of two dimensions
    has_nodes: bool = False  # whether the ranks are on two nodes


BF16, FP16 = torch.bfloat16, torch.float16
#: Several buckets, so that collectives of some run while others are computed.
_OVERLAP: Mapping[str, Any] = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 128,
}
#: State in other forms than fp32.
_REMAINDER = {"main_params_dtype": "remainder"}
_LOW = {"main_params_dtype": "remainder", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
_RANDOM = {
    "main_params_dtype": "bfloat16",
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
_MIXED = {"wide.bias": torch.float32, "norm.weight": torch.float32}

PROGRAMS: dict[str, Program] = {
    "fp32 overlap": Program({"clip_grad": 1.0, "count_zeros": True, **_OVERLAP}),
    "bf16 overlap": Program({"clip_grad": 1.0, **_OVERLAP}, BF16),
    "mixed overlap": Program({"clip_grad": 0.5, **_OVERLAP}, BF16, _MIXED),
    "bf16 overlap, two streams": Program({**_OVERLAP}, BF16, variant="two streams"),
    "a module without torch functions": Program(_OVERLAP, BF16, variant="direct"),
    "reduced in bf16, overlap": Program({"reduce_dtype": "bfloat16", **_OVERLAP}, BF16),
    "reduced in bf16, forward on a stream": Program(
        {"reduce_dtype": "bfloat16", **_OVERLAP}, BF16, variant="forward stream"
    ),
    # --- two nodes, of one or two ranks
    "bf16 between nodes, forward on a stream": Program(
        {"reduce_dtype": "bfloat16", **_OVERLAP}, BF16, variant="forward stream", has_nodes=True
    ),
    "bf16 between nodes, fp16 dynamic": Program(
        {
            "reduce_dtype": "bfloat16",
            "loss_scale": "dynamic",
            "initial_loss_scale": 2.0**8,
            **_OVERLAP,
        },
        FP16,
        bad=2,
        has_nodes=True,
    ),
    "bf16 between nodes, without overlap": Program(
        {"reduce_dtype": "bfloat16", "nonfinite": "skip"}, bad=2, has_nodes=True
    ),
    "float32 between nodes": Program({"reduce_dtype": "float32", **_OVERLAP}, BF16, has_nodes=True),
    "bf16 between nodes": Program({"reduce_dtype": "bfloat16", **_OVERLAP}, BF16, has_nodes=True),
    # --- others
    "fp16 dynamic": Program(
        {"loss_scale": "dynamic", "initial_loss_scale": 2.0**8, **_OVERLAP}, FP16, bad=2
    ),
    "nan raise": Program({"nonfinite": "raise", **_OVERLAP}, bad=2),
    "nan skip": Program({"nonfinite": "skip", "clip_grad": 1.0, **_OVERLAP}, bad=2),
    "clipped by the user": Program(_OVERLAP, BF16, variant="clip_grad_norm_"),
    "whole gradient read": Program(_OVERLAP, BF16, variant="full_grad"),
    "weights changed": Program(_OVERLAP, BF16, variant="weights"),
    "saved in the background": Program(
        {"async_save": True, **_OVERLAP}, BF16, steps=5, variant="save"
    ),
    "protected": Program(
        {"protect_every": 1, "clip_grad": 1.0, **_OVERLAP}, BF16, variant="protect"
    ),
    "state read": Program(_OVERLAP, BF16, variant="state"),
    "params read behind torch": Program(_OVERLAP, BF16, variant="behind"),
    "weights written behind torch": Program(_OVERLAP, BF16, variant="reloaded"),
    "a param begins to train": Program(_OVERLAP, BF16, variant="unfrozen"),
    "a module's buffers": Program(_OVERLAP, variant="buffers"),
    "step on a stream": Program(_OVERLAP, BF16, variant="step stream"),
    # --- matrices that travel
    "muon": Program({"clip_grad": 1.0, "bucket_size": 128}, muon=True),
    "muon, step on a stream": Program(_OVERLAP, BF16, variant="step stream", muon=True),
    # --- state on the host
    "host half": Program(
        {"offload_fraction": 0.5, "clip_grad": 1.0, **_OVERLAP}, BF16, variant="weights"
    ),
    "host all": Program({"offload_fraction": 1.0, "clip_grad": 1.0, **_OVERLAP}, BF16, _MIXED),
    "host half, remainders": Program(
        {"offload_fraction": 0.5, "clip_grad": 1.0, **_REMAINDER, **_OVERLAP}, BF16
    ),
    "host all, low precision": Program({"offload_fraction": 1.0, **_LOW, **_OVERLAP}, BF16),
    "host half, fp16 dynamic": Program(
        {
            "offload_fraction": 0.5,
            "loss_scale": "dynamic",
            "initial_loss_scale": 2.0**8,
            **_OVERLAP,
        },
        FP16,
        bad=2,
    ),
    "host half, nan raise": Program(
        {"offload_fraction": 0.5, "nonfinite": "raise", **_OVERLAP}, BF16, bad=2
    ),
    "host half, saved in the background": Program(
        {"offload_fraction": 0.5, "async_save": True, **_REMAINDER, **_OVERLAP},
        BF16,
        steps=5,
        variant="save",
    ),
    "host half, step on a stream": Program(
        {"offload_fraction": 0.5, "grads_in_fp32": False, "nonfinite": "skip", **_OVERLAP},
        BF16,
        bad=2,
        variant="step stream",
    ),
    "host half, protected": Program(
        {"offload_fraction": 0.5, "protect_every": 1, **_REMAINDER, **_OVERLAP},
        BF16,
        variant="protect",
    ),
    "low precision, nan skip": Program({"nonfinite": "skip", **_OVERLAP, **_LOW}, BF16, bad=2),
    "low precision, bf16 main params": Program({**_OVERLAP, **_RANDOM}, BF16, variant="state"),
}


@dataclass(frozen=True)
class Left:
    """What a program leaves: numbers that it logged, errors, and tensors."""

    logged: list[float]
    errors: list[str]
    tensors: list[Tensor]

    def differs_from(self, other: Left) -> str | None:
        """What is not the same, to the bit."""
        if self.errors != other.errors:
            return f"errors {self.errors} where the CPU has {other.errors}"
        pairs = list(zip(self.tensors, other.tensors, strict=True))
        wrong = [number for number, (one, two) in enumerate(pairs) if not _same_bits(one, two)]
        if wrong:
            return f"tensors {wrong} of {len(pairs)}"
        if list(map(repr, self.logged)) != list(map(repr, other.logged)):
            return f"logged {self.logged} where the CPU has {other.logged}"
        return None


def _same_bits(one: Tensor, two: Tensor) -> bool:
    return one.dtype is two.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)
    )


class _Norm(nn.Module):
    """A buffer on the device, and one on the CPU, that training changes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@contextlib.contextmanager
def _shared_folder() -> Iterator[str]:
    """Collective: a new folder that all ranks see."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


class _Direct(nn.Module):
    """Reads its param as an operator in C++ does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(100, dtype=dtype))

    def forward(self, factor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return (self.weight * factor).sum()


@contextlib.contextmanager
def _two_nodes(device: str) -> Iterator[Any]:
    """Collective: a new group, whose ranks are on two nodes, as torchrun says, or on a CPU by their
    memory."""
    size = dist.get_world_size() // 2
    node, local_rank = divmod(dist.get_rank(), size)
    variables = {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(size),
    }
    handle = dist.new_group()
    with (
        mock.patch.object(shared_memory, "network_namespace", lambda: node),
        mock.patch.dict(os.environ, variables),
    ):
        if device == "cpu":
            group_nodes.nodes_of(Group.of(handle))
        yield handle


class Run:
    """One program on one device."""

    def __init__(self, program: Program, device: str, rank: int) -> None:
        self.program, self.device, self.rank = program, torch.device(device), rank
        self.model = Params(program.dtypes, default=program.dtype).to(device)
        if program.variant == "buffers":
            self.model.norm = _Norm(device)
        if program.variant == "direct":
            self.model.direct = _Direct(program.dtype).to(device)
        given: Any = torch.optim.AdamW(self.model.groups(), lr=2.0**-6)
        if program.muon:
            matrices = [param for param in self.model.parameters() if param.dim() == 2]
            others = [param for param in self.model.parameters() if param.dim() != 2]
            given = [torch.optim.Muon(matrices, lr=2.0**-6), torch.optim.AdamW(others, lr=2.0**-6)]
        if program.variant == "direct":
            given.add_param_group({"params": [self.model.direct.weight], "wd_mult": 1.0})
        self._late = dict(self.model.named())["deep.weight"].requires_grad_(
            program.variant != "unfrozen"
        )
        asked = {**options, **program.options}
        # the host keeps fp32, the device would not
        if device == "cpu" and asked.get("offload_fraction") == 1.0:
            asked = {key: value for key, value in asked.items() if key not in _LOW}
        if program.variant == "protect":
            names = [tempfile.mkdtemp()]
            dist.broadcast_object_list(names)
            asked["protect_folder"] = self._memory = names[0]
        with _two_nodes(device) if program.has_nodes else contextlib.nullcontext() as group:
            self.optimizer: TorchDistributedOptimizer = distribute(
                self.model, given, process_group=group, **asked
            )
        # All of them now: a copy from the host would make it wait in every step.
        numbers = [
            (step, microbatch)
            for step in (*range(program.steps), 7)
            for microbatch in range(MICROBATCHES)
        ]
        self._batches = {each: self._batch(*each) for each in numbers}
        # A param whose `.data` was read may be written to at any time, which a main param as a
        # remainder cannot follow.
        reads_data = program.variant in ("behind", "reloaded")
        self._aliases = [param.data for param in self.model.parameters()] if reads_data else []
        self._is_queued = threading.Event()
        self.losses: list[Tensor] = []
        self.norms: list[Any] = []
        self.errors: list[str] = []
        self.others: list[Tensor] = []

    def _batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
        grads = exact_grads(step, microbatch, self.rank)
        if step == self.program.bad and self.rank == 0:
            grads["scale"][0] = float("inf")
        return {name: grad.to(self.device) for name, grad in grads.items()}

    def train(self) -> Left:
        with _shared_folder() as folder:
            for number in range(self.program.steps):
                try:
                    self._step(number, folder)
                except DistOptError as error:  # one step later where the check is deferred
                    self.errors.append(type(error).__name__)
                    del (
                        self.losses[MICROBATCHES * (self.program.bad or 0) :],
                        self.norms[self.program.bad :],
                    )
                    break
            if self.program.variant == "save":
                self._load(folder)
            if self.program.variant == "protect":
                self._read_snapshot()
                dist.barrier()
                shutil.rmtree(self._memory, ignore_errors=True)
        logged = [float(loss) for loss in self.losses] + [float(norm or 0.0) for norm in self.norms]
        tensors = [param.detach().cpu() for param in self.model.parameters()]
        tensors += [buffer.cpu() for buffer in self.model.buffers()] + [
            each.cpu() for each in self.others
        ]
        self.optimizer.release()
        return Left(logged, self.errors, tensors)

    def _step(self, number: int, folder: str) -> None:
        self._backwards(number)
        getattr(self, "_before_" + self.program.variant.replace(" ", "_"), lambda: None)()
        with self._stream(self.program.variant == "step stream"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert self.optimizer.last_step is not None
        self.norms.append(self.optimizer.last_step.norm_to_log)
        getattr(self, "_after_" + self.program.variant.replace(" ", "_"), lambda *_: None)(
            number, folder
        )

    # --- what is done behind a step

    def _after_save(self, number: int, folder: str) -> None:
        if number == 2:
            self.optimizer.save(folder)

    def _after_protect(self, number: int, folder: str) -> None:
        """Reads the snapshot of the step before, which was copied while this one computed, and
        begins another."""
        protection: Any = self.optimizer.session.protection
        if number == 0:
            self.optimizer.resume()
            send = protection._send
            # The thread that waits for the copy begins late: until then nothing but training itself
            # waits for it.
            protection._send = lambda *arguments: self._is_queued.wait() and send(*arguments)
        else:
            self._read_snapshot()
        # the copy comes long after the next step, if nothing waits
        with on_stream(protection._stream, self.device):
            busy = torch.zeros(1, device=self.device)
            for _ in range(_MANY):
                busy.add_(1)
        self.optimizer.protect(number + 1, lambda: {"step": number})

    def _read_snapshot(self) -> None:
        protection, memory = self.optimizer.session.protection, Path(self._memory) / "0"
        assert protection is not None
        self._is_queued.set()
        protection.finish()
        self._is_queued.clear()
        snapshot = max(held(memory))
        part = snapshot.checked(memory, dist.get_rank())
        with TensorReader(snapshot.file(memory, dist.get_rank())) as reader:
            for key, record in part.tensors.items():
                self.others += [
                    reader.read(key, chunk, getattr(torch, record.dtype)) for chunk in record.chunks
                ]

    def _after_state(self, number: int, folder: str) -> None:
        state = self.optimizer.full_state_dict().get("state", {})
        self.others += [value.clone() for of_param in state.values() for value in of_param.values()]

    @torch.no_grad()
    def _after_behind(self, number: int, folder: str) -> None:
        memory = [torch.Tensor.detach(param) for param in self._aliases]
        self.optimizer.finish_param_gather()
        self.others += [each.clone() for each in memory]

    @torch.no_grad()
    def _after_reloaded(self, number: int, folder: str) -> None:
        if number == 1:
            self.optimizer.finish_param_gather()
            for alias in self._aliases:
                alias.mul_(0.5)
            self.optimizer.reload_model_params()

    def _after_unfrozen(self, number: int, folder: str) -> None:
        self._late.requires_grad_(number > 0)

    # --- what is done in a step

    def _backwards(self, number: int) -> None:
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else self.optimizer.no_sync():
                self._backward(number, microbatch)

    def _backward(self, step: int, microbatch: int) -> None:
        grads = self._batches[step, microbatch]
        with self._stream(self.program.variant == "forward stream"):
            loss = self._forward(grads)
            self.optimizer.scale_loss(loss).backward()
        self.losses.append(loss.detach())
        if self.program.variant == "buffers":
            self.model.norm.seen += self.rank + step
            self.model.norm.count += self.rank + 1

    def _forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        if self.program.variant == "direct":
            return self.model.direct(grads["scale"]) + self.model(grads)
        if self.program.variant != "two streams":
            return self.model(grads)
        if self.device.type == "cpu":
            return self.model(grads) + self.model(grads)
        here, other = torch.accelerator.current_stream(self.device), torch.Stream(self.device)
        other.wait_stream(here)
        with other:
            ahead = self.model(grads)
        behind = self.model(grads)
        here.wait_stream(other)
        ahead.record_stream(here)
        return ahead + behind

    @contextlib.contextmanager
    def _stream(self, is_another: bool) -> Iterator[None]:
        """Another stream, ordered with the current one as a user has to."""
        if not is_another or self.device.type == "cpu":
            yield
            return
        here, other = torch.accelerator.current_stream(self.device), torch.Stream(self.device)
        other.wait_stream(here)
        with other:
            yield
        here.wait_stream(other)

    def _before_clip_grad_norm_(self) -> None:
        self.norms.append(self.optimizer.clip_grad_norm_(0.5))

    def _before_full_grad(self) -> None:
        self.others += [
            self.optimizer.full_grad(param).clone() for param in self.model.parameters()
        ]

    @torch.no_grad()
    def _before_weights(self) -> None:
        for param in self.model.parameters():
            param.mul_(0.5)

    def _load(self, folder: str) -> None:
        """Goes back to the third step, and trains the fourth anew."""
        self.optimizer.finish_saving()
        self.optimizer.load(folder)
        self._step(3, folder)


def train(name: str, device: str, rank: int) -> Left:
    """Collective."""
    return Run(PROGRAMS[name], device, rank).train()
