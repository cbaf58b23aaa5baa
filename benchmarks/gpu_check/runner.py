"""All checks; starts ranks for them, and others where some crash or hang: no check can end the
report."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.crew import Crew, Member

from gpu_check import ROOT, correctness, hosts, interruptions, memory, speed, state
from gpu_check.checks import SUBJECTS, Check, Outcome, Status, Where
from gpu_check.machine import CPU, Machine, rank_counts

CHECKS: tuple[Check, ...] = (
    *correctness.CHECKS,
    *interruptions.CHECKS,
    *state.CHECKS,
    *hosts.CHECKS,
    *memory.CHECKS,
    *speed.CHECKS,
)
NO_TIME = "no time was left; more with --minutes"
#: Importing torch, starting the device and meeting the others.
_START_SECONDS = 150.0
#: Contestants that may crash in one check before it is given up.
_MOST_CRASHES = 3


@dataclass(frozen=True)
class Batch:
    """Checks that the same processes carry out, in this order."""

    ranks: int
    checks: tuple[Check, ...]

    @property
    def label(self) -> str:
        """Of logs."""
        return f"{self.checks[0].subject}_{self.ranks}_{self.checks[0].name}"


def batches_of(count: int, subjects: Sequence[str] = SUBJECTS) -> Iterator[Batch]:
    """What is to be run with that many devices: subject by subject, few ranks first."""
    for subject in SUBJECTS:
        for ranks in rank_counts(count):
            runs = {
                Where.ONE: ranks == 1,
                Where.ALL: ranks == count,
                Where.ENDS: ranks in (1, count),
            }
            here = [
                check
                for check in CHECKS
                if check.subject == subject and subject in subjects
                if ranks >= check.least_ranks and runs.get(check.where, True)
            ]
            together = [check for check in here if not check.is_separate]
            apart = [[check] for check in here if check.is_separate]
            yield from (Batch(ranks, tuple(found)) for found in (together, *apart) if found)


def impossible(count: int, subjects: Sequence[str] = SUBJECTS) -> list[Outcome]:
    """Checks that need more devices than there are, as skipped."""
    return [
        Outcome.of(
            check,
            count,
            Status.SKIPPED,
            f"needs {check.least_ranks} devices, and this machine has {count}",
        )
        for check in CHECKS
        if check.subject in subjects and check.least_ranks > count
    ]


@dataclass(frozen=True)
class Runner:
    """Runs batches of checks."""

    machine: Machine
    logs: Path  # folder for what ranks print
    defined_in: str = "gpu_check.runner:CHECKS"  # MODULE:NAME of the checks to choose from

    def run(self, batch: Batch, deadline: float, seconds: float) -> Iterator[Outcome]:
        """Carries out the checks of a batch; after one that crashes or hangs the next one gets new
        ranks.

        Args:
            batch: of checks.
            deadline: by `time.time()`; checks that have not begun by then are skipped.
            seconds: for the measurements of each check.
        """
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
            crew: Crew | None = None
            try:
                for number, check in enumerate(batch.checks):
                    without: list[str] = []
                    while True:
                        if time.time() > deadline:
                            yield Outcome.of(check, batch.ranks, Status.SKIPPED, NO_TIME)
                            break
                        crew = crew or self._start(batch, Path(folder), f"{number}_{len(without)}")
                        if crew is None:
                            why = f"the ranks did not start: {self._last_line(batch, 0)}"
                            yield Outcome.of(check, batch.ranks, Status.FAILS, why)
                            break
                        order = {"check": check.name, "seconds": seconds, "without": without}
                        outcome, is_lost = self._judged(
                            check, batch, crew, crew.ask(order, check.limit)
                        )
                        doing = crew.doing
                        if is_lost:
                            crew.kill()
                            crew = None
                        crashed = (
                            is_lost
                            and doing
                            and not doing.startswith("ours")
                            and doing not in without
                        )
                        if crashed and len(without) < _MOST_CRASHES:
                            # once more, without the peer that ended the process
                            without.append(doing)
                            continue
                        yield outcome
                        break
            finally:
                if crew is not None:
                    crew.kill()

    def _start(self, batch: Batch, folder: Path, name: str) -> Crew | None:
        """Returns the ranks once they have met; None where they do not."""
        self.logs.mkdir(parents=True, exist_ok=True)
        machine, here = self.machine, folder / name
        here.mkdir()
        members = []
        for rank in range(batch.ranks):
            told = {
                "rank": rank,
                "size": batch.ranks,
                "device": machine.device,
                "backend": machine.backend,
            }
            told |= {"folder": str(here), "memory_nbytes": machine.memory_nbytes}
            command = [sys.executable, "-m", "gpu_check.worker", json.dumps(told), self.defined_in]
            members.append(
                Member(command, _environment(batch, machine.device, rank), self._log(batch, rank))
            )
        crew = Crew(members, here)
        if all(crew.wait(_START_SECONDS)):
            return crew
        crew.kill()
        return None

    def _judged(
        self, check: Check, batch: Batch, crew: Crew, answers: Sequence[dict]
    ) -> tuple[Outcome, bool]:  # type: ignore[type-arg]
        """The outcome of a check, and whether its ranks are lost: the worst answer counts, the
        earliest of several."""
        given = [(rank, answer) for rank, answer in enumerate(answers) if answer]
        missing = [rank for rank, answer in enumerate(answers) if not answer]
        is_lost = bool(missing) or not all(answer["goes_on"] for _, answer in given)
        for status in (Status.FAILS, Status.SKIPPED):
            found = sorted(
                (answer["time"], rank) for rank, answer in given if answer["status"] == status.value
            )
            if found:
                _, rank = found[0]
                where = "" if answers[rank]["goes_on"] else f"rank {rank}: "
                return Outcome.of(
                    check, batch.ranks, status, f"{where}{answers[rank]['detail']}"
                ), is_lost
        if not missing:
            first = answers[0]
            more = {"seconds": first["seconds"], "figures": first["figures"]}
            return Outcome.of(check, batch.ranks, Status.PASSES, first["detail"], **more), is_lost
        ended = [rank for rank in missing if rank in crew.ended]
        if ended:
            detail = (
                f"rank {ended[0]} {crew.how_ended(ended[0])}: {self._last_line(batch, ended[0])}"
            )
            return Outcome.of(check, batch.ranks, Status.FAILS, detail), True
        for rank in missing:
            crew.processes[rank].send_signal(signal.SIGUSR1)  # it prints its stacks to its log
        time.sleep(0.5)
        doing = f" in {crew.doing!r}" if crew.doing else ""
        detail = f"no end after {check.limit:g} s{doing}; stacks are in the logs"
        return Outcome.of(check, batch.ranks, Status.FAILS, detail), True

    def _log(self, batch: Batch, rank: int) -> Path:
        return self.logs / f"{batch.label}_rank{rank}.log"

    def _last_line(self, batch: Batch, rank: int) -> str:
        """What a rank printed last, or before the stacks that Python prints at a crash."""
        text = self._log(batch, rank).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        crashes = [
            number for number, line in enumerate(lines) if line.startswith("Fatal Python error")
        ]
        last = lines[max(crashes[-1] - 1, 0) : crashes[-1] + 1] if crashes else lines[-1:]
        return " ".join(last)[-300:] or "it printed nothing"


def _environment(batch: Batch, device: str, rank: int) -> dict[str, str]:
    """As a launcher sets it, and what torch has to find before it is imported."""
    size, more = (
        str(batch.ranks),
        [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")],
    )
    found = {
        **{
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
        },
        "PYTHONPATH": os.pathsep.join(filter(None, more)),
        "PYTHONWARNINGS": "ignore",
        # DeepSpeed names the device where it is installed, and takes seconds to be imported.
        "MEGATRON_DISTOPT_ACCELERATOR": "torch",
        # The same bits from the same matrices, whatever ran before: cuBLAS asks for it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    if device == CPU:
        found |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
        if batch.checks[0].subject == "memory":
            # What is freed goes back to the system at once, so that the high-water mark is that of
            # live memory.
            found["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    return found
