"""Processes for programs, forked from two that have imported everything: a program costs a fraction of a second.

[Note: two nurseries] Rank 0 is forked from another process than the other ranks: its strings have other hashes, so
that whatever goes by the order of a set goes wrong here and not at a user's. The reference runs in a process of its own
too: nothing that a program with us leaves behind can reach it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.differential.compare import Outcome, judge
from tests.differential.programs import Program
from tests.differential.scripts import namespace_of, program_text

#: Ranks that outlive this did not end. A phase takes a tenth of it, also on a machine that does other things.
SECONDS_A_PHASE = 60.0
#: What the other ranks get to raise an error as well, once one has: they find out when they wait for it.
SECONDS_TO_FOLLOW = 30.0
#: How long a rank that raised stays. Others are told of its error by then; those that wait for it see it end.
SECONDS_AFTER_AN_ERROR = 2.0


@dataclass(frozen=True)
class Job:
    """What one process does."""

    text: str  # of the program
    phase: int  # its number
    rank: int | None  # None for the reference, which is all ranks
    size: int  # the number of ranks
    folder: str  # shared by all jobs of a program

    @property
    def result(self) -> Path:
        """Where the process leaves what came of it."""
        return Path(self.folder) / f"phase{self.phase}_{'reference' if self.rank is None else self.rank}"


def run_job(job: Job) -> None:
    """The body of a process: runs one rank, or the reference, and leaves the result in a file."""
    warnings.simplefilter("ignore")
    phase = namespace_of(job.text)[f"phase_{job.phase}"]
    folder = Path(job.folder) / ("reference" if job.rank is None else "ours")
    if job.rank is None:
        from tests.differential.reference import run_reference

        value: Any = run_reference(phase, job.size, folder)
    else:
        from tests.differential.ours import run_our_rank

        value = run_our_rank(phase, job.rank, job.size, folder, job.phase)
    unfinished = job.result.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(job.result)
    # No clean-up, which could wait for other ranks, and no end either, which they would notice: until it is killed.
    time.sleep(10 * SECONDS_A_PHASE)


def _nursery(orders: multiprocessing.connection.Connection) -> None:
    """A process that imports everything and then forks; it never computes by itself."""
    import torch
    import torch._dynamo

    import megatron_distopt
    import tests.differential.models
    import tests.differential.ours
    import tests.differential.reference  # noqa: F401

    # The package imports its parts when they are asked for.
    _ = (megatron_distopt.distribute, megatron_distopt.DistOptConfig)
    torch.set_num_threads(1)
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    children: dict[Job, Any] = {}
    orders.send("ready")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            order, jobs = orders.recv()
            if order == "start":
                children = {job: fork.Process(target=run_job, args=(job,), daemon=True) for job in jobs}
                for child in children.values():
                    child.start()
            died = [child.exitcode for child in children.values() if child.exitcode is not None]
            if order == "end":
                ended = [children.pop(job) for job in jobs if job in children]
                for child in ended:
                    child.kill()
                for child in ended:
                    child.join()
            orders.send(died)


@dataclass
class _Nursery:
    process: Any
    orders: multiprocessing.connection.Connection

    @classmethod
    def begin(cls) -> _Nursery:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_nursery, args=(theirs,))
        process.start()
        return cls(process, ours)

    def order(self, word: str, jobs: Sequence[Job] = ()) -> list[int]:
        """Starts or ends processes. Returns the exit codes of children that died by themselves."""
        self.orders.send((word, jobs))
        return self.orders.recv()


@dataclass
class Pool:
    """Runs programs. Made by `pool`."""

    nurseries: list[_Nursery] = field(default_factory=list)

    def run(self, program: Program) -> Outcome:
        """With us and with the reference: all phases, one after the other, until one does not end equal."""
        text = program_text(program)
        is_exact = True
        with tempfile.TemporaryDirectory(prefix="program_") as folder:
            for side in ("ours", "reference"):
                (Path(folder) / side).mkdir()
            for number, phase in enumerate(program.phases):
                ranks = [Job(text, number, rank, phase.ranks, folder) for rank in range(phase.ranks)]
                ours, (theirs,) = self._run_phase(ranks, [Job(text, number, None, phase.ranks, folder)])
                if theirs is None:
                    theirs = [{"seen": [], "end": "Traceback: the reference did not end"}] * len(ranks)
                outcome = judge(ours, theirs, program.precision, program.may_refuse)
                if outcome.kind != "equal":
                    return outcome
                is_exact &= outcome.is_exact
        return Outcome("equal", is_exact=is_exact)

    def compare(self, program: Program, expected: Program) -> Outcome:
        """Two programs of one phase, both with us: the first one against what the second one gives."""
        found = []
        for compared in (program, expected):
            with tempfile.TemporaryDirectory(prefix="program_") as folder:
                (Path(folder) / "ours").mkdir()
                size = compared.phases[0].ranks
                ranks = [Job(program_text(compared), 0, rank, size, folder) for rank in range(size)]
                found.append(self._run_phase(ranks)[0])
        return judge(*found, program.precision, program.may_refuse)

    def _run_phase(self, ranks: list[Job], reference: Sequence[Job] = ()) -> tuple[list[Any], list[Any]]:
        """What the ranks and the reference left."""
        jobs = [*ranks, *reference]
        first, others = self.nurseries
        first.order("start", jobs[:1])
        others.order("start", jobs[1:])
        try:
            self._wait(jobs)
        finally:
            self._end(jobs)
        ours = [_read(job) for job in ranks]
        for job, result in zip(ranks, ours, strict=True):
            stuck = Path(job.folder) / "ours" / f"stuck{job.rank}"
            if result is None and stuck.exists():
                ours[ranks.index(job)] = {"seen": [], "end": "stuck", "text": stuck.read_text()}
        return ours, [_read(job) for job in reference]

    def _wait(self, jobs: list[Job]) -> None:
        """Until all have left a result, or it is clear that the rest will not.

        A rank that raised ends a moment later, as the process of a user does: those that wait for it need not wait
        for the timeout of their group.
        """
        deadline, look, failed = time.monotonic() + SECONDS_A_PHASE, time.monotonic(), False
        failed_at: dict[Job, float] = {}
        while time.monotonic() < deadline and not all(job.result.exists() for job in jobs):
            time.sleep(0.01)
            if time.monotonic() < look:
                continue
            look += 0.2
            for job in (job for job in jobs if job not in failed_at and _has_failed(job)):
                failed_at[job] = time.monotonic()
            if failed_at and not failed:
                deadline, failed = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW), True
            self._end([job for job, at in failed_at.items() if time.monotonic() > at + SECONDS_AFTER_AN_ERROR])
            if any(nursery.order("look") for nursery in self.nurseries):
                deadline = min(deadline, time.monotonic() + 1.0)

    def _end(self, jobs: Sequence[Job]) -> None:
        for nursery in self.nurseries:
            nursery.order("end", jobs)


def _read(job: Job) -> Any:
    return pickle.loads(job.result.read_bytes()) if job.result.exists() else None


def _has_failed(job: Job) -> bool:
    result = _read(job)
    return isinstance(result, dict) and result["end"] != "finished"


@contextlib.contextmanager
def pool() -> Iterator[Pool]:
    """Two processes that stand by for as long as this lasts; see [Note: two nurseries]."""
    kept = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MEGATRON_DISTOPT_ACCELERATOR="torch")
    try:
        nurseries = [_Nursery.begin() for _ in range(2)]
    finally:
        os.environ.clear()
        os.environ.update(kept)
    try:
        for nursery in nurseries:
            nursery.orders.recv()
        yield Pool(nurseries)
    finally:
        for nursery in nurseries:
            nursery.orders.close()
            nursery.process.join(timeout=5)
            if nursery.process.is_alive():
                os.kill(nursery.process.pid, signal.SIGKILL)
