"""One training of the quickstart, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


def train(
    variables: Mapping[str, str], seed: int, iterations: int, ranks: int = 1
) -> tuple[dict[str, Any], list[float]]:
    """
    Args:
        variables: MEGATRON_DISTOPT_* without that beginning.
        seed: of params and batches.
        iterations: how many.
        ranks: with a thread each.

    Returns:
        Its summary, and the loss of every iteration in nats a byte.
    """
    environ = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environ |= {f"MEGATRON_DISTOPT_{name}": value for name, value in variables.items()}
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(_ROOT / "examples" / "quickstart.py"), "--use-distributed-optimizer", "--precision", "bf16"]
        command += ["--iterations", str(iterations), "--seed", str(seed), "--output", folder]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"Invalid training with {dict(variables)}: it ended with\n{done.stderr[-2000:]}")
        summary = json.loads((Path(folder) / "summary.json").read_text())
        history = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return summary, [each["loss"] for each in history]
