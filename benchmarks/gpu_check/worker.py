"""One rank: carries out checks one after the other and leaves a line for each.

    python -m gpu_check.worker ORDER RANK     ORDER is a file, see `Order`

[Note: one rank fails] After every check all ranks write into torch's store how it went, and rank 0 reads it. A result
that is wrong, or a reason to skip, is the same on all ranks, so they go on. After any other error, or where a rank does
not come, the processes end: others may be waiting in a collective, and the device may be in no state to go on. The
parent then starts new ones for the checks that are left.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_check.checks import Check, Found, Outcome, Place, SkipError, Status, WrongError
from gpu_check.device import CPU, import_backend, use

__all__ = ["FAILED", "NO_TIME", "Order", "lines_of"]

#: Status with which a rank leaves after a failure that others cannot go on from.
FAILED = 3
#: Why a check was skipped.
NO_TIME = "no time was left; more with --minutes"
#: How long ranks that are done wait for the others.
_PATIENCE = timedelta(seconds=8)
_TIME_LIMIT = timedelta(minutes=3)
_GOES_ON = (WrongError, SkipError)


@dataclass(frozen=True)
class Order:
    """What the ranks of one start are to do.

    Args:
        checks: names, in this order.
        size: ranks.
        device: type.
        backend: of torch.distributed; "fake" for ranks that do not communicate.
        folder: for files of the checks, and for the lines of each rank.
        deadline: by `time.time()`; no check begins after it.
        seconds: for the measurements of a check.
        memory_nbytes: see `Place`.
        without: by check, the contestants that are left out.
        defined_in: MODULE:NAME of the checks to choose from.
    """

    checks: tuple[str, ...]
    size: int
    device: str
    backend: str
    folder: str
    deadline: float
    seconds: float
    memory_nbytes: int
    without: dict[str, list[str]]
    defined_in: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Order:
        found = json.loads(path.read_text())
        return cls(**{**found, "checks": tuple(found["checks"])})


def lines_of(folder: Path, rank: int) -> Path:
    """The file with what a rank began and finished, a JSON object a line."""
    return folder / f"rank{rank}.jsonl"


class _Rank:
    """This process.

    Args:
        order: for all ranks.
        rank: of this one.
        checks: all that there are, by name.
    """

    def __init__(self, order: Order, rank: int, checks: dict[str, Check]) -> None:
        self._order, self._rank, self._checks = order, rank, checks
        self._lines = lines_of(Path(order.folder), rank).open("a")
        self._store: Any = dist.FileStore(str(Path(order.folder) / "store"), order.size)
        self._device = torch.device(order.device, None if order.device == CPU else rank)

    def meet(self) -> None:
        """Collective: makes the process group, as a training script does."""
        order = self._order
        use(self._device)
        if order.device == CPU:
            torch.set_num_threads(1)
        if order.backend == "fake":
            importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
            importlib.import_module("peers.overlap_mute").mute()
        store = dist.PrefixStore("group", self._store)
        dist.init_process_group(order.backend, store=store, rank=self._rank, world_size=order.size, timeout=_TIME_LIMIT)

    def work(self) -> None:
        """Collective: every check."""
        for number, name in enumerate(self._order.checks):
            check = self._checks[name]
            if not self._has_time(number):
                self._tell(outcome=_skipped(check, self._order.size, NO_TIME).as_json())
                continue
            self._tell(begin=name)
            outcome = self._carry_out(check)
            self._finish(number, outcome)

    def _has_time(self, number: int) -> bool:
        """What rank 0 says by its clock."""
        key = f"go{number}"
        if self._rank == 0:
            self._store.set(key, str(int(time.time() < self._order.deadline)))
        return bool(int(self._store.get(key)))

    def _carry_out(self, check: Check) -> Outcome:
        place = Place(
            self._device,
            self._rank,
            self._order.size,
            Path(self._order.folder) / check.name,
            self._order.seconds,
            self._order.memory_nbytes,
            tuple(self._order.without.get(check.name, ())),
            lambda text: self._tell(at=text),
        )
        begin = time.monotonic()
        status, found = self._result_of(check, place)
        seconds = time.monotonic() - begin
        size = self._order.size
        return Outcome(check.subject, check.name, check.title, size, status, seconds, found.detail, dict(found.figures))

    def _result_of(self, check: Check, place: Place) -> tuple[Status, Found]:
        """Runs it; an error that is neither wrong nor skipped ends this process, see [Note: one rank fails]."""
        place.folder.mkdir(parents=True, exist_ok=True)
        try:
            return Status.PASSES, check.function(place)
        except SkipError as error:
            return Status.SKIPPED, Found(str(error))
        except WrongError as error:
            traceback.print_exc()
            return Status.FAILS, Found(str(error)[:400])
        except Exception as error:  # noqa: BLE001 - whatever it is, the report has it
            traceback.print_exc()
            said = (str(error).strip().splitlines() or [""])[0]
            outcome = Outcome(check.subject, check.name, check.title, place.size, Status.FAILS)
            self._tell(fatal={**outcome.as_json(), "detail": f"{type(error).__name__}: {said}"[:400]})
            _leave(FAILED)

    def _finish(self, number: int, outcome: Outcome) -> None:
        """Collective: the worst result of all ranks is that of the check."""
        key = f"end{number}/"
        self._store.set(f"{key}{self._rank}", json.dumps(outcome.as_json()))
        try:
            self._store.wait([f"{key}{rank}" for rank in range(self._order.size)], _PATIENCE)
        except RuntimeError:
            late = f"the other ranks did not finish within {_PATIENCE.seconds} s: {outcome.detail}"
            self._tell(fatal={**outcome.as_json(), "status": Status.FAILS.value, "detail": late})
            _leave(FAILED)
        found = [Outcome.from_json(json.loads(self._store.get(f"{key}{r}"))) for r in range(self._order.size)]
        self._tell(outcome=_worst(found).as_json())

    def _tell(self, **line: Any) -> None:
        self._lines.write(json.dumps({"time": time.time(), **line}) + "\n")
        self._lines.flush()


def _worst(found: list[Outcome]) -> Outcome:
    """The first that fails, else the first that was skipped, else that of rank 0."""
    for status in (Status.FAILS, Status.SKIPPED):
        for outcome in found:
            if outcome.status is status:
                return outcome
    return found[0]


def _skipped(check: Check, size: int, why: str) -> Outcome:
    return Outcome(check.subject, check.name, check.title, size, Status.SKIPPED, detail=why)


def _leave(status: int) -> Any:
    """At once: a process group that waits for somebody would not let the interpreter end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    order, rank = Order.read(Path(sys.argv[1])), int(sys.argv[2])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the parent asks for stacks before it ends a rank that hangs
    import_backend()
    module, _, name = order.defined_in.partition(":")
    checks: tuple[Check, ...] = getattr(importlib.import_module(module), name)
    worker = _Rank(order, rank, {check.name: check for check in checks})
    worker.meet()
    worker.work()
    _leave(0)


if __name__ == "__main__":
    main()
