"""Removes every wait of the package once, on a copy, to see that the simulated accelerator finds what is missing.

python -m tests.sim.removals              # all of them, writes docs/simulator.md
python -m tests.sim.removals pairwise     # those of files with that in their name, prints what is found
"""

from __future__ import annotations

import ast
import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.sim import host_programs, programs
from tests.sim.test_streams import streams_are_right
from tests.sim.trial import begin, differs
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import RankError, run_ranks

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "megatron_distopt"
PAGE = ROOT / "docs" / "simulator.md"
#: A removal is looked for under so many seeds.
SEEDS = 30
#: Calls that make a stream or the host wait, or tell the allocator of a stream.
WAITS = {
    *("wait", "finish", "finish_params", "finish_gather", "finish_param_gather", "finish_grads", "mark", "fence"),
    *("keep_for_current_stream", "wait_for_streams", "param_needed", "wait_for", "_wait_for", "record_stream"),
    *("record_event", "wait_stream", "wait_event", "synchronize", "_wait", "_has_ended"),
}
#: Files with waits for threads, processes and other ranks, and none for a device.
HOST_ONLY = (
    *("comm/pending.py", "comm/shared_memory.py", "comm/meeting.py", "comm/groups.py", "hosts/saver.py"),
    *("hosts/handshake.py", "plugin/", "cli/", "formats/", "checkpoint/save.py", "checkpoint/load.py"),
    *("hosts/megatron_core/checkpoint.py", "checkpoint/disk.py", "checkpoint/tensor_file.py", "hosts/fixes.py"),
    "hosts/megatron_2023/ezpz.py",
)
_NO_TIME = "CommTime(0.0, 0.0)"
#: Among the programs: the tests of tests/sim/test_streams.py.
_STREAMS = "streams"


@dataclass(frozen=True)
class Removal:
    """One wait that is taken away.

    Args:
        path: of the file in the package.
        code: what is there; the only one, or the first one behind `behind`.
        instead: what is put in its place.
        programs: of tests/sim/programs.py, or "fork: ..." and "core: ..." of host_programs.py, or `_STREAMS`.
        behind: text before it.
        why: no program can see it; None where one has to.
    """

    path: str
    code: str
    instead: str
    programs: tuple[str, ...]
    behind: str = ""
    why: str | None = None

    def apply(self, package: Path) -> None:
        file = package / self.path
        text = file.read_text()
        start = text.index(self.behind) if self.behind else 0
        at = text.index(self.code, start)
        file.write_text(text[:at] + self.instead + text[at + len(self.code) :])

    @property
    def name(self) -> str:
        return f"{self.path}: `{self.code.strip()}`" + (f" behind `{self.behind.strip()}`" if self.behind else "")


_PLAIN = ("bf16 overlap", "fp32 overlap", "step on a stream")
_REDUCED = ("reduced in bf16, step on a stream", "reduced in bf16, forward on a stream", "reduced in bf16")
_COMM, _GATHER, _TORCH = "comm/communicator.py", "hosts/torch/gather.py", "hosts/torch/checkpoint.py"
_OPT, _2023 = "hosts/torch/optimizer.py", "hosts/megatron_2023/communication.py"
_GRADS, _HOST = "hosts/torch/grads.py", "optimizer/offload.py"
_BEHIND = ("params read behind torch",)
_FORK = ("fork: bf16 overlap, fp32 norms",)
_OWN = "it reads what this rank owns, which a gather does not change; params that the user changed are read by torch"
_AGAIN = (
    "the next step, gather or read of a param waits as well, and the small fork reads every param in its forward pass"
)

