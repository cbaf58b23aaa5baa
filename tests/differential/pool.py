"""Processes for programs, forked from two that have imported everything: a program costs a fraction
of a second.

[Note: two nurseries] Rank 0 is forked from another process than the other ranks: its strings have
other hashes, so that whatever goes by the order of a set goes wrong here and not at a user's. The
reference runs in a process of its own too: nothing that a program with us leaves behind can reach
it.

[Note: several programs in a process] The first step in a process costs more than all that a program
does, so programs of one phase run one after the other in the same processes. One that does not end
equal there is run again by itself, with all that were behind it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.differential.compare import Outcome, judge
from tests.differential.programs import Program
from tests.differential.scripts import namespace_of, program_text
from tests.support.spawn import start_from_server

#: Ranks that outlive this did not end. A phase takes a tenth of it, also on a machine that does
#: other things.
SECONDS_A_PHASE = 60.0
#: What the other ranks get to raise an error as well, once one has: they find out when they wait
#: for it.
SECONDS_TO_FOLLOW = 30.0
#: How long a rank that raised stays. Others are told of its error by then; those that wait for it
#: see it end.
SECONDS_AFTER_AN_ERROR = 2.0
#: Programs that run in the same processes.
_TOGETHER = 24


@dataclass(frozen=True)
class Job:
    """What one process does: a phase of a program, or several programs of one phase."""

    texts: tuple[str, ...]  # of the programs
    phase: int  # its number
    rank: int | None  # None for the reference, which is all ranks
    size: int  # the number of ranks
    folders: tuple[Path, ...]  # by program, shared by all jobs of it

    @property
    def results(self) -> list[Path]:
        """Where the process leaves what came of each program."""
        name = f"phase{self.phase}_{'reference' if self.rank is None else self.rank}"
        return [folder / name for folder in self.folders]

    @property
    def is_done(self) -> bool:
        return self.results[-1].exists()


def run_job(job: Job) -> None:
    """The body of a process: runs one rank, or the reference, and leaves the result in a file."""
    warnings.simplefilter("ignore")
    has_failed = False
    for number, (text, folder, result) in enumerate(
        zip(job.texts, job.folders, job.results, strict=True)
    ):
        value: Any = {"seen": [], "end": "left out"}
        if not has_failed:
            if number and job.rank is not None:
                dist.barrier()
                dist.destroy_process_group()
                gc.collect()
            value = _ended(job, namespace_of(text)[f"phase_{job.phase}"], folder)
            has_failed = job.rank is not None and value["end"] != "finished"
        unfinished = result.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(value))
        unfinished.rename(result)
    # No clean-up, which could wait for other ranks, and no end either, which they would notice:
    # until it is killed.
    time.sleep(10 * SECONDS_A_PHASE)


def _ended(job: Job, phase: Callable[[Any], None], folder: Path) -> Any:
    if job.rank is None:
        from tests.differential.reference import run_reference

        return run_reference(phase, job.size, folder / "reference")
    from tests.differential.ours import run_our_rank

    return run_our_rank(phase, job.rank, job.size, folder / "ours", job.phase)


def _nursery(orders: multiprocessing.connection.Connection) -> None:
    """A process that imports everything and then forks; it never computes by itself."""
    import torch

    import megatron_distopt
    import tests.differential.models
    import tests.differential.ours
    import tests.differential.reference  # noqa: F401

    # The package imports its parts when they are asked for.
    _ = (megatron_distopt.distribute, megatron_distopt.DistOptConfig)
    torch.set_num_threads(1)
    os.environ.update(
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MEGATRON_DISTOPT_ACCELERATOR="torch"
    )
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    children: dict[Job, Any] = {}
    orders.send("ready")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            order, jobs = orders.recv()
            if order == "start":
                children = {
                    job: fork.Process(target=run_job, args=(job,), daemon=True) for job in jobs
                }
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
    def begin(cls, number: int) -> _Nursery:
        ours, theirs = multiprocessing.Pipe()
        return cls(start_from_server(number, _nursery, theirs, daemon=False), ours)

    def order(self, word: str, jobs: Sequence[Job] = ()) -> list[int]:
        """Starts or ends processes. Returns the exit codes of children that died by themselves."""
        self.orders.send((word, jobs))
        return self.orders.recv()


@dataclass
class Pool:
    """Runs programs. Made by `pool`."""

    nurseries: list[_Nursery] = field(default_factory=list)

    def run(self, program: Program) -> Outcome:
        """With us and with the reference: all phases, one after the other, until one does not end
        equal."""
        is_exact = True
        with _folders(1) as folders:
            for number, phase in enumerate(program.phases):
                [(ours, theirs)] = self._run_phase([program], number, phase.ranks, folders)
                if theirs is None:
                    theirs = [
                        {"seen": [], "end": "Traceback: the reference did not end"}
                    ] * phase.ranks
                outcome = judge(ours, theirs, program.precision, program.may_refuse)
                if outcome.kind != "equal" or outcome.text:  # or torch itself raised
                    return outcome
                is_exact &= outcome.is_exact
        return Outcome("equal", is_exact=is_exact)

    def run_all(self, programs: Mapping[str, Program]) -> dict[str, Outcome]:
        """As `run`, by name; see [Note: several programs in a process]."""
        outcomes: dict[str, Outcome] = {}
        for ranks in (1, 2):
            together = {
                name: each for name, each in programs.items() if each.shares_processes_of(ranks)
            }
            found = self._run_together(list(together.values()), ranks)
            for (name, program), (ours, theirs) in zip(together.items(), found, strict=True):
                if theirs is not None:
                    outcomes[name] = judge(ours, theirs, program.precision, program.may_refuse)
        alone = {
            name for name in programs if name not in outcomes or outcomes[name].kind != "equal"
        }
        return outcomes | {name: self.run(programs[name]) for name in alone}

    def compare_all(self, pairs: Mapping[str, tuple[Program, Program]]) -> dict[str, Outcome]:
        """Two programs of one phase on two ranks, both with us: the first one against what the
        second one gives."""
        found = self._run_together(
            [program for pair in pairs.values() for program in pair], 2, has_reference=False
        )
        ends = zip(pairs.items(), found[::2], found[1::2], strict=True)
        return {
            name: judge(ours, expected, program.precision, program.may_refuse)
            for (name, (program, _)), (ours, _), (expected, _) in ends
        }

    def _run_together(
        self, programs: list[Program], ranks: int, *, has_reference: bool = True
    ) -> list[Any]:
        found = []
        for start in range(0, len(programs), _TOGETHER):
            batch = programs[start : start + _TOGETHER]
            with _folders(len(batch)) as folders:
                found += self._run_phase(batch, 0, ranks, folders, has_reference=has_reference)
        return found

    def _run_phase(
        self,
        programs: list[Program],
        number: int,
        ranks: int,
        folders: list[Path],
        *,
        has_reference: bool = True,
    ) -> list[tuple[list[Any], Any]]:
        """By program: what the ranks and the reference left."""
        texts = tuple(map(program_text, programs))
        who = [*range(ranks), *([None] if has_reference else [])]
        jobs = [Job(texts, number, rank, ranks, tuple(folders)) for rank in who]
        first, others = self.nurseries
        first.order("start", jobs[:1])
        others.order("start", jobs[1:])
        try:
            self._wait(jobs)
        finally:
            self._end(jobs)
        found = []
        for place, folder in enumerate(folders):
            left = [_read(job.results[place]) for job in jobs]
            for rank in range(ranks):
                stuck = folder / "ours" / f"stuck{rank}"
                if left[rank] is None and stuck.exists():
                    left[rank] = {"seen": [], "end": "stuck", "text": stuck.read_text()}
            found.append((left[:ranks], left[ranks] if has_reference else None))
        return found

    def _wait(self, jobs: list[Job]) -> None:
        """Until all have left a result, or it is clear that the rest will not.

        A rank that raised ends a moment later, as the process of a user does: those that wait for
        it need not wait for the timeout of their group.
        """
        deadline, look, failed = time.monotonic() + SECONDS_A_PHASE, time.monotonic(), False
        failed_at: dict[Job, float] = {}
        while time.monotonic() < deadline and not all(job.is_done for job in jobs):
            time.sleep(0.01)
            if time.monotonic() < look:
                continue
            look += 0.2
            for job in (job for job in jobs if job not in failed_at and _has_failed(job)):
                failed_at[job] = time.monotonic()
            if failed_at and not failed:
                deadline, failed = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW), True
            self._end(
                [
                    job
                    for job, at in failed_at.items()
                    if time.monotonic() > at + SECONDS_AFTER_AN_ERROR
                ]
            )
            if any(nursery.order("look") for nursery in self.nurseries):
                deadline = min(deadline, time.monotonic() + 1.0)

    def _end(self, jobs: Sequence[Job]) -> None:
        for nursery in self.nurseries:
            nursery.order("end", jobs)


def _read(result: Path) -> Any:
    return pickle.loads(result.read_bytes()) if result.exists() else None


def _has_failed(job: Job) -> bool:
    result = _read(job.results[-1])
    return isinstance(result, dict) and result["end"] != "finished"


@contextlib.contextmanager
def _folders(number: int) -> Iterator[list[Path]]:
    """One for each program, with one for each side in it."""
    with tempfile.TemporaryDirectory(prefix="programs_") as root:
        folders = [Path(root) / str(each) for each in range(number)]
        for folder in folders:
            for side in ("ours", "reference"):
                (folder / side).mkdir(parents=True)
        yield folders


@contextlib.contextmanager
def pool() -> Iterator[Pool]:
    """Two processes that stand by for as long as this lasts; see [Note: two nurseries]."""
    nurseries = [_Nursery.begin(number) for number in range(2)]
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
