"""Runs programs on the simulated accelerator under many seeds, in processes that are ranks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from megatron_distopt.comm import collectives
from tests.sim import host_programs, programs
from tests.support.sim import Personality, install, machine
from tests.support.sim.collectives import NAME, take_over_world

#: Seeds of every run of the tests, and of long ones.
FEW, MANY = range(1), range(200)
#: Of long ones where only the form or the place of the state is another, whose waits are few. No
#: removed wait was found by a seed above 11 (tests/support/sim/README.md).
_FEWER = range(60)


def many(name: str) -> range:
    """The seeds of a program's long run."""
    return _FEWER if name.startswith(("host", "low precision", "moved")) else MANY


def begin(personality: Personality = Personality.FULL, *, carries_cpu: bool = True) -> None:
    """Collective: the device and its group in this process, whose collectives average and are
    coalesced as NCCL's."""
    sys.modules["deepspeed"] = None  # type: ignore[assignment] # to ask for its Adam takes a second
    install(personality)
    collectives._LIKE_NCCL = ("nccl", NAME)
    take_over_world(carries_cpu=carries_cpu)


def try_programs(
    rank: int,
    size: int,
    names: Sequence[str],
    seeds: Sequence[int],
    personality: Personality = Personality.FULL,
) -> dict[str, list[str]]:
    """What was wrong with plain torch, by program; each entry names the seed."""
    begin(personality)
    return {
        name: _try(lambda device, name=name: programs.train(name, device, rank), seeds)
        for name in names
    }


def try_small_device(
    rank: int, size: int, names: Sequence[str], seeds: Sequence[int]
) -> dict[str, list[str]]:
    """The same on a device without float64 and fp16, in a group for its tensors alone."""
    install(Personality.SMALL)
    expected = {name: programs.train(name, "cpu", rank) for name in names}
    begin(Personality.SMALL, carries_cpu=False)
    return {
        name: _found(
            lambda device, name=name: programs.train(name, device, rank), seeds, expected[name]
        )
        for name in names
    }


def try_host(
    rank: int, size: int, host: str, names: Sequence[str], seeds: Sequence[int]
) -> dict[str, list[str]]:
    """The same with a Megatron, "fork" or "core"."""
    begin()
    return {
        name: _try(lambda device, name=name: host_programs.train(host, name, device), seeds)
        for name in names
    }


def _try(train: Callable[[str], Any], seeds: Sequence[int]) -> list[str]:
    return _found(train, seeds, train("cpu"))


def _found(train: Callable[[str], Any], seeds: Sequence[int], expected: Any) -> list[str]:
    return [
        f"seed {seed}: {what}" for seed in seeds if (what := _difference(train, seed, expected))
    ]


def _difference(train: Callable[[str], Any], seed: int, expected: Any) -> str | None:
    """What a training on the device leaves under a seed that it does not on the CPU."""
    machine.seed(seed)
    try:
        found: str | None = train("sim").differs_from(expected)
    except Exception:  # noqa: BLE001 - becomes what was wrong
        return traceback.format_exc()
    return found
