"""The command: python -m gpu_check [--device auto|cpu|NAME] [--minutes N] [--only SUBJECT] [--out
FOLDER]."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_check import ROOT
from gpu_check.checks import SUBJECTS, Outcome, Status
from gpu_check.machine import Machine
from gpu_check.report import ARCHIVE, Report, write_report
from gpu_check.runner import Batch, Runner, batches_of, impossible

#: A device that does not answer by then will not.
_LOOK_SECONDS = 180
#: Of the time that is left for a check, what goes into measurements; the rest is starting and
#: warming up.
_MEASURED_PART = 0.6
_LEAST_SECONDS = 2.0
#: Characters of the line of a check that passes.
_WIDTH = 110
#: Processes that want to run, over cores.
_BUSY_LOAD = 0.5
#: Of all the time, what is kept for the subjects that come after one: its checks do not begin then.
_KEPT_FOR_OTHERS = {"correctness": 0.3, "memory": 0.4, "speed": 0.0}


class Parser(argparse.ArgumentParser):
    """One whose errors say where the options are."""

    def error(self, message: str) -> Any:
        self.exit(
            2, f"gpu_check: Invalid option: {message}. scripts/gpu_check.sh --help says more.\n"
        )


def parse_args(words: Sequence[str]) -> argparse.Namespace:
    """
    Raises:
        SystemExit: with status 2 and what to type, for an option that there is not or a value that
            it does not take.
    """
    about = (
        "Checks whether megatron_distopt is right and fast on this machine's devices; see "
        "docs/hosts.md."
    )
    parser = Parser(prog="scripts/gpu_check.sh", description=about, allow_abbrev=False)
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="cpu, auto, or a type of torch's such as xpu",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=10.0, metavar="N", help="how long it may take (10)"
    )
    subjects = ", ".join(SUBJECTS)
    parser.add_argument(
        "--only", choices=SUBJECTS, metavar="SUBJECT", help=f"one of {subjects}; all where left out"
    )
    folder = ROOT / "runs" / "gpu_check"
    parser.add_argument(
        "--out", type=Path, default=folder, metavar="FOLDER", help="of the report (runs/gpu_check)"
    )
    args, unknown = parser.parse_known_args(words)
    if unknown:
        known = [
            name
            for action in parser._actions
            for name in action.option_strings
            if name.startswith("--")
        ]
        nearest = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1, 0.0)[0]
        parser.error(f"{unknown[0]!r}. Must be one of {', '.join(known)}. Write {nearest}")
    return args


def _minutes(text: str) -> float:
    value = float(text) if text.replace(".", "", 1).isdigit() else 0.0
    if not 0.1 <= value <= 600:
        raise argparse.ArgumentTypeError(
            f"{text}. Must be minutes from 0.1 to 600. Write --minutes 10"
        )
    return value


def main() -> None:
    args = parse_args(sys.argv[1:])
    # what a scheduler sends: ranks have to end, and the report is written
    signal.signal(signal.SIGTERM, _interrupt)
    begin = time.time()
    machine = look(args.device)
    print(
        f"{machine.name}: {machine.count} rank(s) over {machine.backend}, {args.minutes:g} minutes",
        flush=True,
    )
    logs = args.out / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    note = busy_note(os.getloadavg()[0], os.cpu_count() or 1)
    try:
        for outcome in run(machine, logs, args.only, begin + 60 * args.minutes):
            outcomes.append(outcome)
    except KeyboardInterrupt:
        note = f"The run was interrupted; what is missing was not run. {note}".strip()
    command = " ".join(["scripts/gpu_check.sh", *sys.argv[1:]])
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    report = Report(machine, tuple(outcomes), date, time.time() - begin, command, note=note)
    write_report(report, args.out, logs)
    sys.exit(_close(report, args.out))


def busy_note(load: float, cores: int) -> str:
    """What the report says of a machine that did something else when the run began; nothing of a
    quiet one."""
    if load < _BUSY_LOAD * cores:
        return ""
    busy = f"The machine was busy when the run began: load {load:.1f} on {cores} cores."
    return f"{busy} Take figures of speed with care, or run it again on a quiet machine."


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _close(report: Report, folder: Path) -> int:
    """Says where everything is; the status is 1 where something failed."""
    print(f"{report.counts}: {folder / 'report.md'}")
    if not report.having(Status.FAILS):
        return 0
    print(f"please send {folder / ARCHIVE}")
    return 1


def look(device: str) -> Machine:
    """Asks for the machine in a process of its own.

    Raises:
        SystemExit: the device is not there, or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        path = Path(folder) / "machine.json"
        command = [sys.executable, "-m", "gpu_check.machine", device, str(path)]
        try:
            done = subprocess.run(command, timeout=_LOOK_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            sys.exit(
                f"gpu_check: the device {device!r} did not answer within {_LOOK_SECONDS} s. Try "
                "--device cpu."
            )
        found = (
            json.loads(path.read_text())
            if path.exists()
            else {"error": f"torch ended with {done.returncode}"}
        )
    if "error" in found:
        print(f"gpu_check: {found['error']}", file=sys.stderr)
        sys.exit(2)
    return Machine.from_json(found["machine"])


def run(machine: Machine, logs: Path, only: str | None, deadline: float) -> Iterator[Outcome]:
    """Every check that there is time for, and those that this machine cannot run as skipped; prints
    a line for each."""
    begin, subjects = time.time(), (only,) if only else SUBJECTS
    batches, cannot = list(batches_of(machine.count, subjects)), impossible(machine.count, subjects)
    total, done = sum(len(batch.checks) for batch in batches) + len(cannot), 0
    runner = Runner(machine, logs)
    for number, batch in enumerate([None, *batches]):
        if batch is None:
            found: Iterable[Outcome] = cannot
        else:
            kept = 0.0 if only else _KEPT_FOR_OTHERS[batch.checks[0].subject] * (deadline - begin)
            found = runner.run(
                batch, deadline - kept, seconds_for(batches[number - 1 :], deadline - time.time())
            )
        for outcome in found:
            done += 1
            print(f"[{time.time() - begin:4.0f} s, {done}/{total}] {line_of(outcome)}", flush=True)
            yield outcome


def line_of(outcome: Outcome) -> str:
    """One check in one line."""
    ranks = f"{outcome.ranks} rank{'s' * (outcome.ranks != 1)}"
    mark = "FAILS" if outcome.status is Status.FAILS else outcome.status.value
    text = f"{mark:7} {outcome.subject} {outcome.check}, {ranks}: {outcome.detail}"
    return (
        f"{text[: _WIDTH - 3]}..."
        if len(text) > _WIDTH and outcome.status is Status.PASSES
        else text
    )


def seconds_for(batches: Sequence[Batch], left: float) -> float:
    """For the measurements of each check that is left."""
    checks = sum(len(batch.checks) for batch in batches if batch.checks[0].subject == "speed")
    return max(_MEASURED_PART * left / max(checks, 1), _LEAST_SECONDS)


if __name__ == "__main__":
    main()
