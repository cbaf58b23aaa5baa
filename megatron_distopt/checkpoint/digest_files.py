"""The files in which ranks write digests, and reading them back as one run.

[Note: digest files] A folder has one folder for each start of the run, `start-0001` and so on, and in it one file a
rank, `rank-00000.jsonl`, so that no rank waits for another one. Its first line says what the run is, every further one
what the rank counts of one step: to be added up over ranks mod 2**64. A start is a process that begins to train, or a
checkpoint that a running one loads. It says after which step it begins, and takes the place of all later steps of the
starts before it, as training does that is resumed from a checkpoint. Nothing is ever overwritten.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_distopt.checkpoint.digests import DigestKey
from megatron_distopt.errors import CheckpointError, refusal

_FORMAT, _VERSION = "megatron-distopt digests", 1
_START, _RANK = "start-{:04d}", "rank-{:05d}.jsonl"
_START_PATTERN, _RANK_PATTERN = re.compile(r"start-(\d{4,})"), re.compile(r"rank-(\d{5,})\.jsonl")
_MODULUS = 1 << 64


@dataclass(frozen=True)
class Start:
    """The beginning of a run, or of its continuation.

    Args:
        step: steps so far.
        every: steps between two records.
        num_ranks: that write.
        about: what may explain that two runs differ, such as sizes and versions.
    """

    step: int
    every: int
    num_ranks: int
    about: Mapping[str, str | int]


@dataclass(frozen=True)
class LoggedStep:
    """What is known about a step; of the moment after it, but for the gradients.

    Args:
        number: of the step; 0 before the first one.
        digests: of all that was logged.
        dtypes: in which values of a kind were kept.
        facts: numbers of the step, such as its learning rates; the same on all ranks. Empty for a start.
    """

    number: int
    digests: Mapping[DigestKey, int]
    dtypes: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedRun:
    """All that a run has logged.

    Args:
        path: where.
        starts: in their order.
        steps: by number; also those of a start where there is no other record of the step.
        changed: steps at which a start found another state than the run had had there.
        incomplete: why the last steps are left out; empty where none is.
    """

    path: Path
    starts: Sequence[Start]
    steps: Mapping[int, LoggedStep]
    changed: Mapping[int, Sequence[DigestKey]]
    incomplete: str = ""


def is_digests(path: Path) -> bool:
    """Whether digests were written there: the folder of a run, or that of one start."""
    return bool(_starts_of(path))


def next_start(folder: Path) -> int:
    """The number that the next start in a folder has on this rank."""
    return max(_starts_of(folder), default=0) + 1


def _starts_of(path: Path) -> dict[int, Path]:
    """Folders of starts by number: of a run, of the one start, or of the start that a rank's file belongs to."""
    path = path.resolve()
    path = path.parent if path.is_file() and _RANK_PATTERN.fullmatch(path.name) else path
    own = _START_PATTERN.fullmatch(path.name)
    if own and path.is_dir():
        return {int(own[1]): path} if any(_rank_files(path)) else {}
    inside = [each for each in path.iterdir() if each.is_dir()] if path.is_dir() else []
    found = {int(match[1]): each for each in inside if (match := _START_PATTERN.fullmatch(each.name))}
    return dict(sorted(found.items()))


def _rank_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.iterdir()):
        match = _RANK_PATTERN.fullmatch(path.name)
        if match:
            yield int(match[1]), path


class DigestWriter:
    """Writes the file of one rank and one start.

    Args:
        folder: of the run; made where it is missing.
        number: of the start.
        rank: of this file.
        start: see `Start`.

    Raises:
        CheckpointError: nothing can be written there.
    """

    def __init__(self, folder: Path, number: int, rank: int, start: Start) -> None:
        self._path = folder / _START.format(number) / _RANK.format(rank)
        self._names: tuple[str, ...] = ()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            about = {"format": _FORMAT, "version": _VERSION, "rank": rank, "ranks": start.num_ranks}
            self._append({**about, "step": start.step, "every": start.every, "about": dict(start.about)}, mode="x")
        except OSError as error:
            remedy = "Write digest_folder= or --distopt-digest-folder with a folder that all ranks can write to"
            raise CheckpointError(
                refusal(f"digest folder {folder}", error, "be a folder that can be written to", remedy)
            ) from error

    def write(self, step: LoggedStep) -> None:
        """Appends what this rank counts of a step.

        Raises:
            OSError
        """
        names = tuple(dict.fromkeys(key.name for key in step.digests))
        if names != self._names:
            self._append({"params": list(names)})
            self._names = names
        kinds = dict.fromkeys(key.kind for key in step.digests)
        digests = {kind: [_as_text(step.digests.get(DigestKey(kind, name))) for name in names] for kind in kinds}
        self._append({"step": step.number, **step.facts, "dtypes": dict(step.dtypes), "digests": digests})

    def _append(self, record: Mapping[str, Any], mode: str = "a") -> None:
        """One line in one call, so that a run that is killed leaves at most its last line unfinished."""
        with self._path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":")) + os.linesep)


def _as_text(digest: int | None) -> str | None:
    return None if digest is None else f"{digest % _MODULUS:x}"


@dataclass(frozen=True)
class _RankFile:
    """The file of one rank: its start, what it logged at the start, and the steps after that by number."""

    start: Start
    first: LoggedStep | None
    steps: Mapping[int, LoggedStep]


