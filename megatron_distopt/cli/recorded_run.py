"""What plugin/recording.py has written, for `megatron-distopt compare`."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron_distopt.plugin.recording import RecordedParam

Values = np.ndarray[Any, np.dtype[np.float64]]


class RecordedRun:
    """What the ranks of this node have recorded in a folder, also while they write on.

    A rank measures in each step: `started` (s), `loss` and `norm` (nan where there is none),
    `loss_scale`, `skipped`, `memory` (peak in bytes, of the process where the device is the CPU),
    `bits` (by param, the sum of the bits of all elements as integers), `sample` (values of some
    elements, fp32 in base64), `mains` (the same of main params, nan where this rank has none).
    """

    def __init__(self, folder: Path) -> None:
        self.params = list[RecordedParam]()  # of all ranks
        ranks = list[list[Any]]()
        for path in sorted(folder.glob("*.jsonl")):
            lines = _finished_lines(path)
            steps = [json.loads(line) for line in lines]
            if steps:
                head = steps.pop(0)
                self.params += [RecordedParam(**param) for param in head]
            ranks.append(steps)
        # that all ranks have finished; by rank
        self.steps = [*zip(*ranks, strict=False)]

    def values(self, what: str) -> list[float]:
        """Something measured, by step, of the first rank that has it."""
        found = []
        for step in self.steps:
            of_ranks = [float(each[what]) for each in step]
            known = [value for value in of_ranks if not math.isnan(value)]
            found.append(known[0] if known else math.nan)
        return found

    def bits(self, number: int) -> list[int]:
        found: list[int] = []
        for of_rank in self.steps[number]:
            found += of_rank["bits"]
        return found

    def weights(self, number: int) -> Values:
        """Model params, before the update of that step."""
        return self._sample("sample", number)

    def mains(self, number: int) -> Values:
        """Main params of the same elements; nan where a rank has none."""
        return self._sample("mains", number)

    def _sample(self, what: str, number: int) -> Values:
        of_ranks = [base64.b64decode(each[what]) for each in self.steps[number]]
        of_all = b"".join(of_ranks)
        values = np.frombuffer(of_all, np.float32)
        return values.astype(np.float64)


def _finished_lines(path: Path) -> list[str]:
    """Lines of a file that a run appends to, without one that it has not written to its end."""
    text = path.read_text("utf-8", errors="replace")
    *finished, _ = text.split("\n")
    return finished
