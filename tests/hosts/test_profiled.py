"""What a profiler says of a step."""

from __future__ import annotations

import torch
from torch.profiler import profile

from megatron_distopt import DistOptConfig, distribute
from tests.support.facts import Facts, facts_of

RANKS, BUCKETS = 2, 2


def _ranges(*, overlap: bool) -> list[str]:
    """Names of the third step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = DistOptConfig(
        accelerator="torch",
        bucket_size=70,
        clip_grad=1.0,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    optimizer = distribute(model, config)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()

    step()
    step()
    with profile() as profiled:
        step()
        optimizer.finish_param_gather()
    names = {event.key for event in profiled.key_averages()}
    return sorted(
        name.removeprefix("megatron_distopt::")
        for name in names
        if name.startswith("megatron_distopt::")
    )


def collect_facts(rank: int, size: int) -> dict[str, list[str]]:
    return {"at once": _ranges(overlap=False), "overlapped": _ranges(overlap=True)}


facts = facts_of(collect_facts, RANKS)


PHASES = ["measure gradients", "update"]
BOTH = [
    f"{kind} {number}" for kind in ("all-gather", "reduce-scatter") for number in range(BUCKETS)
]


def test_profile_when_a_step_runs_then_every_phase_and_bucket_has_a_name(facts: Facts) -> None:
    overlapped = [f"{what} {each}" for what in ("begin", "wait for") for each in BOTH]
    for each in facts.by_rank:
        assert each["at once"] == sorted([*BOTH, *PHASES])
        assert each["overlapped"] == sorted([*overlapped, *PHASES])