def read_run(path: Path) -> LoggedRun:
    """Reads all starts of a run, or one of them, and adds up what the ranks counted.

    Raises:
        CheckpointError: a file is missing or is not what it should be; only the last line of a file may be cut off.
    """
    starts, steps, changed, incomplete = list[Start](), dict[int, LoggedStep](), dict[int, list[DigestKey]](), ""
    for folder in _starts_of(path).values():
        files = [_read_file(file) for _, file in _rank_files(folder)]
        if not files:  # the run ended before its first step
            continue
        start = _check_complete(folder, files)
        starts.append(start)
        steps = {number: step for number, step in steps.items() if number <= start.step}
        changed = {number: keys for number, keys in changed.items() if number < start.step}
        first = _state_of_start(files)
        if first is not None:
            different = differing(steps.setdefault(start.step, first), first)
            changed |= {start.step: different} if different else {}
        of_start, incomplete = _common_steps(files)
        steps |= of_start
    if not starts:
        rule, remedy = "hold what a run has logged", "Log digests with --distopt-log-digests 100"
        raise CheckpointError(refusal(f"digests {path}", "no files of ranks", rule, remedy))
    return LoggedRun(path, starts, steps, changed, incomplete)


def differing(one: LoggedStep, other: LoggedStep) -> list[DigestKey]:
    """What both have of the same dtype and with different digests, in the order of the first."""
    both = (key for key in one.digests if key in other.digests and one.dtypes[key.kind] == other.dtypes[key.kind])
    return [key for key in both if one.digests[key] != other.digests[key]]


def _state_of_start(files: Sequence[_RankFile]) -> LoggedStep | None:
    """What all ranks logged as the start began; None where one of them was ended before."""
    parts = [file.first for file in files if file.first is not None]
    return _added_up(parts) if len(parts) == len(files) else None


def _check_complete(folder: Path, files: Sequence[_RankFile]) -> Start:
    """Checks that all ranks are there and of one start."""
    start = files[0].start
    odd = [file.start for file in files if (file.start.step, file.start.num_ranks) != (start.step, start.num_ranks)]
    if odd or len(files) != start.num_ranks:
        got = f"{len(files)} files of a run with {start.num_ranks} ranks" if not odd else "files of different runs"
        rule, remedy = "hold one file for each rank", "Copy the folder from all machines that wrote to it, into one"
        raise CheckpointError(refusal(f"digests {folder}", got, rule, remedy))
    return start


def _common_steps(files: Sequence[_RankFile]) -> tuple[dict[int, LoggedStep], str]:
    """Steps that all ranks have written, and why others are left out."""
    numbers = sorted(set.union(*(set(file.steps) for file in files)))
    found, left_out = dict[int, LoggedStep](), list[int]()
    for number in numbers:
        parts = [file.steps[number] for file in files if number in file.steps]
        whole = _added_up(parts)
        if whole is not None and len(parts) == len(files):
            found[number] = whole
        else:
            left_out.append(number)
    if not left_out:
        return found, ""
    missing = [str(rank) for rank, file in enumerate(files) if left_out[-1] not in file.steps]
    return found, f"step {left_out[-1]} is left out: rank {', '.join(missing)} had not written it"


def _added_up(parts: Iterable[LoggedStep]) -> LoggedStep | None:
    digests, dtypes, first = dict[DigestKey, int](), dict[str, set[str]](), None
    for part in parts:
        first = first or part
        for key, digest in part.digests.items():
            digests[key] = (digests.get(key, 0) + digest) % _MODULUS
        for kind, dtype in part.dtypes.items():
            dtypes.setdefault(kind, set()).update(dtype.split(","))
    joined = {kind: ",".join(sorted(found)) for kind, found in dtypes.items()}
    return None if first is None else LoggedStep(first.number, digests, joined, first.facts)


def _read_file(path: Path) -> _RankFile:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    is_cut = bool(lines) and not lines[-1].endswith("\n")
    records = [_record(path, number, line) for number, line in enumerate(lines[:-1] if is_cut else lines, start=1)]
    if not records or records[0].get("format") != _FORMAT or records[0].get("version") != _VERSION:
        raise _damaged(path, f"no first line of {_FORMAT}, version {_VERSION}")
    try:
        return _of_records(records)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _record(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _damaged(path, f"line {number} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise _damaged(path, f"line {number} is no record")
    return record


def _of_records(records: Sequence[Mapping[str, Any]]) -> _RankFile:
    head, names = records[0], list[str]()
    start = Start(int(head["step"]), int(head["every"]), int(head["ranks"]), dict(head["about"]))
    first: LoggedStep | None = None
    steps: dict[int, LoggedStep] = {}
    for record in records[1:]:
        if "params" in record:
            names = [str(name) for name in record["params"]]
            continue
        facts = {key: value for key, value in record.items() if key not in ("step", "dtypes", "digests")}
        step = LoggedStep(int(record["step"]), dict(_digests(record["digests"], names)), record["dtypes"], facts)
        if not facts:
            first = step
        else:
            steps[step.number] = step
    return _RankFile(start, first, steps)


def _digests(kinds: Mapping[str, Sequence[str | None]], names: Sequence[str]) -> Iterator[tuple[DigestKey, int]]:
    for kind, texts in kinds.items():
        for name, text in zip(names, texts, strict=True):
            if text is not None:
                yield DigestKey(kind, name), int(text, 16)


def _damaged(path: Path, got: str) -> CheckpointError:
    remedy = "Remove it, or compare another run"
    return CheckpointError(refusal(f"digests {path}", got, "be what --distopt-log-digests wrote", remedy))
