"""A training with plain torch in which things go wrong where a test says: `torchrun ...
protected_training.py PLAN`.

PLAN is a JSON file with the fields of `Plan`. Each process writes JSON lines into the plan's
folder: what it took up from, the loss of each step on rank 0, and in the end a checksum of params
and optimizer state.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_distopt import distribute
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_MEMORY = Path("/dev/shm")
BEGIN_STEP, START, RESUMED = "__main__:begin_step", "__main__:start", "__main__:resumed_at"
UPDATE = "megatron_distopt.optimizer.step:advance"


@dataclass(frozen=True)
class Fault:
    """What happens to one rank at one call of a function."""

    do: str  # a method of `Faults`
    at: str = BEGIN_STEP  # module:function
    number: int = 0  # of the call in this process; of `begin_step` the step
    rank: int = 0
    after: bool = False  # when the function has returned, not before
    argument: str = ""


@dataclass(frozen=True)
class Plan:
    """One training; every attempt but the last ends with a fault that kills."""

    folder: str
    steps: int
    options: dict[str, Any] = field(default_factory=dict)  # of `distribute`
    attempts: list[list[Fault]] = field(default_factory=list)
    save_at: list[int] = field(default_factory=list)  # steps, into `folder`/disk/STEP
    load: str = ""  # such a folder
    hidden: int = 256
    rows: int = 24  # over all ranks
    dtype: str = "bfloat16"
    pause: float = 0.0  # seconds a step
    # for a snapshot to be written before the next one begins, on a machine that is busy
    waits: bool = True
    loads_first: bool = False  # before it looks into memory
    exits_on_sigterm: bool = False
    releases: bool = True  # the optimizer, at its end

    def write(self, file: Path) -> Path:
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        for fault in (
            fault for attempt in self.attempts for fault in attempt if "__main__" not in fault.at
        ):
            getattr(*located(fault.at))  # or every start of the run would fail
        file.write_text(json.dumps(self, default=vars))
        return file

    @classmethod
    def read(cls, file: str) -> Plan:
        given = json.loads(Path(file).read_text())
        given["attempts"] = [[Fault(**fault) for fault in attempt] for attempt in given["attempts"]]
        return cls(**given)


def begin_step(step: int) -> None:
    """Is called first in a step, for faults."""


def start() -> None:
    """Is called before ranks meet."""


def resumed_at(step: int) -> None:
    """Is called when a run has its state."""


def located(at: str) -> tuple[Any, str]:
    """The module or class that has a function, and its name there."""
    name, _, path = at.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = sys.modules[name] if name == "__main__" else importlib.import_module(name)
    for each in owners:
        owner = getattr(owner, each)
    return owner, attribute


class Faults:
    """Those of one rank in this attempt: functions are replaced by ones that count their calls."""

    def __init__(self, plan: Plan, optimizer: ShardedOptimizer | None = None) -> None:
        self.ended = Path(plan.folder) / "ended"
        self.ended.mkdir(exist_ok=True)
        self.attempt = len(list(self.ended.iterdir()))
        self.optimizer = optimizer
        rank = int(os.environ["RANK"])
        for fault in plan.attempts[self.attempt] if self.attempt < len(plan.attempts) else []:
            if fault.rank == rank:
                self._replace(fault)

    def _replace(self, fault: Fault) -> None:
        owner, attribute = located(fault.at)
        call, calls = getattr(owner, attribute), 0

        def counted(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            number = given[0] if fault.at == BEGIN_STEP else calls
            if number == fault.number and not fault.after:
                getattr(self, fault.do)(fault.argument)
            result = call(*given, **named)
            if number == fault.number and fault.after:
                getattr(self, fault.do)(fault.argument)
            return result

        setattr(owner, attribute, counted)

    def kill(self, argument: str) -> None:
        """Ends this process as `kill -9` does; where a step is given, when this node has all files
        of its snapshot."""
        parts = f"megatron_distopt-*/0/{int(argument or 0):010}-*/*.part"
        deadline = time.monotonic() + 15
        while (
            argument
            and len(list(_MEMORY.glob(parts))) < dist.get_world_size()
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        (self.ended / str(self.attempt)).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, argument: str) -> None:
        """Stands still until the node is killed; once in a run."""
        if not os.path.exists(argument):
            Path(argument).touch()
            time.sleep(600)

    def flip(self, argument: str) -> None:
        """Changes a bit in the middle of each file of this node that matches."""
        for file in self._found(argument):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)

    def cut(self, argument: str) -> None:
        for file in self._found(argument):
            os.truncate(file, file.stat().st_size - 100)

    @staticmethod
    def _found(pattern: str) -> list[Path]:
        found = sorted(_MEMORY.glob(pattern))
        assert found, f"nothing matches {pattern}: {sorted(map(str, _MEMORY.rglob('*')))}"
        return found

    def fill(self, argument: str) -> None:
        """Leaves 128 KiB in the memory of this node, where torchrun has its semaphores, too."""
        filler = _MEMORY / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        os.truncate(filler, filler.stat().st_size - (128 << 10))

    def free(self, argument: str) -> None:
        (_MEMORY / "filler").unlink()

    @torch.no_grad()
    def spoil(self, argument: str) -> None:
        """Sets one element of a moment."""
        assert self.optimizer is not None, "there is no state yet"
        moments_of(self.optimizer)[0][7] = float(argument)


class Log:
    """JSON lines of this process."""

    def __init__(self, plan: Plan, attempt: int) -> None:
        name = f"{attempt:03}-{os.environ['RANK']}-{time.time_ns()}.jsonl"
        self._file = (Path(plan.folder) / name).open("a", buffering=1)
        self._attempt = attempt

    def __call__(self, **line: Any) -> None:
        about = {
            "attempt": self._attempt,
            "rank": dist.get_rank(),
            "ranks": dist.get_world_size(),
            "time": time.time(),
        }
        self._file.write(json.dumps(line | about) + "\n")


def rows_of(step: int, plan: Plan) -> Tensor:
    """The rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(plan.rows, 64, generator=generator)[dist.get_rank() :: dist.get_world_size()]


