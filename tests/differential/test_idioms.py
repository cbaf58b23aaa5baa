"""One program for each thing that training scripts do, and programs drawn at random.

Each gives what the reference gives, or is refused by an error of ours on all ranks.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.differential.compare import Outcome
from tests.differential.drawing import draw
from tests.differential.pool import Pool
from tests.differential.programs import Action, Iteration, Microbatch, Phase, Program
from tests.differential.scripts import written

_OVERLAP = (("overlap_grad_reduce", True), ("bucket_size", 32))
_PARAM_OVERLAP = (("overlap_param_gather", True), ("bucket_size", 32))
_DYNAMIC = (("loss_scale", "dynamic"), ("initial_loss_scale", 64.0))


def program(
    *changed: str | Iteration,
    ranks: int = 2,
    before: Sequence[str] = (),
    grads: Sequence[str] = (),
    after: Sequence[str] = (),
    **others: Any,
) -> Program:
    """Two iterations, one that does what is named in front of its forward pass, and three more.

    Args:
        changed: names of idioms, or whole iterations.
        ranks: of the only phase.
        before: idioms between the optimizer and `distribute`.
        grads, after: idioms of the changed iteration behind backward, and behind its step.
        others: fields of `Program`.
    """
    names = [each for each in changed if isinstance(each, str)]
    whole = [each for each in changed if isinstance(each, Iteration)]
    middle = Iteration(weights=_all(names), grads=_all(grads), after=_all(after))
    iterations = (
        Iteration(),
        Iteration(),
        *(whole or [middle]),
        Iteration(),
        Iteration(),
        Iteration(),
    )
    return _run(ranks, *iterations, start=_all(before), **others)


def _all(names: Sequence[str]) -> tuple[Action, ...]:
    return tuple(Action(name, 1) for name in names)


def _one(*names: str) -> tuple[Action, ...]:
    """Of the first param, rank or value."""
    return tuple(Action(name) for name in names)


def _run(ranks: int, *iterations: Iteration, **others: Any) -> Program:
    return Program(phases=(Phase(ranks, iterations),), **others)


def _each(**fields: Any) -> Phase:
    """Five iterations alike on two ranks."""
    return Phase(2, (Iteration(**fields),) * 5)


_PLAIN = Iteration()
_TWO = (Microbatch(), Microbatch())
_THEN_BFLOAT16 = {"dtype": "bfloat16"}

EQUAL = {
    "bf16 weights loaded midway": program("load_state_dict", **_THEN_BFLOAT16),
    "bf16 weights initialised midway": program("init", **_THEN_BFLOAT16),
    "weights of other strides midway": program("other_strides", grads=["grad_of_other_strides"]),
    "weights of other strides from the start": Program(
        start=_one("other_strides_before"),
        phases=(Phase(2, (_PLAIN, Iteration(grads=_one("full_grad")))), Phase(3, (_PLAIN,) * 2)),
        options=(*_OVERLAP, ("overlap_param_gather", True)),
    ),
    "bf16 weights of other strides from the start": Program(
        start=_one("other_strides_before"),
        phases=(_each(grads=_one("grad_of_other_strides"), zero="kept"),),
        **_THEN_BFLOAT16,
    ),
    "aliases from before": program(before=["aliases_before"]),
    "bf16 weights clamped midway": program("data_clamp", **_THEN_BFLOAT16),
    "one bf16 element set": program("one_element", **_THEN_BFLOAT16),
    "bf16 weights changed behind the step": program(after=["all_times"], **_THEN_BFLOAT16),
    "weights loaded midway with param overlap": program(
        "load_state_dict", options=_PARAM_OVERLAP, **_THEN_BFLOAT16
    ),
    "to bf16 and back": program("round_trip"),
    "another tensor as data of a bf16 param": program("new_data", **_THEN_BFLOAT16),
    "frozen midway with overlap": program("freeze", optimizer="SGD momentum", options=_OVERLAP),
    "frozen before, unfrozen midway": program("unfreeze", before=["freeze_before"]),
    "frozen layer unfrozen midway with overlap": program(
        "unfreeze", kind="PartlyFrozen", options=_OVERLAP
    ),
    "model.zero_grad": Program(phases=(_each(zero="model"),)),
    "p.grad = None": Program(phases=(_each(zero="None for each"),)),
    "gradients zeroed in place": Program(phases=(_each(zero="zero_ of each"),), kind="Branching"),
    "zero_grad not to None": Program(
        phases=(_each(zero="optimizer, not to None"),), kind="Branching"
    ),
    "gradients kept with overlap": Program(phases=(_each(zero="kept"),), options=_OVERLAP),
    "two steps from one backward": program(Iteration(step="twice")),
    "gradients from before": program(before=["grad_before"]),
    "gradients from before, then zero_grad": program(
        before=["grad_before"], ready=(Action("zero_grad"),), options=_OVERLAP
    ),
    "backward before": program(before=["backward_before"]),
    "optimizer.clip_grad_norm_ with overlap": program(grads=["clip_grad_norm"], options=_OVERLAP),
    "torch's clip_grad_norm_ on one rank": program(grads=["clip_grad_norm_of_torch"], ranks=1),
    "a gradient written by hand": program(grads=["grad_written"]),
    "a branch used from the third step on": dataclasses.replace(
        program("side_on", kind="Branching"), ready=(Action("side_off"),)
    ),
    "a branch left midway": program("side_off", kind="Branching", optimizer="SGD momentum"),
    "a branch on one rank": program("side_on_one_rank", kind="Branching"),
    "compiled before, with param overlap": program(compiled="before", options=_PARAM_OVERLAP),
    "compiled afterwards, with param overlap": program(compiled="after", options=_PARAM_OVERLAP),
    "model.compile, with param overlap": program(compiled="method", options=_PARAM_OVERLAP),
    "model.forward with param overlap": program(
        Iteration(microbatches=(Microbatch(entry="forward"),)),
        kind="OwnParams",
        options=_PARAM_OVERLAP,
    ),
    "weights averaged with param overlap": Program(
        phases=(_each(after=_all(["ema"])),), options=_PARAM_OVERLAP
    ),
    "params read in a forked process, with param overlap": program(
        after=["weight_norm_in_a_fork"], options=_PARAM_OVERLAP
    ),
    "optimizer dropped in a forked process, with overlaps": program(
        after=["dropped_in_a_fork"], options=_OVERLAP + _PARAM_OVERLAP[:1], **_THEN_BFLOAT16
    ),
    "activation checkpointing with overlaps": program(
        recompute="reentrant", options=_OVERLAP + _PARAM_OVERLAP[:1]
    ),
    "module buffers that are strided": program(kind="Strided", other_seeds=True),
    "BatchNorm's statistics": program("evaluate", kind="Normed"),
    "step hooks": program("step_hooks"),
    "state-dict hooks": program("state_dict_hooks"),
    "a closure": program(Iteration(step="closure")),
    "add_param_group of frozen params": program(
        "add_param_group_frozen", kind="PartlyFrozen", groups="trained"
    ),
    "add_param_group of new params": program("add_param_group_new"),
    "lr and betas edited": program("lr", "betas", groups="two"),
    "lr of numpy, then the state dict back": program("lr_of_numpy", "state_dict_back"),
    "lr a fraction": program("lr_fraction", groups="two"),
    "decay switched off by False": Program(
        phases=(Phase(2, (Iteration(),) * 2), Phase(3, (Iteration(),))),
        start=(Action("decay_false"),),
    ),
    "a tensor as an option of one's own": program("state_dict_back", before=["own_option"]),
    "a scheduler": program(scheduler="OneCycleLR"),
    "optimizer.state replaced midway": program("state_replaced", groups="two"),
    "optimizer.state replaced with overlap": program(
        after=["state_replaced"], optimizer="SGD momentum", options=_OVERLAP, **_THEN_BFLOAT16
    ),
    "state of a param popped": program("state_popped"),
    "state of a bf16 param emptied, then saved": Program(
        phases=(_each(after=_one("state_of_each_group_emptied")), Phase(3, (Iteration(),) * 3)),
        optimizer="NAdam",
        **_THEN_BFLOAT16,
    ),
    "moments scaled in place on one rank": program(after=["moments_scaled"], ranks=1),
    "accumulation": program(Iteration(microbatches=_TWO, no_sync=False)),
    "accumulation over two iterations": program(Iteration(step="none", zero="kept")),
    "a skipped step": program(
        Iteration(microbatches=(Microbatch(infinite=1),), after=_all(["last_step"])),
        options=(("nonfinite", "skip"),),
    ),
    "a step skipped by a dynamic loss scale": program(
        Iteration(microbatches=(Microbatch(infinite=1),)), dtype="float16", options=_DYNAMIC
    ),
    "other weights on each rank at the start": program(other_seeds=True),
    "bf16 weights written through an alias of their data": Program(
        phases=(_each(weights=_all(["alias_of_data"])),), **_THEN_BFLOAT16
    ),
    "a step without any gradient": program(Iteration(microbatches=())),
    "autograd.grad before and after the step with overlap": program(
        grads=["grad_of_autograd"], after=["grad_of_autograd"], options=_OVERLAP
    ),
    "autograd.grad under a loss scale": program(
        grads=["grad_of_autograd"], dtype="float16", options=_DYNAMIC
    ),
    "a gradient penalty": program(grads=["grad_penalty"]),
    "gradients written by hand alone": Program(
        phases=(_each(microbatches=(), grads=_all(["grad_written_all"])),)
    ),
    "full_grad, then the gradients dropped": program(
        Iteration(grads=_all(["full_grad"]), step="none", zero="model")
    ),
    "full_grad where a rank has no data": program(
        Iteration(microbatches=(Microbatch(idle=1),), grads=_all(["full_grad"]))
    ),
    "weights read by TorchScript with param overlap": Program(
        phases=(_each(after=_all(["weights_read_in_script"])),), options=_PARAM_OVERLAP
    ),
    "a layer scripted midway, with param overlap": program(
        after=["layer_in_script"], options=_PARAM_OVERLAP
    ),
    "a script module in the model, with param overlap": program(
        before=["layer_scripted"], options=_PARAM_OVERLAP
    ),
    "AveragedModel with param overlap": Program(
        phases=(_each(after=_all(["swa"])),), options=_PARAM_OVERLAP
    ),
    "a module deleted midway": program("module_deleted", kind="Branching"),
    "released, then a second optimizer": program("second_optimizer"),
    "params of a part only": program(groups="some"),
    "state dict back": program("state_dict_back"),
    "state dict saved on one rank": program("state_dict_saved", ranks=1),
    "saved at two ranks and loaded at three": Program(
        phases=(_each(), Phase(3, (Iteration(),) * 3)), groups="two", scheduler="StepLR"
    ),
    "lr edited between step and save": Program(
        phases=(Phase(2, (Iteration(after=_all(["lr"])),)), Phase(2, (Iteration(), Iteration())))
    ),
    "saved after a step without some gradient": Program(
        phases=(_each(grads=_all(["grad_dropped"])), Phase(3, (Iteration(),) * 3)), dtype="mixed"
    ),
    "other data, then the state dict back": program("new_data", "state_dict_back"),
    "full_grad where a rank had no data": program(
        Iteration(zero="None for each"),
        Iteration(microbatches=(Microbatch(idle=0),), grads=_all(["full_grad"])),
    ),
    "gradients kept, clipped by the option": Program(
        phases=(_each(zero="kept"),), options=(("clip_grad", 0.125),)
    ),
    "a copy of the model with overlaps": program(
        "model_deepcopy", options=_OVERLAP + _PARAM_OVERLAP[:1]
    ),
    "a pickled model with overlaps": program("model_pickle", options=_OVERLAP + _PARAM_OVERLAP[:1]),
    "one param saved": program("one_param_saved"),
    "a frozen integer param": program(before=["integer_param"]),
}
#: Programs that once came to something else than the reference, without a word.
FOUND = {
    # Its momentum begins later than that of the others.
    "momentum of a branch that is used later": _run(
        2,
        _PLAIN,
        Iteration(weights=_one("side_on_one_rank")),
        _PLAIN,
        kind="Branching",
        optimizer="SGD momentum",
        ready=_one("side_off"),
    ),
    # The gradient that it had before moved it, so that a checkpoint has its state.
    "state of a param that is frozen": Program(
        kind="PartlyFrozen",
        optimizer="Adagrad",
        start=_one("grad_before"),
        phases=(
            Phase(2, (_PLAIN, _PLAIN)),
            Phase(3, (_PLAIN, Iteration(after=_one("unfreeze")), _PLAIN)),
        ),
    ),
    # Its scheduler goes on from the rate that it had.
    "learning rate of a group that never trained": Program(
        kind="PartlyFrozen",
        groups="each",
        scheduler="CosineAnnealingLR",
        phases=(
            *[Phase(2, (_PLAIN, _PLAIN))] * 2,
            Phase(1, (Iteration(after=_one("unfreeze")), _PLAIN, _PLAIN)),
        ),
    ),
    # An average that was looked at is gone on with.
    "gradient looked at between microbatches": _run(
        2, Iteration(grads=_one("full_grad"), step="none", zero="kept"), _PLAIN
    ),
    "gradient clipped between microbatches": _run(
        2, Iteration(grads=_one("clip_grad_norm"), step="none", zero="kept"), _PLAIN
    ),
    # On one rank: the gradients move with the params.
    "model converted while it has gradients": _run(
        1, Iteration(zero="optimizer, not to None"), Iteration(weights=_one("round_trip"))
    ),
    "model converted and its gradients dropped": _run(
        1, Iteration(after=_one("round_trip"), zero="None for each"), Iteration(microbatches=_TWO)
    ),
    "norm with a param that was unfrozen": _run(
        2,
        Iteration(grads=_one("clip_grad_norm")),
        _PLAIN,
        start=_one("freeze_before"),
        ready=_one("unfreeze"),
    ),
    "zeroed gradients that one rank dropped": _run(
        2,
        Iteration(zero="model, not to None"),
        Iteration(microbatches=(Microbatch(idle=1),), grads=_all(["grad_dropped_on_one_rank"])),
    ),
    "gradient read after clipping on one rank": _run(
        1, Iteration(grads=_one("clip_grad_norm", "grads_read")), _PLAIN
    ),
    "kept gradients dropped where a rank has no data": _run(
        2,
        Iteration(zero="kept"),
        Iteration(microbatches=(Microbatch(idle=0),), grads=_one("grad_dropped")),
    ),
    # As in torch, where backward averages whatever the step does with it.
    "gradient kept over a skipped step where a rank had no data": _run(
        2,
        Iteration(
            microbatches=(Microbatch(idle=0, infinite=1),),
            after=_one("grad_is_none"),
            zero="zero_ of each",
        ),
        _PLAIN,
        options=(("nonfinite", "skip"),),
    ),
    **{
        f"gradient of a branch on one rank in a step skipped by {words}": _run(
            2,
            Iteration(
                weights=_one("side_on_one_rank"),
                microbatches=(Microbatch(infinite=0),),
                after=_one("grad_is_none"),
            ),
            _PLAIN,
            kind="Branching",
            options=options,
        )
        for words, options in {
            "nonfinite": (("nonfinite", "skip"),),
            "a dynamic loss scale": _DYNAMIC,
        }.items()
    },
    "weights brought back after a step that was skipped": _run(
        2,
        Iteration(
            weights=_one("rewind", "one_element"),
            microbatches=(Microbatch(infinite=1),),
            after=_one("rewind"),
        ),
        _PLAIN,
        dtype="bfloat16",
        options=(("nonfinite", "skip"),),
    ),
}
EQUAL |= FOUND
_READS = ("clip_grad_norm", "full_grad")
#: With the class of the error; what tests/hosts/test_torch_refusals.py has as well is not here.
REFUSED = {
    "lr an array": (program("lr_array"), "ConfigError"),
    "a tie that was cut": (program("untied", kind="Tied"), "LayoutError"),
    "weights changed silently beside remainders on one rank": (
        program(
            "weights_on_one_rank", dtype="bfloat16", options=(("main_params_dtype", "remainder"),)
        ),
        "",
    ),
    # What a step refuses is no gradient before it either.
    **{
        f"a gradient that one rank alone kept, then {name}": (
            _run(
                2,
                Iteration(zero="kept"),
                Iteration(grads=_one("grad_dropped_on_one_rank", name), step="none"),
            ),
            "LayoutError",
        )
        for name in _READS
    },
    **{
        f"a model converted, then {name}": (program("other_dtype", grads=[name]), "LayoutError")
        for name in _READS
    },
    "gradients read by TorchScript": (program(grads=["grads_read_in_script"]), "AccessError"),
    "moments scaled in place": (program(after=["moments_scaled"]), "CheckpointError"),
    "param_groups replaced": (program("groups_replaced"), "ConfigError"),
    "an infinite gradient": (
        program(Iteration(microbatches=(Microbatch(infinite=1),))),
        "NonFiniteGradError",
    ),
}

_BACK_AND_FORTH = {
    "model, then optimizer": "model_then_optimizer_back",
    "optimizer, then model": "optimizer_then_model_back",
    "optimizer alone": "optimizer_back",
}
#: In bf16; with main params as remainders they come to the same bits as with fp32 ones.
EXACT = {
    "weights changed and reloaded": program("all_times", "reload"),
    "weights changed before the first step": program(ready=(Action("all_times"),)),
    "weights read": program("see_weights", "see_state_dict", "weight_norm"),
    "frozen, then unfrozen": program(
        Iteration(weights=_all(["freeze"])), Iteration(), Iteration(weights=_all(["unfreeze"]))
    ),
    "a gradient left out": program(grads=["grad_dropped"]),
    "a scheduler": program(scheduler="OneCycleLR"),
    "the state dict that it has": Program(phases=(_each(after=_all(["state_dict_back"])),)),
    "a state loaded and a gradient left out": program("state_dict_back", grads=["grad_dropped"]),
    **{
        f"went back two steps: {words}": program(
            Iteration(after=_all([name])), Iteration(), Iteration(after=_all([name]))
        )
        for words, name in _BACK_AND_FORTH.items()
    },
}
_REMAINDER = (("main_params_dtype", "remainder"),)


def _pairs(names: Sequence[str]) -> dict[str, tuple[Program, Program]]:
    """With main params as remainders, and in fp32."""
    full = {words: dataclasses.replace(EXACT[words], dtype="bfloat16") for words in names}
    return {
        words: (dataclasses.replace(each, options=_REMAINDER), each) for words, each in full.items()
    }


def _selected(request: pytest.FixtureRequest) -> list[str]:
    """The rows of a table whose tests are run, for a fixture that runs them together."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [
        item.callspec.params["words"] for item in items if request.fixturename in item.fixturenames
    ]


