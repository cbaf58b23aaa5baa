"""Programs that once came to something else than the reference, without a word."""

from __future__ import annotations

import pytest

from tests.differential.pool import Pool
from tests.differential.programs import Action, Iteration, Microbatch, Phase, Program

_PLAIN = Iteration()
FOUND = {
    # Its momentum begins later than that of the others.
    "momentum of a branch that is used later": Program(
        kind="Branching",
        optimizer="SGD momentum",
        ready=(Action("side_off"),),
        phases=(Phase(2, (_PLAIN, Iteration(weights=(Action("side_on_one_rank"),)), _PLAIN)),),
    ),
    # The gradient that it had before moved it, so that a checkpoint has its state.
    "state of a param that is frozen": Program(
        kind="PartlyFrozen",
        optimizer="Adagrad",
        start=(Action("grad_before"),),
        phases=(Phase(2, (_PLAIN, _PLAIN)), Phase(3, (_PLAIN, Iteration(after=(Action("unfreeze"),)), _PLAIN))),
    ),
    # Its scheduler goes on from the rate that it had.
    "learning rate of a group that never trained": Program(
        kind="PartlyFrozen",
        groups="each",
        scheduler="CosineAnnealingLR",
        phases=(
            Phase(2, (_PLAIN, _PLAIN)),
            Phase(2, (_PLAIN, _PLAIN)),
            Phase(1, (Iteration(after=(Action("unfreeze"),)), _PLAIN, _PLAIN)),
        ),
    ),
    # An average that was looked at is gone on with.
    "gradient looked at between microbatches": Program(
        phases=(Phase(2, (Iteration(grads=(Action("full_grad"),), step="none", zero="kept"), _PLAIN)),),
    ),
    "gradient clipped between microbatches": Program(
        phases=(Phase(2, (Iteration(grads=(Action("clip_grad_norm"),), step="none", zero="kept"), _PLAIN)),),
    ),
    # On one rank: the gradients move with the params.
    "model converted while it has gradients": Program(
        phases=(Phase(1, (Iteration(zero="optimizer, not to None"), Iteration(weights=(Action("round_trip"),)))),),
    ),
    "model converted and its gradients dropped": Program(
        phases=(
            Phase(
                1,
                (
                    Iteration(after=(Action("round_trip"),), zero="None for each"),
                    Iteration(microbatches=(Microbatch(), Microbatch())),
                ),
            ),
        ),
    ),
    "norm with a param that was unfrozen": Program(
        start=(Action("freeze_before"),),
        ready=(Action("unfreeze"),),
        phases=(Phase(2, (Iteration(grads=(Action("clip_grad_norm"),)), _PLAIN)),),
    ),
    "zeroed gradients that one rank dropped": Program(
        phases=(
            Phase(
                2,
                (
                    Iteration(zero="model, not to None"),
                    Iteration(microbatches=(Microbatch(idle=1),), grads=(Action("grad_dropped_on_one_rank", 1),)),
                ),
            ),
        ),
    ),
    "gradient read after clipping": Program(
        phases=(Phase(1, (Iteration(grads=(Action("clip_grad_norm"), Action("grads_read"))), _PLAIN)),),
    ),
    "kept gradients dropped where a rank has no data": Program(
        phases=(
            Phase(
                2,
                (
                    Iteration(zero="kept"),
                    Iteration(microbatches=(Microbatch(idle=0),), grads=(Action("grad_dropped"),)),
                ),
            ),
        ),
    ),
    "weights brought back after a step that was skipped": Program(
        dtype="bfloat16",
        options=(("nonfinite", "skip"),),
        phases=(
            Phase(
                2,
                (
                    Iteration(
                        weights=(Action("rewind"), Action("one_element")),
                        microbatches=(Microbatch(infinite=1),),
                        after=(Action("rewind"),),
                    ),
                    _PLAIN,
                ),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_program_when_found_wrong_before_then_equal(running: Pool, name: str) -> None:
    outcome = running.run(FOUND[name])
    assert outcome.kind == "equal", outcome.text
