"""A training that torchrun starts on nodes that die, and what its processes have noted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support import protected_training
from tests.support.mortal_nodes import Launch, MortalNodes, port_of
from tests.support.protected_training import Plan

_VARIABLES = {
    "LOGLEVEL": os.environ.get("LOGLEVEL", "WARNING"),
    "MEGATRON_DISTOPT_ACCELERATOR": "torch",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass
class Job:
    """A training that torchrun starts on some nodes.

    Args:
        ranks: on each node.
        size: least and largest number of nodes, as torchrun spells it.
        name: of the job, by which its memory is found.
    """

    nodes: MortalNodes
    plan: Plan
    ranks: Sequence[int] = (2, 2)
    size: str = ""
    name: str = ""  # that of the test where none is given
    port: int = 0  # added to that of the name
    restarts: int = 20
    script: Sequence[str] = (str(protected_training.__file__),)  # and its arguments before the plan
    agents: dict[int, Launch] = field(default_factory=dict)

    @cached_property
    def _file(self) -> Path:
        return self.plan.write(Path(f"{self.plan.folder}.json"))

    @property
    def _name(self) -> str:
        return self.name or Path(self.plan.folder).parent.name

    @property
    def endpoint(self) -> int:
        """The port of torchrun's store."""
        return port_of(self._name, self.port)

    def start(self, *nodes: int) -> Job:
        """On these nodes, or on all of them."""
        size = self.size or f"{len(self.ranks)}:{len(self.ranks)}"
        for node in nodes or range(len(self.ranks)):
            self.nodes.boot(node)
            words = [*self.script, str(self._file)]
            line = [
                "--nproc-per-node",
                str(self.ranks[node]),
                "--max-restarts",
                str(self.restarts),
                *words,
            ]
            self.agents[node] = self.nodes.torchrun(
                node, size, line, _VARIABLES, name=self._name, port=self.port
            )
        return self

    def lose(self, *nodes: int) -> None:
        """These nodes lose power at once."""
        self.nodes.kill(*nodes)
        for node in nodes:
            self.agents.pop(node, None)

    def end(self, seconds: float = 300.0) -> Job:
        """Waits for its end, which has to be a success."""
        for agent in self.agents.values():
            assert agent.end(seconds) == 0, self.output
        return self

    def fail(self) -> str:
        """Waits for its end, which has to be a failure; what it wrote."""
        assert all(agent.end(100.0) for agent in self.agents.values()), self.output
        return self.output

    @property
    def output(self) -> str:
        return "\n".join(f"node {node}:\n{agent.output}" for node, agent in self.agents.items())

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What all processes have noted, in order."""
        files = Path(self.plan.folder).glob("*.jsonl")
        found = [
            json.loads(line)
            for file in files
            for line in file.read_text().splitlines()
            if line.endswith("}")
        ]
        return sorted(found, key=lambda line: line["time"])

    def wait_for_step(self, step: int, *, begins: int = 0) -> None:
        """Until a step is done, by a run that has begun so many times before."""

        def is_done() -> bool:
            lines = self.lines
            starts = [
                number for number, line in enumerate(lines) if "source" in line and not line["rank"]
            ]
            return len(starts) > begins and any(
                line.get("step", -1) >= step for line in lines[starts[begins] :]
            )

        wait_until(is_done, self)

    @property
    def begins(self) -> dict[int, tuple[str, int]]:
        """Where the state came from and its step, by start, on rank 0."""
        firsts = [line for line in self.lines if "source" in line and not line["rank"]]
        is_counted = len(self.plan.attempts) > 1  # by the process itself
        numbers = [line["attempt"] for line in firsts] if is_counted else range(len(firsts))
        return {
            n: (line["source"], line["begins_at"]) for n, line in zip(numbers, firsts, strict=True)
        }

    def processes(self, since: float) -> dict[int, int]:
        """Process ids by rank, of those that have begun since then."""
        return {
            line["rank"]: line["pid"]
            for line in self.lines
            if "pid" in line and line["time"] > since
        }

    @property
    def curve(self) -> dict[int, tuple[float, float]]:
        """Loss and learning rate by step; of steps that were done twice the last."""
        return {line["step"]: (line["loss"], line["lr"]) for line in self.lines if "loss" in line}

    @property
    def checksums(self) -> dict[int, str]:
        """By rank, of the state in the end."""
        return {line["rank"]: line["checksum"] for line in self.lines if "checksum" in line}

    def assert_equal(self, other: Job) -> None:
        """This run, from its first step on, went and ended as another one."""
        assert len(self.checksums) == len(other.checksums) > 0, self.output
        assert self.curve == {
            step: other.curve[step] for step in range(min(self.curve), max(other.curve) + 1)
        }
        assert self.checksums == other.checksums


def wait_until(is_so: Callable[[], bool], job: Job, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert any(agent.is_running for agent in job.agents.values()), job.output
        assert time.monotonic() < deadline, f"not in {seconds} s: {job.begins}\n{job.output}"
        time.sleep(0.1)
