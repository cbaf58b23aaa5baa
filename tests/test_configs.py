"""Every launch file under configs/ trains, and the example behind them gives one curve whatever starts it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.sh"))


def _run(config: Path) -> list[float]:
    """Losses of a short run, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": str(port),
        "MEGATRON_DISTOPT": "require",
    }
    environment.pop("MEGATRON_DISTOPT_ACCELERATOR", None)  # as users have it: DeepSpeed names the device
    command = ["bash", str(config), "--train-iters", "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", done.stdout)]


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    return {config.stem: _run(config) for config in CONFIGS}


def test_launch_files_when_run_then_train(losses: dict[str, list[float]]) -> None:
    assert set(losses) == {"gpt_tiny_torchrun", "gpt_tiny_deepspeed"}
    for curve in losses.values():
        assert len(curve) == 4
        assert curve[-1] < curve[0]


def test_launch_files_when_the_launcher_differs_then_the_curve_does_not(losses: dict[str, list[float]]) -> None:
    assert losses["gpt_tiny_torchrun"] == losses["gpt_tiny_deepspeed"]
