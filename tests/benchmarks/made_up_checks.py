"""Checks that end in every way, for test_gpu_check.py; ranks import them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_check import interruptions
from gpu_check.checks import Check, Found, Place, SkipError, WrongError

FINDINGS = {"answer": 42}


def passes(place: Place) -> Found:
    return Found(f"rank {place.rank} of {place.size}", FINDINGS)


def skips(place: Place) -> Found:
    raise SkipError("not on this device")


def is_wrong(place: Place) -> Found:
    raise WrongError("3 of 4 elements differ")


def raises_on_one_rank(place: Place) -> Found:
    if place.rank == 1:
        raise KeyError("only here")
    dist.barrier()
    return Found("")


def crashes(place: Place) -> Found:
    os.abort()


def hangs(place: Place) -> Found:
    time.sleep(600)
    return Found("")


def has_a_bad_peer(place: Place) -> Found:
    """Ends the process in the middle of its contestants, as a peer's kernel may."""
    for name in ("ours", "bad peer", "good peer"):
        if name not in place.without:
            place.say(name)
            if name == "bad peer":
                os.abort()
    return Found(f"without {', '.join(place.without)}")


ON_ONE_RANK = (
    Check("skips", "is skipped", skips),
    Check("is_wrong", "is wrong", is_wrong),
    Check("crashes", "crashes", crashes),
    Check("has_a_bad_peer", "has a bad peer", has_a_bad_peer),
    Check("passes", "passes", passes),
    Check("hangs", "hangs", hangs, limit=0.5),
)
#: The first is a real one.
ON_TWO_RANKS = (
    next(check for check in interruptions.CHECKS if check.name == "resume"),
    Check("raises", "raises on one rank", raises_on_one_rank, least_ranks=2),
)
ALL = (*ON_ONE_RANK, *ON_TWO_RANKS)
