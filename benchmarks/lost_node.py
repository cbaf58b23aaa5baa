"""How a training goes on through the loss of a node and its return: the curves of docs/protect.md.

    python benchmarks/lost_node.py --json benchmarks/results/lost_node.json

Two nodes of two ranks, as in tests/hosts/test_protect_nodes.py: namespaces of this machine, which
needs root. Plain torch with a small model in bf16 with dropout, whose random numbers depend on the
number of ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.mortal_nodes import mortal_nodes
from tests.support.node_job import Job
from tests.support.protected_training import Plan

STEPS, LOST_AT, BACK_AT = 240, 84, 167
PROTECT = {"protect_every": 10, "protect_timeout": 6.0}


def points(job: Job) -> dict[str, Any]:
    """What rank 0 has noted, in the order in which it was done; steps may have been done twice."""
    lines = [line for line in job.lines if "loss" in line]
    return {
        "seconds": [round(line["time"] - lines[0]["time"], 1) for line in lines],
        "step": [line["step"] for line in lines],
        "loss": [round(line["loss"], 4) for line in lines],
        "lr": [float(f"{line['lr']:.4g}") for line in lines],
        "ranks": [line["ranks"] for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the readings")
    args = parser.parse_args()
    with mortal_nodes(2) as nodes, tempfile.TemporaryDirectory() as folder:
        plan = Plan(f"{folder}/whole/run", STEPS, pause=0.1)
        runs = {"uninterrupted": points(Job(nodes, plan).start().end())}
        protected = replace(plan, folder=f"{folder}/protected/run", options=PROTECT, waits=False)
        job = Job(nodes, protected, size="1:2").start()
        job.wait_for_step(LOST_AT)
        events = {"a node has no power": time.time()}
        job.lose(1)
        job.wait_for_step(BACK_AT, begins=1)
        events["it is back"] = time.time()
        job.start(1).end()
        runs["a node lost and back"] = points(job)
        begin = next(line["time"] for line in job.lines if "loss" in line)
        starts = job.begins
    result = {
        "command": f"python benchmarks/lost_node.py --json {args.json}",
        "nodes": "two namespaces of a machine with 2 cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "events": {name: round(seconds - begin, 1) for name, seconds in events.items()},
        "runs": [{"name": name, **values} for name, values in runs.items()],
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result).replace('], "', '],\n "') + "\n", encoding="utf-8")
    print(json.dumps({"starts": starts, "events": result["events"]}))


if __name__ == "__main__":
    main()
