"""What was found, as files: report.md to read, report.json to keep, and an archive to send where something failed."""

from __future__ import annotations

import json
import statistics
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpu_check.checks import SUBJECTS, Outcome, Status
from gpu_check.machine import Machine
from gpu_check.speed import busier, exposed_parts
from megatron_distopt.version import VERSION

__all__ = ["ARCHIVE", "Report", "read_report", "tried_of", "write_report"]

ARCHIVE = "gpu_check_to_send.tar.gz"
_HOSTS = {"megatron_core": "megatron-core", "megatron_2023": "a small fork of 2023"}
_BACKTICKS = "```"
#: By how much two runs of the same may differ on a quiet machine.
_BUSY = 0.1


@dataclass(frozen=True)
class Report:
    """Everything that a run found.

    Args:
        machine: that it ran on.
        outcomes: in the order in which they were run.
        date: year-month-day.
        seconds: that it took.
        command: that was typed.
        pictures: files in the folder of the report.
        note: what a reader has to know besides, such as that the run was interrupted.
    """

    machine: Machine
    outcomes: tuple[Outcome, ...]
    date: str
    seconds: float
    command: str
    pictures: tuple[str, ...] = ()
    note: str = ""

    def having(self, status: Status) -> list[Outcome]:
        return [each for each in self.outcomes if each.status is status]

    @property
    def counts(self) -> str:
        """How many checks passed, failed and were skipped."""
        passed, failed, skipped = (len(self.having(status)) for status in Status)
        return f"{passed} passed, {failed} failed, {skipped} skipped"


def write_report(report: Report, folder: Path, logs: Path) -> None:
    """
    Args:
        report: to write.
        folder: for report.md, report.json and, where something failed, the archive.
        logs: folder that goes into the archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(_as_json(report), indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(lines_of(report)) + "\n")
    (folder / ARCHIVE).unlink(missing_ok=True)
    if report.having(Status.FAILS):
        with tarfile.open(folder / ARCHIVE, "w:gz") as archive:
            for path in (folder / "report.json", folder / "report.md", logs):
                if path.exists():
                    archive.add(path, arcname=f"gpu_check/{path.name}")


def read_report(path: Path) -> Report:
    """What `write_report` wrote as report.json."""
    found = json.loads(path.read_text())
    machine = Machine.from_json(found["machine"])
    outcomes = tuple(map(Outcome.from_json, found["outcomes"]))
    return Report(**{**found, "machine": machine, "outcomes": outcomes, "pictures": tuple(found["pictures"])})


def _as_json(report: Report) -> dict[str, Any]:
    return {**vars(report), "machine": asdict(report.machine), "outcomes": [each.as_json() for each in report.outcomes]}


def lines_of(report: Report) -> Iterator[str]:
    """The lines of report.md."""
    yield f"# megatron_distopt {VERSION} on {report.machine.name}"
    yield ""
    yield f"**{report.counts}** in {report.seconds:.0f} s, {report.date}. Command: `{report.command}`"
    if report.note:
        yield from ("", report.note)
    yield from _failures(report.having(Status.FAILS))
    yield from _machine(report.machine)
    for subject in SUBJECTS:
        here = [each for each in report.outcomes if each.subject == subject]
        if here:
            yield from ("", f"## {subject.capitalize()}", "")
            yield from _table_of(here)
            yield from _DETAILS[subject](here)
            yield from _pictures(report.pictures, subject)
    yield from _for_the_docs(report)
    yield from _to_send(report)


def _failures(failed: Sequence[Outcome]) -> Iterator[str]:
    if failed:
        yield from ("", "## What failed", "")
        for each in failed:
            yield f"- **{each.title}** (`{each.check}`, {_ranks(each.ranks)}): {each.detail}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _machine(machine: Machine) -> Iterator[str]:
    yield from ("", "## Machine", "", "| | |", "|---|---|")
    gib = f"{machine.memory_nbytes / 2**30:.0f} GiB"
    yield f"| devices | {machine.name}, {gib} free, torch calls it `{machine.device}` |"
    yield f"| collectives | {machine.backend}, at most {_ranks(machine.count)} |"
    yield f"| host | {machine.host}, Python {machine.python} |"
    there = [f"{name} {version}" for name, version in machine.versions.items() if version != "not installed"]
    absent = [name for name, version in machine.versions.items() if version == "not installed"]
    yield f"| software | {', '.join(there)} |"
    if machine.built_for:
        yield f"| torch is built for | {machine.built_for} |"
    yield f"| not installed | {', '.join(absent) or 'nothing that matters here'} |"


def _table_of(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A line a check and a column a number of ranks; what a check says is that of most ranks."""
    counts = sorted({each.ranks for each in outcomes})
    yield f"| what is checked | {' | '.join(map(_ranks, counts))} | |"
    yield f"|---|{'---|' * len(counts)}---|"
    for check in dict.fromkeys(each.check for each in outcomes):
        found = {each.ranks: each for each in outcomes if each.check == check}
        last = found[max(found)]
        cells = [_result(found[count]) if count in found else "" for count in counts]
        detail = last.detail.replace("|", r"\|")
        yield f"| {last.title} | {' | '.join(cells)} | {detail} |"


def _result(outcome: Outcome) -> str:
    status = outcome.status.value
    return f"**{status}**" if outcome.status is Status.FAILS else status


