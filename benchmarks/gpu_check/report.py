"""What was found, as files: report.md to read, report.json to keep, and an archive to send where
something failed."""

from __future__ import annotations

import json
import statistics
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_check.checks import SUBJECTS, Outcome, Status
from gpu_check.machine import Machine
from megatron_distopt.version import VERSION

ARCHIVE = "gpu_check_to_send.tar.gz"
_HOSTS = {"megatron_core": "megatron-core", "megatron_2023": "a small fork of 2023"}
_PLAIN = "plain (any torch module)"


@dataclass(frozen=True)
class Report:
    """Everything that a run found."""

    machine: Machine  # that it ran on
    outcomes: tuple[Outcome, ...]  # in the order in which they were run
    date: str  # year-month-day
    seconds: float  # that it took
    command: str  # that was typed
    note: str = ""  # what a reader has to know besides, such as that the run was interrupted

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


def _as_json(report: Report) -> dict[str, Any]:
    return {
        **vars(report),
        "machine": asdict(report.machine),
        "outcomes": [each.as_json() for each in report.outcomes],
    }


def lines_of(report: Report) -> Iterator[str]:
    """The lines of report.md."""
    yield f"# megatron_distopt {VERSION} on {report.machine.name}"
    yield ""
    yield (
        f"**{report.counts}** in {report.seconds:.0f} s, {report.date}. Command: `{report.command}`"
    )
    if report.note:
        yield from ("", report.note)
    yield from _failures(report.having(Status.FAILS))
    yield from _machine(report.machine)
    for subject in SUBJECTS:
        here = [each for each in report.outcomes if each.subject == subject]
        if here:
            yield from ("", f"## {subject.capitalize()}", "")
            yield from _table_of(here)
            yield from _speed(here) if subject == "speed" else _memory(here)
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
    there = [
        f"{name} {version}"
        for name, version in machine.versions.items()
        if version != "not installed"
    ]
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
        if each.check in ("step", "forms", "train") and each.figures.get("contestants"):
            yield from ("", f"### {each.title.capitalize()}: {_ranks(each.ranks)}", "")
            yield from _times(each)


def _times(outcome: Outcome) -> Iterator[str]:
    contestants = outcome.figures["contestants"]
    found = [
        statistics.median(each["seconds"])
        for each in contestants
        if each["name"] == "ours" and each["seconds"]
    ]
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
    return (
        f"| {each['name']} | {1e3 * median:.3g} | {spread} | {ratio} | {len(seconds)} | "
        f"{each['why_not']} |"
    )


def _memory(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if not outcome.figures.get("contestants"):
            continue
        goal = f"6 + 12/n = {outcome.figures['target']:.2f}"
        yield from ("", f"### Bytes an element: {_ranks(outcome.ranks)}, {goal}", "")
        yield from (
            "| | held between steps | peak of a step | peak of building | |",
            "|---|--:|--:|--:|---|",
        )
        for each in outcome.figures["contestants"]:
            cells = [
                f"{each[name] / each['numel']:.2f}" for name in ("held", "step_peak", "build_peak")
            ]
            cells = ["", "", ""] if each["why_not"] else cells
            yield f"| {' | '.join([each['contestant'], *cells, each['why_not']])} |"


def _for_the_docs(report: Report) -> Iterator[str]:
    """Rows of the table of docs/hosts.md: plain torch, and each host that was run."""
    ran = [
        each
        for each in report.outcomes
        if each.subject == "correctness" and each.status is not Status.SKIPPED
    ]
    machine, torch = report.machine, f"torch {report.machine.versions['torch']}"
    where = f"{machine.name}, {machine.backend}, {torch}, Python {machine.python}"
    rows = []
    for host in dict.fromkeys(_HOSTS.get(each.check, _PLAIN) for each in ran):
        here = [each for each in ran if _HOSTS.get(each.check, _PLAIN) == host]
        names, ranks = (
            dict.fromkeys(each.check for each in here),
            sorted({each.ranks for each in here}),
        )
        failed = [each for each in here if each.status is Status.FAILS]
        wrong = (
            f"{len(failed)} of {len(here)} checks fail: "
            f"{', '.join(dict.fromkeys(each.check for each in failed))}"
        )
        what = f"`scripts/gpu_check.sh`: {', '.join(names)}; DP {', '.join(map(str, ranks))}"
        version = here[0].figures.get("version", torch)
        rows.append(
            f"| {host} | {version} | {what} | {where} | {report.date} | "
            f"{wrong if failed else 'passes'} |"
        )
    if rows:
        yield from ("", "## The lines to add to docs/hosts.md", "", "```", *rows, "```")


def _to_send(report: Report) -> Iterator[str]:
    yield ""
    if report.having(Status.FAILS):
        yield "## What to send"
        yield ""
        yield (
            f"`{ARCHIVE}`, next to this file, which holds this report, `report.json` and what all "
            "ranks printed."
        )
        yield (
            "It names hardware, software and paths of this machine, and has no data of yours. Open "
            "an issue with it."
        )
        return
    yield "## What to send"
    yield ""
    yield (
        "Nothing failed. `report.json` and the lines above are what a pull request to "
        "docs/hosts.md needs."
    )
