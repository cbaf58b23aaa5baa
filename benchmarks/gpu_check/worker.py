"""One rank: carries out the checks that it is told, one after the other.

    python -m gpu_check.worker PLACE CHECKS

PLACE is JSON: rank, size, device, backend, folder, memory_nbytes. CHECKS is MODULE:NAME of all that
there are.

A result that is wrong, or a reason to skip, is an answer, and the rank goes on. After any other
error it answers and ends: others may be waiting in a collective, and the device may be in no state
to go on.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.crew import answer, orders

from gpu_check.checks import Check, Found, Place, SkipError, Status, WrongError
from gpu_check.machine import CPU, import_backend, use

_TIME_LIMIT = timedelta(minutes=3)


def main() -> None:
    told, (module, _, name) = json.loads(sys.argv[1]), sys.argv[2].partition(":")
    faulthandler.enable()
    # the parent asks for stacks before it ends a rank that hangs
    faulthandler.register(signal.SIGUSR1)
    import_backend()
    checks: dict[str, Check] = {
        check.name: check for check in getattr(importlib.import_module(module), name)
    }
    rank, size = told["rank"], told["size"]
    device = torch.device(told["device"], None if told["device"] == CPU else rank)
    use(device)
    if device.type == CPU:
        torch.set_num_threads(1)
    store = dist.FileStore(str(Path(told["folder"]) / "store"), size)
    dist.init_process_group(
        told["backend"], store=store, rank=rank, world_size=size, timeout=_TIME_LIMIT
    )
    answer({"met": rank})
    for order in orders():
        place = Place(
            device,
            rank,
            size,
            Path(told["folder"]) / order["check"],
            order["seconds"],
            told["memory_nbytes"],
            tuple(order["without"]),
            lambda text: answer({"at": text}),
        )
        carry_out(checks[order["check"]], place)
    _leave(0)


def carry_out(check: Check, place: Place) -> None:
    """Collective: answers with how a check ended."""
    place.folder.mkdir(parents=True, exist_ok=True)
    begin, goes_on = time.monotonic(), True
    try:
        found, status = check.function(place), Status.PASSES
    except SkipError as error:
        found, status = Found(str(error)), Status.SKIPPED
    except WrongError as error:
        traceback.print_exc()
        found, status = Found(str(error)[:400]), Status.FAILS
    except Exception as error:  # noqa: BLE001 - whatever it is, the report has it
        traceback.print_exc()
        said = (str(error).strip().splitlines() or [""])[0]
        found, status, goes_on = Found(f"{type(error).__name__}: {said}"[:400]), Status.FAILS, False
    result: dict[str, Any] = {
        "status": status.value,
        "detail": found.detail,
        "figures": dict(found.figures),
    }
    answer({**result, "seconds": time.monotonic() - begin, "goes_on": goes_on, "time": time.time()})
    if not goes_on:
        _leave(1)


def _leave(status: int) -> None:
    """Without waiting for the others, as an orderly end of a process group would."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
