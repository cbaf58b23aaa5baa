"""What plain TCP reaches from one namespace to the other, and how long a small message takes there and back.

    python -m peers.overlap_probe receive
    python -m peers.overlap_probe send ADDRESS SECONDS

The receiver prints a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.namespaces import Link

_PORT, _PIECE_NBYTES = 29400, 1 << 20
_TURNS, _TIME_LIMIT = 100, 20.0
#: The connection is faster or slower before it has settled.
_SKIPPED_SECONDS = 0.1


@dataclass(frozen=True)
class Probe:
    """What was reached."""

    gigabits: float  # of payload a second, 10**9 bits, one way, nothing else running
    round_trip_us: float  # of eight bytes there and back, microseconds, median


def measure(link: Link, seconds: float) -> Probe:
    """From rank 0's namespace to rank 1's, with so many seconds of sending."""
    folder = Path(__file__).resolve().parents[1]
    program = [sys.executable, "-m", "peers.overlap_probe"]
    receive = link.inside(1, [*program, "receive"])
    send = link.inside(0, [*program, "send", link.address(1), str(seconds)])
    with subprocess.Popen(receive, cwd=folder, stdout=subprocess.PIPE, text=True) as receiver:
        subprocess.run(send, cwd=folder, check=True, timeout=_TIME_LIMIT + seconds)
        said, _ = receiver.communicate(timeout=_TIME_LIMIT)
    return Probe(**json.loads(said))


def receive() -> Probe:
    with socket.create_server(("", _PORT)) as server:
        server.settimeout(_TIME_LIMIT)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_TIME_LIMIT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Probe(round_trip_us=_turns(connection) * 1e6, gigabits=_drained(connection) * 8e-9)


def _turns(connection: socket.socket) -> float:
    """Median seconds of a message that the other side gives back."""
    found = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        connection.sendall(bytes(8))
        _take(connection, 8)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _drained(connection: socket.socket) -> float:
    """Bytes a second until the other side is done, the beginning left out."""
    buffer = bytearray(_PIECE_NBYTES)
    arrivals = []
    while taken := connection.recv_into(buffer):
        arrivals.append((time.perf_counter(), taken))
    return rate_of(arrivals)


def rate_of(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes a second.

    Args:
        arrivals: when, in seconds, and how many bytes.
    """
    first = arrivals[0][0] + _SKIPPED_SECONDS
    settled = [arrival for arrival in arrivals if arrival[0] >= first] or list(arrivals)
    seconds = settled[-1][0] - settled[0][0]
    return sum(taken for _, taken in settled[1:]) / seconds if seconds else 0.0


def send(address: str, seconds: float) -> None:
    with _connected(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TURNS):
            connection.sendall(_take(connection, 8))
        piece, end = bytes(_PIECE_NBYTES), time.perf_counter() + seconds + _SKIPPED_SECONDS
        while time.perf_counter() < end:
            connection.sendall(piece)


def _connected(address: str) -> socket.socket:
    """The other side may still be starting."""
    end = time.monotonic() + _TIME_LIMIT
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=_TIME_LIMIT)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _take(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        piece = connection.recv(nbytes - len(found))
        if not piece:
            raise ConnectionError("the other side has gone")
        found += piece
    return found


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2], float(sys.argv[3]))
    else:
        print(json.dumps(dataclasses.asdict(receive())))
