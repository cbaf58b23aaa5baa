"""Two ranks as the script sees them: processes that are given an order and answer with a reading each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from peers.namespaces import NUM_ENDS, Command, Wire
from peers.overlap_orders import LOOPBACK, STORE_PORT, TIME_LIMIT, Order, Place
from peers.train_reading import TrainReading

__all__ = ["Pair", "PairEndedError", "mute_pair", "wired_pair"]

_ANSWER_SECONDS = TIME_LIMIT.total_seconds() + 60
_END_SECONDS = 10.0
_STDERR = 2
#: Addresses of the link have no names, which torch would warn of.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


class PairEndedError(RuntimeError):
    """A rank ended, or did not answer in time."""


class Pair:
    """Both ranks, started.

    Args:
        places: of the ranks; `reply` is filled in here.
        inside: from a rank and its command to the command as it is run.
    """

    def __init__(self, places: Sequence[Place], inside: Callable[[int, Command], Command]) -> None:
        #: By rank.
        self.processes: list[subprocess.Popen[str]] = []
        self._replies: list[IO[str]] = []
        try:
            for place in places:
                self._start(place, inside)
        except BaseException:
            self.kill()
            raise

    def _start(self, place: Place, inside: Callable[[int, Command], Command]) -> None:
        source, sink = os.pipe()
        about = json.dumps(dataclasses.asdict(dataclasses.replace(place, reply=sink)))
        self._replies.append(os.fdopen(source))
        self.processes.append(
            subprocess.Popen(
                inside(place.rank, [sys.executable, "-m", "peers.overlap_rank", about]),
                cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, **_QUIET},
                stdin=subprocess.PIPE,
                stdout=_STDERR,  # lines of libraries
                text=True,
                pass_fds=(sink,),
                start_new_session=True,  # Ctrl-C is for the script, which ends them
            )
        )
        os.close(sink)

    def ask(self, order: Order) -> list[TrainReading]:
        """By rank.

        Raises:
            PairEndedError: no answer will come.
        """
        for process in self.processes:
            _tell(process, order)
        return [self._answer(rank, order) for rank in range(len(self.processes))]

    def _answer(self, rank: int, order: Order) -> TrainReading:
        reply = self._replies[rank]
        ready, _, _ = select.select([reply], [], [], _ANSWER_SECONDS)
        line = reply.readline() if ready else ""
        if not line:
            said = _end_of(self.processes[rank]) if ready else f"no answer for {_ANSWER_SECONDS:.0f} s"
            raise PairEndedError(f"rank {rank} in {order.contestant!r}: {said}")
        found = json.loads(line)
        return TrainReading(**{**found, "seconds": tuple(found["seconds"]), "losses": tuple(found["losses"])})

    def stop(self) -> None:
        """Without orders they leave by themselves; those that hang are killed."""
        for process in self.processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it ended before it read an order
                    process.stdin.close()
        for process, reply in zip(self.processes, self._replies, strict=True):
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reply.close()

    def kill(self) -> None:
        """At once."""
        for process in self.processes:
            process.kill()
        self.stop()


def _end_of(process: subprocess.Popen[str]) -> str:
    """Of one that has closed its pipe, which is a moment before it ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    return f"ended with {process.returncode}"


def _tell(process: subprocess.Popen[str], order: Order) -> None:
    if process.stdin is None or process.poll() is not None:
        raise PairEndedError(f"a rank ended with {process.poll()} before {order.contestant!r}")
    try:
        process.stdin.write(json.dumps(dataclasses.asdict(order)) + "\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise PairEndedError(f"a rank ended before {order.contestant!r}") from error


def wired_pair(wire: Wire, ours: Sequence[str], model: dict[str, int]) -> Pair:
    """In the namespaces, over their link.

    Args:
        wire: that joins them.
        ours, model: see `Place`.
    """
    store = f"tcp://{wire.link.address(0)}:{STORE_PORT}"
    places = [Place(end, NUM_ENDS, wire.link.interface(end), store, -1, tuple(ours), model) for end in range(NUM_ENDS)]
    return Pair(places, wire.link.inside)


def mute_pair(store: Path, ours: Sequence[str], model: dict[str, int]) -> Pair:
    """That does not communicate.

    Args:
        store: a file that is not there yet.
        ours, model: see `Place`.
    """
    places = [Place(rank, NUM_ENDS, LOOPBACK, str(store), -1, tuple(ours), model) for rank in range(NUM_ENDS)]
    return Pair(places, lambda rank, command: command)