REMOVALS = (
    Removal("comm/pairwise.py", "self._work.wait()", "pass", _REDUCED),
    Removal("comm/pairwise.py", "keep_for_current_stream(self._sent)", "pass", _REDUCED),
    Removal("comm/pairwise.py", "keep_for_current_stream(self._received)", "pass", _REDUCED),
    Removal("comm/collectives.py", "how.reduce_dtype).wait()", "how.reduce_dtype)", _REDUCED[2:]),
    Removal("comm/travel.py", "work.wait()", "pass", ("muon", "muon, overlap")),
    Removal("comm/timing.py", "seconds = each.wait()", "seconds = 0.0", _PLAIN),
    Removal(_COMM, "wait_for_streams(self._streams", "(lambda *_: 0)(self._streams", (_STREAMS,)),
    Removal(_COMM, "self._grads.wait(list(self._grads.under_way))", _NO_TIME, _PLAIN),
    Removal(_COMM, "self._params.wait([number])", _NO_TIME, _PLAIN),
    Removal(_COMM, "if _has_ended(pending):", "if True:", ("bf16 overlap, two streams",)),
    Removal(_COMM, "self._published.get(", "{}.get(", (_STREAMS,)),
    Removal(_COMM, "self._published[id(buffer)] = fence(buffer.param.device)", "pass", (_STREAMS,)),
    Removal(_COMM, "self._wait_for([number])", "pass", _PLAIN),
    Removal(_COMM, "self._wait_for(tuple(self._params.under_way))", "pass", _BEHIND),
    Removal("device.py", "here.wait_stream(stream)", "pass", (_STREAMS,)),
    Removal("device.py", "current_stream(device).wait_event(event)", "None", (_STREAMS,)),
    Removal("device.py", "tensor.record_stream(current_stream(tensor.device))", "pass", _REDUCED),
    Removal(
        "device.py",
        "current_stream(device).record_event().synchronize",
        "bool",
        ("nan raise", "saved in the background"),
    ),
    Removal("optimizer/deferred.py", "self._wait()", "pass", ("nan raise", "nan skip")),
    Removal("optimizer/deferred.py", "keep_for_current_stream(self._numbers)", "pass", ("step on a stream",)),
    Removal(_HOST, "fence(self._device), []", "bool, []", ("host half",)),
    Removal(_HOST, "mark(self._device)", "bool", ("host half",)),
    Removal(_HOST, "uploaded = fence(self._device)", "uploaded = bool", ("host half", "host all")),
    Removal("checkpoint/background.py", "mark(self._device)()", "pass", ("saved in the background",)),
    Removal("hosts/torch/step.py", "gathered = model.gather.finish()", f"gathered = {_NO_TIME}", _PLAIN),
    Removal(_GATHER, "_wait_for(args)", "pass", (*_PLAIN, "weights changed")),
    Removal(_GATHER, "_wait_for((kwargs or {}).values())", "pass", ("params by keyword",)),
    Removal(_GATHER, "_wait_for(value)", "pass", ("params in a list",), behind="(list, tuple)"),
    Removal(_GATHER, "self._communicator.param_needed(name)", "True", _PLAIN),
    Removal(_GATHER, "time = self._communicator.finish_params()", f"time = {_NO_TIME}", _BEHIND),
    Removal(
        _GATHER, "gather.finish()", "pass", ("model copied",), "def _settled", "it restores the class; a copy waits"
    ),
    Removal(_GATHER, "_wait_for(self._params)", "pass", ("a module without torch functions",)),
    Removal(_GRADS, "self._communicator.finish_grads()", _NO_TIME, _PLAIN),
    Removal(
        "hosts/torch/grads.py", "self._communicator.finish_grads()", "pass", ("a round dropped",), "def _drop_round"
    ),
    Removal(_OPT, "self._model.gather.finish()", "pass", _BEHIND),
    Removal(
        "hosts/torch/optimizer.py", "self.finish_param_gather()", "pass", ("weights written behind torch",), why=_OWN
    ),
    Removal(_TORCH, "self._model.gather.finish()", "pass", ("state read",), "def full_state_dict", _OWN),
    Removal(_TORCH, "self._model.gather.finish()", "pass", ("state read",), "def state_dict", _OWN),
    Removal(_TORCH, "self._model.gather.finish()", "pass", ("saved in the background",), behind="def _before_state"),
    Removal(_2023, "self._communicator.finish_grads()", _NO_TIME, _FORK),
    Removal(_2023, "gathered = self._params.finish()", f"gathered = {_NO_TIME}", _FORK, why=_AGAIN),
    Removal(
        "hosts/megatron_2023/communication.py", "self._params.finish()", _NO_TIME, _FORK, "def finish_gather", _AGAIN
    ),
    Removal(
        "hosts/megatron_2023/optimizer.py", "self.finish_param_gather()", "pass", _FORK, "phases(args, timers)", _AGAIN
    ),
)


#: Lines that wait and are not taken away, with the reason.
_MESSAGES = "for messages between tensors of the CPU"
_THREAD = "for a thread that writes a checkpoint"
_CALLER = "every step has waited for the same gather before; for callers who gather without a step"
_BY_NAME = "calls what is taken away in the function of that name"
_GONE = "what waits for it is taken away"
_SLOW = "tests/hosts/test_megatron_2023_overlap.py, on the CPU with gathers that are slow"
#: By file and line.
_KEPT: dict[str, dict[str, str]] = {
    "checkpoint/background.py": {"self.finish()": _THREAD, "task.written.wait()": _THREAD},
    "comm/communicator.py": {"self.finish_params()": _CALLER},
    "comm/pairwise.py": dict.fromkeys(
        ("wait(sent)", "wait(received)", "wait(self.received)", "wait(works)"), _MESSAGES
    ),
    "comm/travel.py": {"wait(self._messages)": _MESSAGES},
    "device.py": {"event = current_stream(device).record_event()": _GONE},
    "optimizer/owners/exchange.py": dict.fromkeys(("under_way.wait()", "returning.pop(0)[0].wait()"), _BY_NAME),
    "hosts/megatron_2023/built.py": {"self.communication.finish_gather()": _BY_NAME},
    "hosts/megatron_2023/checkpoint.py": {
        "self._optimizer.finish_param_gather()": _SLOW,
        "self._saver.finish()  # what is being saved may be what is to be loaded": _THREAD,
    },
    "hosts/megatron_2023/communication.py": {
        "self.finish_gather()": _CALLER,
        "self._communicator.finish_grads()": "where a round ends without a step, as in hosts/torch/grads.py",
    },
    "hosts/megatron_2023/optimizer.py": {
        "self.finish_param_gather()": "before params are reloaded, which a fork does at its start",
        "self._used.mark()": "marks gradients, not a device",
    },
    "hosts/torch/checkpoint.py": {"self._saver.finish()": _THREAD},
    "hosts/torch/gather.py": {
        "self.finish()": f"{_CALLER}; and for torch's compiler, which does not compile for the simulator",
        "gather.wait_for(value)": _BY_NAME,
        "self._communicator.finish_params()": "where params are waited for in the step itself",
        "_wait_for(value.values())": "no function of torch takes a dict of params",
    },
    "optimizer/deferred.py": {"self._wait = mark(numbers.device)": _GONE},
}
KEPT = {f"{path}: {line}": why for path, lines in _KEPT.items() for line, why in lines.items()}