def moments_of(optimizer: ShardedOptimizer) -> list[Tensor]:
    state = [optimizer.inner.state[flat.main] for flat in optimizer.flat_params]
    return [each[name] for each in state for name in ("exp_avg", "exp_avg_sq")]


def checksum(model: nn.Module, optimizer: ShardedOptimizer) -> str:
    """Of the model's params, and of the main params and moments that this rank owns."""
    digest = hashlib.sha256()
    for tensor in (
        *model.parameters(),
        *(flat.main for flat in optimizer.flat_params),
        *moments_of(optimizer),
    ):
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def wait_for_snapshot() -> None:
    while any(
        thread.name.startswith("megatron_distopt snapshot") for thread in threading.enumerate()
    ):
        time.sleep(0.005)


def main(plan: Plan) -> None:
    faults = Faults(plan)
    start()
    if plan.exits_on_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    dist.init_process_group("gloo")
    log, rank, size = Log(plan, faults.attempt), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hidden, dtype = plan.hidden, getattr(torch, plan.dtype)
    layers = [
        nn.Linear(64, hidden),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(hidden, hidden),
        nn.GELU(),
    ]
    model = nn.Sequential(*layers, nn.Linear(hidden, 64)).to(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = distribute(model, adamw, **plan.options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    faults.optimizer = optimizer.sharded
    torch.manual_seed(rank)

    def state() -> dict[str, Any]:
        return {"scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}

    before = time.monotonic()
    if plan.loads_first:
        optimizer.load(plan.load)
    resumed = optimizer.resume() if "protect_every" in plan.options else None
    step = 0
    if resumed is not None:
        step, found = resumed.step, resumed.state
    elif plan.load:
        optimizer.load(plan.load)
        # as from memory at another size
        files = [Path(plan.load) / f"state-{each}.pt" for each in (rank, 0)]
        found = torch.load(
            files[0] if len(list(files[0].parent.glob("state-*"))) == size else files[1]
        )
        step = found["step"]
    if step:
        scheduler.load_state_dict(found["scheduler"])
        torch.set_rng_state(found["random"])
    source = "memory" if resumed is not None else "disk" if step else "nothing"
    log(begins_at=step, source=source, pid=os.getpid(), reading=time.monotonic() - before)
    resumed_at(step)
    while step < plan.steps:
        begin_step(step)
        time.sleep(plan.pause)
        rows = rows_of(step, plan)
        optimizer.zero_grad()
        loss = (model(rows.to(dtype)).float() - rows.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        total = loss.detach() * len(rows) / plan.rows
        dist.all_reduce(total)
        if rank == 0:
            log(step=step, loss=total.item(), lr=scheduler.get_last_lr()[0])
        if "protect_every" in plan.options:
            if plan.waits:
                wait_for_snapshot()
            optimizer.protect(step, state=state)
        if step in plan.save_at:
            folder = Path(plan.folder) / "disk" / str(step)
            optimizer.save(folder)
            torch.save({**state(), "step": step}, folder / f"state-{rank}.pt")
    log(ended=step, checksum=checksum(model, optimizer.sharded))
    if plan.releases:
        optimizer.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    main(Plan.read(sys.argv[1]))
