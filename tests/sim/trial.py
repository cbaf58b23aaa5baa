"""Runs programs on the simulated accelerator under many seeds, in processes that are ranks."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from tests.sim import programs
from tests.support.sim import Personality, install, machine
from tests.support.sim.collectives import take_over_world


def try_programs(
    rank: int, size: int, names: Sequence[str], seeds: Sequence[int], personality: Personality = Personality.FULL
) -> dict[str, list[str]]:
    """What was wrong, by program; each entry names the seed."""
    install(personality)
    take_over_world()
    found: dict[str, list[str]] = {}
    for name in names:
        expected = programs.train(name, "cpu", rank)
        found[name] = [f"seed {seed}: {what}" for seed in seeds if (what := _try(name, rank, seed, expected))]
    return found


def _try(name: str, rank: int, seed: int, expected: programs.Left) -> str | None:
    machine.seed(seed)
    try:
        return programs.train(name, "sim", rank).differs_from(expected)
    except Exception:  # noqa: BLE001 - becomes what was wrong
        return traceback.format_exc()
