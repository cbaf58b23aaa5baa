"""Processes that are given orders and answer: one for each rank, all given the same order at the
same time.

Orders and answers are JSON, one a line: orders come by standard input, answers go to a pipe of
their own, because libraries print to standard output. A line {"at": text} says what a rank is doing
and is no answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Names the descriptor of the pipe for answers.
_VARIABLE = "CREW_REPLY"
#: Between the end of one rank, or its answer, and the end of waiting for the others.
FOLLOW_SECONDS = 20.0
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Member:
    """One rank before it is started."""

    command: Sequence[str]
    environment: Mapping[str, str]  # beside this process's own
    log: Path | None = None  # gets what it prints; this process's standard error where None


class Crew:
    """All ranks, started.

    Args:
        members: by rank.
        folder: in which they run.
    """

    def __init__(self, members: Sequence[Member], folder: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.doing = ""  # what a rank said last that it does
        self.ended = set[int]()  # ranks whose pipe is closed
        self._pipes: list[int] = []
        self._texts: list[bytes] = []
        try:
            for member in members:
                self._start(member, folder)
        except BaseException:
            self.kill()
            raise

    def _start(self, member: Member, folder: Path) -> None:
        source, sink = os.pipe()
        self._pipes.append(source)
        self._texts.append(b"")
        with member.log.open("ab") if member.log else contextlib.nullcontext(sys.stderr) as log:
            process = subprocess.Popen(
                member.command,
                cwd=folder,
                env={**os.environ, **member.environment, _VARIABLE: str(sink)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(sink,),
                # Ctrl-C is for this process; and all that it starts can be ended with it
                start_new_session=True,
            )
        self.processes.append(process)
        os.close(sink)

    def ask(self, order: Mapping[str, Any], limit: float) -> list[Any]:
        """Gives an order to all ranks and waits for their answers.

        Args:
            order: JSON values.
            limit: seconds without any news after which ranks count as hanging.

        Returns:
            Answers by rank; None of a rank that ended, or did not answer in time or soon after the
            others.
        """
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # it ended: there will be no answer
                process.stdin.write(json.dumps(order).encode() + b"\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        return self.wait(limit)

    def wait(self, limit: float) -> list[Any]:
        """The next answers, see `ask`."""
        self.doing = ""
        found: list[Any] = [None] * len(self.processes)
        open_ranks = set(range(len(found)))
        end = time.monotonic() + limit
        while open_ranks and time.monotonic() < end:
            ready, _, _ = select.select([self._pipes[rank] for rank in open_ranks], [], [], 0.05)
            for rank in [rank for rank in open_ranks if self._pipes[rank] in ready]:
                piece = os.read(self._pipes[rank], 1 << 20)
                if not piece:
                    self.ended.add(rank)
                    open_ranks.discard(rank)
                    end = min(end, time.monotonic() + FOLLOW_SECONDS)
                self._texts[rank] += piece
                for line in self._lines(rank):
                    if "at" in line:
                        self.doing, end = line["at"], time.monotonic() + limit
                        continue
                    found[rank] = line
                    open_ranks.discard(rank)
                    end = min(end, time.monotonic() + FOLLOW_SECONDS)
        return found

    def _lines(self, rank: int) -> Iterator[Any]:
        *whole, self._texts[rank] = self._texts[rank].split(b"\n")
        yield from map(json.loads, whole)

    def how_ended(self, rank: int) -> str:
        """Says how a rank of `ended` ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(_END_SECONDS)
        status = self.processes[rank].returncode
        if status is None:
            return "closed its pipe"
        return (
            f"was ended by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )

    def stop(self) -> None:
        """Without orders they leave by themselves; those that do not are killed."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """At once, with all that they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # all of them ended by themselves
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while self._pipes:
            os.close(self._pipes.pop())


def orders() -> Iterator[dict[str, Any]]:
    """In a rank: the orders, as they come."""
    return map(json.loads, sys.stdin)


def answer(line: Mapping[str, Any]) -> None:
    """In a rank: answers an order, or says what it does by {"at": text}."""
    os.write(int(os.environ[_VARIABLE]), json.dumps(line).encode() + b"\n")