def _speed(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for each in outcomes:
        if each.check in ("step", "train") and each.figures.get("contestants"):
            yield from ("", f"### {each.title.capitalize()}: {_ranks(each.ranks)}", "")
            yield from _times(each)
    yield from _exposed(outcomes)


def _times(outcome: Outcome) -> Iterator[str]:
    contestants = outcome.figures["contestants"]
    found = [statistics.median(each["seconds"]) for each in contestants if each["name"] == "ours" and each["seconds"]]
    ours = found[0] if found else None
    yield f"{outcome.figures['numel'] / 1e6:.1f} million elements; medians of interleaved rounds."
    yield from ("", "| | ms | least to most | / ours | rounds | |", "|---|--:|--:|--:|--:|---|")
    for each in contestants:
        yield _times_row(each, ours)


def _times_row(each: Mapping[str, Any], ours: float | None) -> str:
    seconds = each["seconds"]
    if not seconds:
        return f"| {each['name']} | | | | | {each['why_not']} |"
    median = statistics.median(seconds)
    ratio = f"{median / ours:.2f}" if ours else ""
    spread = f"{1e3 * min(seconds):.3g} to {1e3 * max(seconds):.3g}"
    return f"| {each['name']} | {1e3 * median:.3g} | {spread} | {ratio} | {len(seconds)} | {each['why_not']} |"


def _exposed(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Communication that a step waits for, as a part of it."""
    for train in (each for each in outcomes if each.check == "train" and each.figures):
        for alone in (each for each in outcomes if each.check == "alone" and each.figures):
            if train.ranks == alone.ranks:
                yield from ("", f"### Exposed communication: {_ranks(train.ranks)}", "")
                yield "The part of a step that it takes longer than the same step without any communication."
                yield from _care(busier(train.figures, alone.figures))
                yield from ("", "| | % of a step |", "|---|--:|")
                for name, part in exposed_parts(train.figures, alone.figures).items():
                    yield f"| {name} | {100 * part:.0f} |"


def _care(ratio: float | None) -> Iterator[str]:
    """The two runs that are compared come one after the other; something else may have run during one of them."""
    if ratio is not None and abs(ratio - 1) > _BUSY:
        yield "The machine was not quiet: forward and backward alone, which do not communicate, took "
        yield f"{ratio:.2f} times as long in the second run as in the first. Take these figures with care."


def _memory(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if not outcome.figures.get("contestants"):
            continue
        goal = f"6 + 12/n = {outcome.figures['target']:.2f}"
        yield from ("", f"### Bytes an element: {_ranks(outcome.ranks)}, {goal}", "")
        yield from ("| | held between steps | peak of a step | peak of building | |", "|---|--:|--:|--:|---|")
        for each in outcome.figures["contestants"]:
            cells = [f"{each[name] / each['numel']:.2f}" for name in ("held", "step_peak", "build_peak")]
            cells = ["", "", ""] if each["why_not"] else cells
            yield f"| {' | '.join([each['contestant'], *cells, each['why_not']])} |"


def _nothing(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield from ()


_DETAILS = {"correctness": _nothing, "memory": _memory, "speed": _speed}
_PICTURES_OF = {"memory": ("memory.png",), "speed": ("step.png", "train.png", "exposed.png")}


def _pictures(names: Sequence[str], subject: str) -> Iterator[str]:
    for name in _PICTURES_OF.get(subject, ()):
        if name in names:
            yield from ("", f"![{name.removesuffix('.png')}]({name})")


class Tried(NamedTuple):
    """A row of the first table of docs/hosts.md."""

    host: str
    version: str
    what: str
    where: str
    date: str
    result: str


def tried_of(report: Report) -> list[Tried]:
    """The lines of docs/hosts.md: plain torch, and each host that was run."""
    found = [each for each in report.outcomes if each.subject == "correctness"]
    rows = []
    plain = [each for each in found if each.check not in _HOSTS]
    if any(each.status is not Status.SKIPPED for each in plain):
        torch = f"torch {report.machine.versions['torch']}"
        rows.append(_tried(report, "plain (any torch module)", torch, plain))
    for check, host in _HOSTS.items():
        here = [each for each in found if each.check == check and each.status is not Status.SKIPPED]
        if here:
            rows.append(_tried(report, host, here[0].figures.get("version", report.machine.versions["torch"]), here))
    return rows


def _tried(report: Report, host: str, version: str, outcomes: Sequence[Outcome]) -> Tried:
    machine = report.machine
    ran = [each for each in outcomes if each.status is not Status.SKIPPED]
    failed = [each for each in ran if each.status is Status.FAILS]
    ranks = ", ".join(map(str, sorted({each.ranks for each in ran})))
    names = ", ".join(dict.fromkeys(each.check for each in ran))
    where = f"{machine.name}, {machine.backend}, torch {machine.versions['torch']}, Python {machine.python}"
    wrong = ", ".join(dict.fromkeys(each.check for each in failed))
    result = f"{len(failed)} of {len(ran)} checks fail: {wrong}" if failed else "passes"
    return Tried(host, version, f"`scripts/gpu_check.sh`: {names}; DP {ranks}", where, report.date, result)


def _for_the_docs(report: Report) -> Iterator[str]:
    rows = tried_of(report)
    if not rows:
        return
    yield from ("", "## The line to add to docs/hosts.md", "", "In its first table:", "", f"{_BACKTICKS}")
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield _BACKTICKS


def _to_send(report: Report) -> Iterator[str]:
    yield ""
    if report.having(Status.FAILS):
        yield "## What to send"
        yield ""
        yield f"`{ARCHIVE}`, next to this file, which holds this report, `report.json` and what all ranks printed."
        yield "It names hardware, software and paths of this machine, and has no data of yours. Open an issue with it."
        return
    yield "## What to send"
    yield ""
    yield "Nothing failed. `report.json` and the lines above are what a pull request to docs/hosts.md needs."
