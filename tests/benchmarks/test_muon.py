"""What benchmarks/muon.py reads: contestants train alike, and ratios are of the same round."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.spawn import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import muon
from muon import MuonReading


def _read(rank: int, size: int) -> list[MuonReading]:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from peers.muon_contestants import entries
    from peers.steppers import StepSetting

    setting, reference = StepSetting(2, 64, rank, size, None, "cpu"), list[Any]()
    both = [entry for entry in entries() if "megatron" not in entry.name]
    # As in the script, the first round does not count: what a first step leaves behind is there
    # then.
    rounds = [
        [muon.read(entry, setting, number, 1, reference) for entry in both] for number in (-1, 0)
    ]
    return rounds[-1]


@pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before torch 2.9"
)
def test_contestants_when_they_train_then_ours_has_half_the_state_and_is_not_apart() -> None:
    ours, alone = run_ranks(_read, 2)[0]
    assert (ours.why_not, alone.why_not) == ("", "")
    assert 0 < ours.update < ours.step
    # padding, and a counter a flat param
    assert sum(ours.state) == pytest.approx(alone.state[0], rel=0.02)
    assert alone.apart is not None and alone.apart < 0.1  # without Muon's update it is 1


def test_summary_when_there_are_rounds_then_the_share_is_of_torchs_in_the_same_round() -> None:
    readings = [
        MuonReading("ours", 2, 100, 0, 1.0, 2.0, (600, 400)),
        MuonReading("ours", 2, 100, 1, 2.0, 4.0, (600, 400)),
        MuonReading("torch", 2, 100, 0, 2.0, 2.0, (1000, 1000)),
        MuonReading("torch", 2, 100, 1, 4.0, 4.0, (1000, 1000)),
        MuonReading("ours", 4, 100, 0, 9.0, 9.0),
    ]
    ours, alone = muon.summary(readings, 2)["contestants"]
    assert (ours["share"]["update"].least, ours["share"]["update"].most) == (1.0, 1.0)
    assert (ours["share"]["step"].median, alone["share"]["update"].median) == (2.0, 2.0)
    assert ours["state"] == {"most": 6.0, "average": 5.0}
