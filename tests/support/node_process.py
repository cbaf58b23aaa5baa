"""A process that has imported torch and forks agents of torchrun into the namespaces of nodes.

Agent and workers start in moments where importing torch takes seconds. They are torchrun's own:
`torch.distributed.run` with the words of its command line.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing import forkserver
from typing import Any, NoReturn
from unittest import mock

_SPACES = ("net", "uts", "ipc", "pid", "mnt")


def enter(process: int) -> None:
    """Moves this process into the namespaces of another one; into its process namespace go those
    that it forks."""
    for file in [os.open(f"/proc/{process}/ns/{space}", os.O_RDONLY) for space in _SPACES]:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {process}")
        os.close(file)


def _fork_server(executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Forks what multiprocessing would start anew, from which workers are forked then.

    It has no other descriptors: a socket of an agent that has ended would not be closed to the
    others.
    """
    process = os.fork()
    if not process:
        for last, following in pairwise(
            [*sorted({0, 1, 2, *descriptors}), os.sysconf("SC_OPEN_MAX")]
        ):
            os.closerange(last + 1, following)
        with suppress(SystemExit):
            exec(arguments[-1], {})
        os._exit(0)
    return process


def _run(words: Sequence[str], variables: dict[str, str], *, is_forked: bool) -> NoReturn:
    """torchrun, in this process, or in a new one that imports all anew, as its workers do."""
    os.environ.update(variables)
    if not is_forked:
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])
    import torch.distributed.run

    status = 1
    try:
        with mock.patch("multiprocessing.util.spawnv_passfds", _fork_server):
            forkserver.ensure_running()
        torch.distributed.run.main(["--run-path", "--start-method", "forkserver", *words])
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def _start(request: dict[str, Any], output: int, status: int) -> NoReturn:
    enter(request["inside"])
    process = os.fork()
    if process:
        os.close(output)
        os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
        os._exit(0)
    os.close(status)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _run(request["words"], request["variables"], is_forked=request["is_forked"])


def serve(descriptor: int, imports: str) -> NoReturn:
    """Forks an agent for each request: JSON, and the descriptors for its output and its status."""
    import torch._dynamo
    import torch.distributed.run  # noqa: F401

    importlib.import_module(imports)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    gc.freeze()  # or forked processes copy all that they look through
    requests = socket.socket(fileno=descriptor)
    requests.send(b"ready")
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        if not request:
            os._exit(0)
        if not os.fork():
            requests.close()
            if os.fork():
                os._exit(0)  # so that nobody here has to wait for it
            _start(json.loads(request), *descriptors)
        for each in descriptors:
            os.close(each)
        os.wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