def waits_of(package: Path) -> Iterator[str]:
    """Every line of the package that waits, as "path: line"."""
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        if path.startswith(HOST_ONLY):
            continue
        lines = file.read_text().splitlines()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and _name_of(node.func) in WAITS:
                yield f"{path}: {lines[node.lineno - 1].strip()}"


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def line_of(removal: Removal, package: Path) -> str:
    """The line that it changes, as `waits_of` shows it."""
    text = (package / removal.path).read_text()
    at = text.index(removal.code, text.index(removal.behind) if removal.behind else 0)
    line = text[text.rindex("\n", 0, at) + 1 : text.index("\n", at)]
    return f"{removal.path}: {line.strip()}"


def find(removal: Removal) -> str | None:
    """The program and the seed that show that a wait is missing, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(
            ROOT / "megatron_distopt", copy / "megatron_distopt", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("tests", "examples", "benchmarks"):
            (copy / name).symlink_to(ROOT / name)
        removal.apply(copy / "megatron_distopt")
        for program in removal.programs:
            (copy / "expected").write_bytes(b"" if program == _STREAMS else _expected_of(program))
            found = _find_with(copy, program)
            if found:
                return f"{program}, {found}"
    return None


def _find_with(copy: Path, program: str) -> str | None:
    """What the package of a folder does wrong, in a process of its own."""
    path = os.pathsep.join((str(copy), str(copy / "examples")))
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.removals", "--try", program]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} in {copy}: {done.stderr[-2000:]}")
    found = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    return found[0].removeprefix("found: ") if found else None


@functools.cache
def _expected_of(program: str) -> bytes:
    """What the whole package leaves on the CPU, by rank: one that lacks a call may be wrong there as well."""
    return pickle.dumps(run_ranks(_train_on_cpu, 2, program))


def _train_on_cpu(rank: int, size: int, program: str) -> Any:
    begin()
    take_over_world()
    return _train(program, "cpu", rank)


def _train(program: str, device: str, rank: int) -> Any:
    host, _, name = program.rpartition(": ")
    return host_programs.train(host, name, device) if host else programs.train(name, device, rank)


def _first_found(rank: int, size: int, program: str, seeds: int, expected: list[Any]) -> str | None:
    """Collective: what the first seed finds under which any rank finds something."""
    begin()
    take_over_world()
    for seed in range(seeds):
        everyones: list[str | None] = [None] * size
        found = differs(lambda device: _train(program, device, rank), seed, expected[rank])
        dist.all_gather_object(everyones, found)
        if any(everyones):
            return f"seed {seed}"
    return None


def _try(program: str) -> None:
    """Of a process with the copy of the package: prints what is found."""
    if program == _STREAMS:
        wrong = [name for name, is_right in streams_are_right().items() if not is_right]
        sys.stdout.write(f"found: {wrong[0]}\n" if wrong else "")
        return
    expected = pickle.loads(Path("expected").read_bytes())
    try:
        found = run_ranks(_first_found, 2, program, SEEDS, expected, seconds=100)[0]
    except RankError as error:
        cause = type(error.__cause__).__name__
        found = "ranks that wait for each other" if error.__cause__ is None else f"an error ({cause})"
    sys.stdout.write(f"found: {found}\n" if found else "")


def _rows(removals: Sequence[Removal]) -> Iterator[str]:
    for removal in removals:
        found = find(removal)
        sys.stderr.write(f"{removal.name}: {found or removal.why or 'NOT FOUND'}\n")
        yield f"| {removal.name} | {found or removal.why or '**not found**'} |"


def main(words: Sequence[str]) -> None:
    if words[:1] == ["--try"]:
        _try(words[1])
        return
    chosen = [each for each in REMOVALS if not words or any(word in each.name for word in words)]
    rows = list(_rows(chosen))
    if not words:
        text = PAGE.read_text()
        begin, end = (text.index(mark) for mark in (_BEGIN, _END))
        PAGE.write_text(text[: begin + len(_BEGIN)] + "\n" + "\n".join((_HEAD, *rows)) + "\n" + text[end:])


_BEGIN, _END = "<!-- removals: begin -->", "<!-- removals: end -->"
_HEAD = "| removed | found by |\n| --- | --- |"

if __name__ == "__main__":
    main(sys.argv[1:])