@pytest.fixture(scope="module")
def exact(running: Pool, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    return running.compare_all(_pairs(_selected(request)))


@pytest.fixture(scope="module")
def equal(running: Pool, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    return running.run_all({words: EQUAL[words] for words in _selected(request)})


@pytest.mark.parametrize("words", EXACT)
def test_idiom_when_main_params_are_remainders_then_every_bit_is_that_of_fp32(
    exact: dict[str, Outcome], words: str
) -> None:
    assert exact[words].is_exact, f"{exact[words].kind} {exact[words].text}"


@pytest.mark.parametrize("words", EQUAL)
def test_idiom_when_it_is_served_then_equal_to_torch(equal: dict[str, Outcome], words: str) -> None:
    assert equal[words].kind == "equal", f"{equal[words].text}\n{EQUAL[words]!r}"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("words", [words for words in EQUAL if not words.endswith("on one rank")])
def test_idiom_when_there_are_more_ranks_then_equal_to_torch(
    running: Pool, words: str, ranks: int
) -> None:
    phases = tuple(
        dataclasses.replace(phase, ranks=max(phase.ranks, ranks)) for phase in EQUAL[words].phases
    )
    outcome = running.run(dataclasses.replace(EQUAL[words], phases=phases))
    assert outcome.kind == "equal", outcome.text


@pytest.mark.parametrize("words", REFUSED)
def test_idiom_when_it_cannot_be_served_then_refused_on_all_ranks(
    running: Pool, words: str
) -> None:
    refused, error = REFUSED[words]
    outcome = running.run(refused)
    assert outcome.kind == "refused" and outcome.text.startswith(error), (
        f"{outcome.text}\n{refused!r}"
    )


#: torch goes on with a param that nothing computes with any more, or from a scale of its own:
#: either will do.
EITHER = {
    "a gradient written after clipping": program(grads=["clip_grad_norm", "grad_written_all"]),
    "a backward after clipping": program(grads=["clip_grad_norm", "grad_of_part"]),
    "converted while gradients are there": program(
        Iteration(zero="zero_ of each"), Iteration(weights=_all(["round_trip"]))
    ),
    "a parametrization removed": program("parametrization_removed", kind="WeightNormed"),
}


@pytest.mark.parametrize("words", EITHER)
def test_idiom_when_torch_does_little_with_it_then_equal_or_refused(
    running: Pool, words: str
) -> None:
    outcome = running.run(EITHER[words])
    assert outcome.kind in ("equal", "refused"), f"{outcome.text}\n{EITHER[words]!r}"


# --- programs drawn at random

#: Draws of one seed resemble each other, so a few are taken of each.
OF_EACH_SEED = 6


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, *range(100, 200)))]
)
def test_programs_when_drawn_at_random_then_equal_or_refused(running: Pool, start: int) -> None:
    programs = {str(number): program for number, program in enumerate(draw(OF_EACH_SEED, start))}
    outcomes = running.run_all(programs)
    for number, outcome in outcomes.items():
        if outcome.kind == "failed":
            file = Path(tempfile.gettempdir()) / "failing_program.txt"
            file.write_text(written(programs[number], outcome.text), encoding="utf-8")
            pytest.fail(
                f"python -m tests.differential.rerun {file}\n{file.read_text()}", pytrace=False
            )
    num_equal = sum(outcome.kind == "equal" for outcome in outcomes.values())
    # Refusals are not a way out: three quarters of the programs hold nothing that may be refused.
    assert num_equal > OF_EACH_SEED / 2 or start > 1
