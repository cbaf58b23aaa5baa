"""Starts ranks, watches them, and starts others where some crash or hang: no check can end the report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check import ROOT
from gpu_check.checks import Check, Outcome, Status
from gpu_check.device import CPU
from gpu_check.machine import Machine
from gpu_check.registry import Batch
from gpu_check.worker import FAILED, NO_TIME, Order, lines_of

__all__ = ["Events", "Runner"]

#: Importing torch, starting the device and meeting the others.
_START_SECONDS = 150.0
_POLL_SECONDS = 0.05
#: Between the end of one rank and that of the others, which may still write why.
_FOLLOW_SECONDS = 3.0
#: Contestants that may crash in one check before it is given up.
_MOST_CRASHES = 3


@dataclass(frozen=True)
class Events:
    """Who is told what happens.

    Args:
        begins: a check begins, with that many ranks.
        doing: what it does now.
        ends: it ended.
    """

    begins: Callable[[Check, int], None] = lambda check, ranks: None
    doing: Callable[[str], None] = lambda text: None
    ends: Callable[[Outcome], None] = lambda outcome: None


@dataclass
class _Attempt:
    """What was read from the ranks of one start.

    Args:
        begun: the check that rank 0 began last and did not finish.
        since: when, by `time.monotonic()`.
        doing: what it said last.
        outcomes: of those that are finished.
    """

    since: float
    begun: str = ""
    doing: str = ""
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True)
class Runner:
    """Runs batches of checks.

    Args:
        machine: that they run on.
        logs: folder for what ranks print.
        events: who is told.
        defined_in: MODULE:NAME of the checks to choose from.
    """

    machine: Machine
    logs: Path
    events: Events = field(default_factory=Events)
    defined_in: str = "gpu_check.registry:CHECKS"

    def run(self, batch: Batch, deadline: float, seconds: float) -> Iterator[Outcome]:
        """
        Args:
            batch: of checks.
            deadline: by `time.time()`; checks that have not begun by then are skipped.
            seconds: for the measurements of each check.
        """
        if time.time() > deadline:
            yield from self._left_out(batch.checks, batch.ranks, NO_TIME)
            return
        waiting = {check.name: check for check in batch.checks}
        without: dict[str, list[str]] = {}
        number = 0
        while waiting:
            number += 1
            ranks = _Ranks(self, batch, tuple(waiting.values()), without, f"{_label(batch)}_{number}")
            for outcome in ranks.carry_out(deadline, seconds):
                again = self._again(outcome, ranks.doing, without)
                if not again:
                    waiting.pop(outcome.check)
                    self.events.ends(outcome)
                    yield outcome
            if not ranks.met:
                break
        yield from self._left_out(waiting.values(), batch.ranks, "its ranks did not start, see above")

    def _again(self, outcome: Outcome, doing: str, without: dict[str, list[str]]) -> bool:
        """Whether a check that measures contestants is run once more, without the one that ended the process."""
        left_out = without.setdefault(outcome.check, [])
        is_ours = not doing or doing.startswith("ours")
        if outcome.status is not Status.FAILS or is_ours or doing in left_out or len(left_out) >= _MOST_CRASHES:
            return False
        left_out.append(doing)
        return True

    def _left_out(self, checks: Iterable[Check], ranks: int, why: str) -> Iterator[Outcome]:
        for check in checks:
            outcome = Outcome(check.subject, check.name, check.title, ranks, Status.SKIPPED, detail=why)
            self.events.ends(outcome)
            yield outcome


def _label(batch: Batch) -> str:
    apart = "_mute" if batch.is_mute else f"_{batch.checks[0].name}" if batch.checks[0].is_separate else ""
    return f"{batch.subject}_{batch.ranks}{apart}"


class _Ranks:
    """The processes of one start.

    Args:
        runner: who asks.
        batch: of the checks.
        checks: those that are left.
        without: contestants that are left out, by check.
        label: of logs.
    """

    def __init__(
        self, runner: Runner, batch: Batch, checks: tuple[Check, ...], without: Mapping[str, list[str]], label: str
    ) -> None:
        self._runner, self._batch, self._checks, self._without = runner, batch, checks, dict(without)
        self._by_name = {check.name: check for check in checks}
        self._label = label
        self._read = 0
        #: Whether they met and began something.
        self.met = False
        #: The contestant that was running when they ended.
        self.doing = ""

    def carry_out(self, deadline: float, seconds: float) -> Iterator[Outcome]:
        """Outcomes as they come; at the end that of the check during which the ranks were lost, if they were."""
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
            processes = self._start(Path(folder), deadline, seconds)
            try:
                yield from self._watched(processes, Path(folder))
            finally:
                for process in processes:
                    _kill(process)

    def _start(self, folder: Path, deadline: float, seconds: float) -> list[subprocess.Popen[bytes]]:
        machine, batch = self._runner.machine, self._batch
        backend = "fake" if batch.is_mute else machine.backend
        names = tuple(check.name for check in self._checks)
        order = Order(
            names,
            batch.ranks,
            machine.device,
            backend,
            str(folder),
            deadline,
            seconds,
            machine.memory_nbytes,
            self._without,
            self._runner.defined_in,
        )
        order.write(folder / "order.json")
        self._runner.logs.mkdir(parents=True, exist_ok=True)
        return [self._start_one(folder, rank) for rank in range(batch.ranks)]

    def _start_one(self, folder: Path, rank: int) -> subprocess.Popen[bytes]:
        with self._log(rank).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gpu_check.worker", str(folder / "order.json"), str(rank)],
                cwd=folder,
                env=_environment(self._batch, self._runner.machine.device, rank),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all that it starts can be ended with it
            )

    def _log(self, rank: int) -> Path:
        return self._runner.logs / f"{self._label}_rank{rank}.log"

    def _watched(self, processes: list[subprocess.Popen[bytes]], folder: Path) -> Iterator[Outcome]:
        attempt = _Attempt(time.monotonic())
        while True:
            time.sleep(_POLL_SECONDS)
            statuses = [process.poll() for process in processes]
            yield from self._news(folder, attempt)
            if all(status == 0 for status in statuses):
                return
            if any(status not in (None, 0) for status in statuses):
                yield from self._lost(processes, folder, attempt)
                return
            if time.monotonic() - attempt.since > self._limit(attempt):
                yield from self._hanging(processes, attempt)
                return

    def _limit(self, attempt: _Attempt) -> float:
        return self._by_name[attempt.begun].limit if attempt.begun else _START_SECONDS

    def _news(self, folder: Path, attempt: _Attempt) -> Iterator[Outcome]:
        """What rank 0 wrote since the last time."""
        path = lines_of(folder, 0)
        text = path.read_bytes()[self._read :] if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in map(json.loads, whole.splitlines()):
            attempt.since = time.monotonic()
            if "begin" in line:
                self.met, attempt.begun, attempt.doing, self.doing = True, line["begin"], "", ""
                self._runner.events.begins(self._by_name[attempt.begun], self._batch.ranks)
            elif "at" in line:
                attempt.doing = self.doing = line["at"]
                self._runner.events.doing(attempt.doing)
            elif "outcome" in line:
                attempt.begun, self.doing, self.met = "", "", True
                attempt.outcomes.append(Outcome.from_json(line["outcome"]))
                yield attempt.outcomes[-1]

    def _lost(self, processes: list[subprocess.Popen[bytes]], folder: Path, attempt: _Attempt) -> Iterator[Outcome]:
        """A rank ended: the check that had begun fails with what the first one wrote, or with how it ended."""
        end = time.monotonic() + _FOLLOW_SECONDS
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            time.sleep(_POLL_SECONDS)
        yield from self._news(folder, attempt)
        if attempt.begun or not self.met:
            yield self._failed(attempt.begun, self._how(processes, folder))

    def _how(self, processes: list[subprocess.Popen[bytes]], folder: Path) -> str:
        """The reason that a rank gave first, before its peers missed it, or how a rank ended and its last line."""
        said: list[tuple[float, int, str]] = []
        for rank in range(len(processes)):
            path = lines_of(folder, rank)
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            said += [(line["time"], rank, line["fatal"]["detail"]) for line in lines if "fatal" in line]
        if said:
            _, rank, detail = min(said)
            return f"rank {rank}: {detail}"
        rank = next(rank for rank, process in enumerate(processes) if process.returncode not in (None, 0))
        return f"rank {rank} {_ended(processes[rank].returncode)}: {_last_line(self._log(rank))}"

    def _hanging(self, processes: list[subprocess.Popen[bytes]], attempt: _Attempt) -> Iterator[Outcome]:
        """Asks all ranks for their stacks, which go to the logs, and fails what had begun."""
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        doing = f" in {attempt.doing!r}" if attempt.doing else ""
        yield self._failed(attempt.begun, f"no end after {self._limit(attempt):g} s{doing}; stacks are in the logs")

    def _failed(self, begun: str, why: str) -> Outcome:
        check = self._by_name[begun] if begun else self._checks[0]
        detail = why if begun else f"the ranks did not start: {why}"
        return Outcome(check.subject, check.name, check.title, self._batch.ranks, Status.FAILS, detail=detail)


def _ended(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return "failed" if status == FAILED else f"ended with status {status}"


def _last_line(log: Path) -> str:
    """What it printed last, or before the stacks that Python prints at a crash."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "it printed nothing"
    crashes = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    last = " ".join(lines[max(crashes[0] - 1, 0) : crashes[0] + 1]) if crashes else lines[-1]
    return last[-300:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(batch: Batch, device: str, rank: int) -> dict[str, str]:
    """As a launcher sets it, and what torch has to find before it is imported."""
    size = str(batch.ranks)
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    more = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONWARNINGS": "ignore",
        # DeepSpeed names the device where it is installed, and takes seconds to be imported.
        "MEGATRON_DISTOPT_ACCELERATOR": "torch",
        # The same bits from the same matrices, whatever ran before: cuBLAS asks for it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    if device == CPU:
        more |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
        # What is freed goes back to the system at once, so that the high-water mark is that of live memory.
        # Shared memory is communication that torch's fake group does not replace.
        more |= {"MEGATRON_DISTOPT_SHARED_MEMORY": "no"} if batch.is_mute else {}
        more |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if batch.subject == "memory" else {}
    return {**os.environ, **ranks, **more}
