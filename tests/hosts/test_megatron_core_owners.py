"""Muon and optimizers of whole params in megatron-core, against the host's own optimizer without
sharding.

The reference has `WholeMuon`, or the very class, in place of the host's Adam. Gradients are on a
grid, so that their sums over ranks are exact, and nothing is clipped, because a norm has another
order of sums. Tensor-parallel ranks put the parts of a matrix together for Muon; a class of whole
params takes its part for a param of its own, there as here.

Exercises hosts/megatron/muon_groups.py, hosts/megatron_core/core_muon.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt.checkpoint.source import open_checkpoint
from megatron_distopt.errors import DistOptError
from megatron_distopt.layout import Box
from tests.support.cases import Case
from tests.support.core_version import core_mentions
from tests.support.exact_core import (
    BF16,
    EXACT,
    OVERLAPPED,
    PLAIN,
    distance,
    exact_training,
    train_exactly,
)
from tests.support.facts import Facts, facts_of
from tests.support.whole_classes import Adafactor, Soap, in_place_of_cores_adam
from tests.support.whole_muon import SCALES, Reference, in_place_of_adam, layer_wise_buffers

HAS_TORCHS_MUON = hasattr(torch.optim, "Muon")
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Both:
    """One training with the reference and with ours."""

    case: Case
    whole: Context  # the reference is in place of the host's Adam
    options: Mapping[str, str]  # of ours, by name
    ours: Context = nullcontext  # in which ours is built, where its optimizer is not named


TORCHS = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
ADAM = {"ADAM": "torch_foreach"}
MUON, NAMED = {**ADAM, "OPTIMIZER": "muon"}, {"OPTIMIZER": "torch.optim:Adafactor"}
PARAMS = {"UPDATES": "params"}
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
#: megatron-core's formula as its config has it by default.
MEGATRONS = {
    "momentum": 0.95,
    "nesterov": False,
    "coefficients": QUINTIC,
    "scale": SCALES["spectral"],
    "extra": 1.0,
}
HAS_MUON = core_mentions("optimizer/optimizer_config.py", "muon_momentum")
HAS_LAYER_WISE = core_mentions("optimizer/layer_wise_optimizer.py", "def compute_full_param_layout")
NESTEROV = (
    "muon_nesterov"
    if core_mentions("optimizer/optimizer_config.py", "muon_nesterov")
    else "muon_use_nesterov"
)


def _muon(case: Case, ours: Mapping[str, str] = MUON, **reference: Any) -> Both:
    whole = Reference(options=TORCHS, **reference)
    return Both(case, lambda: in_place_of_adam(whole), {**MUON, **ours})


def _hosts_muon(
    case: Case,
    reference: Mapping[str, Any] = MEGATRONS,
    joins: bool = False,
    ours: Context = nullcontext,
    **fields: Any,
) -> Both:
    """By megatron-core's own flags; it takes a part of a tensor-parallel rank for a matrix by
    default."""
    case = case.of(optimizer_name="muon", fields=tuple(fields.items()))
    whole = Reference(
        True, {**MEGATRONS, **reference}, fields.get("muon_split_qkv", True), joins=joins
    )
    return Both(case, lambda: in_place_of_adam(whole), ADAM, ours)


def _whole(case: Case, *, is_named: bool = False) -> Both:
    """Adafactor where it is named, or SOAP in place of the host's Adam."""
    if is_named:
        return Both(case, lambda: in_place_of_cores_adam(Adafactor), NAMED)
    return Both(
        case, lambda: in_place_of_cores_adam(Soap), PARAMS, lambda: in_place_of_cores_adam(Soap)
    )


TP2 = EXACT.of(tp=2)
OVERLAPPED_DP2 = BF16.of(dp=2, **OVERLAPPED)
CASES: dict[tuple[str, str], Both] = {
    ("muon", "bf16 dp2, overlapped"): _muon(OVERLAPPED_DP2),
    ("muon", "tp2, heads share keys, gates"): _muon(
        TP2.of(query_groups=2, gated=True), ours={"MUON_SPLIT": "all"}, splits_gates=True
    ),
    ("muon", "tp2, blockwise"): _muon(TP2, ours={"MUON_TP_MODE": "blockwise"}, joins=False),
    ("whole", "bf16 dp2, named"): _whole(BF16.of(dp=2), is_named=True),
    ("whole", "bf16 dp2, overlapped"): _whole(OVERLAPPED_DP2),
}
if core_mentions("transformer/torch_norm.py", "class WrappedTorchNorm"):  # see tests/support/gpt.py
    CASES["muon", "experts tp2"] = _muon(EXACT.of(tp=2, num_experts=4))
if HAS_MUON:
    CASES |= {
        ("muon", "tp2, options of the host"): _hosts_muon(
            TP2,
            {
                "momentum": 0.8,
                "nesterov": True,
                "coefficients": (*QUINTIC, QUINTIC[0]),
                "scale": SCALES["unit_rms_norm"],
                "extra": 0.3,
            },
            joins=True,
            muon_tp_mode="duplicated",
            muon_momentum=0.8,
            **{NESTEROV: True},
            muon_num_ns_steps=6,
            muon_scale_mode="unit_rms_norm",
            muon_extra_scale_factor=0.3,
            muon_split_qkv=False,
        ),
        ("muon", "bf16 experts ep2, the host's"): _hosts_muon(BF16.of(dp=2, num_experts=4, ep=2)),
    }
if HAS_LAYER_WISE:  # what megatron.training makes of --optimizer muon --use-distributed-optimizer
    FIELDS = {"use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": True}
    case = OVERLAPPED_DP2.of(tied=False)
    CASES["muon", "bf16 dp2, overlapped, layer-wise buffers"] = _hosts_muon(
        case, ours=layer_wise_buffers, **FIELDS
    )

CASES = {key: both for key, both in CASES.items() if HAS_TORCHS_MUON or key[0] != "muon"}
SAVED = BF16.of(dp=2)
#: How it goes on; tensor-parallel ranks have the global batch in as many microbatches.
AGAIN = {"dp2": SAVED, "tp2": BF16.of(tp=2, num_microbatches=2)}


def collect_facts(rank: int, size: int, folder: Path) -> dict[Any, Any]:
    """In a rank: every case with the reference and with ours, and how far their params are
    apart."""
    found: dict[Any, Any] = {}
    # groups are slow
    for key, both in sorted(CASES.items(), key=lambda item: (item[1].case.tp, item[1].case.ep)):
        with both.whole():
            whole = train_exactly(
                both.case.of(optimizer="host-plain", optimizer_name="adam", fields=(), **PLAIN)
            )
        with both.ours():
            ours = train_exactly(both.case, **both.options)
        found[key] = distance(ours.params, whole.params), ours.losses, whole.losses
    found["refused"] = {name: _said(start) for name, (_, start) in REFUSED.items()}
    found["resumed", "whole"] = _resumed(
        f"{folder}/whole", PARAMS, lambda: in_place_of_cores_adam(Soap)
    )
    if HAS_TORCHS_MUON:
        found["resumed", "muon"] = _resumed(f"{folder}/muon", MUON, nullcontext)
    return found


def _said(start: Context) -> str:
    try:
        with start():
            return "accepted"
    except DistOptError as error:
        return str(error)


def _resumed(folder: str, options: Mapping[str, str], place: Context) -> dict[str, Any]:
    """Collective: losses of a run that was saved and of those that went on, which params of theirs
    began anew; and what runs of another layout save at once."""
    from tests.support.gpt import parts_of

    found: dict[str, Any] = {"new": {}}
    with place():
        with exact_training(SAVED, **options) as training:
            for _ in range(2):
                training.step()
            training.optimizer.save(f"{folder}/saved")
            found["saved"] = [training.step().loss for _ in range(2)]
        for name, case in AGAIN.items():
            with exact_training(case, **options) as training:
                training.optimizer.load(f"{folder}/saved")
                training.optimizer.save(f"{folder}/{name}")
                inners = [each.sharded.inner for each in parts_of(training.optimizer)]
                owned = {
                    each: param
                    for inner in inners
                    for each, param in getattr(inner, "owned", {}).items()
                }
                found["new"][name] = {each for each, param in owned.items() if not param.has_state}
                training.steps_taken = 2
                found[name] = [training.step().loss for _ in range(2)]
    return found


def _call(call: Callable[[Any], object]) -> Context:
    """A call on the optimizer of a run that updates whole params."""

    @contextlib.contextmanager
    def start() -> Iterator[None]:
        with exact_training(SAVED, **NAMED) as training:
            call(training.optimizer)
            yield

    return start


#: What the error says, and what is refused.
REFUSED: dict[str, tuple[str, Context]] = {
    "whole, low precision": (
        "float32",
        lambda: exact_training(SAVED, **NAMED, EXP_AVG_DTYPE="int8"),
    ),
    "whole, on the host": (
        "offload_fraction",
        lambda: exact_training(SAVED, **NAMED, OFFLOAD_FRACTION="0.5"),
    ),
    "whole, between phases": (
        "offload_to_cpu",
        _call(lambda optimizer: optimizer.offload_to_cpu()),
    ),
    "whole, dist_checkpointing": (
        "--ckpt-format torch",
        _call(lambda optimizer: optimizer.sharded_state_dict({})),
    ),
    "whole, tenants by param": (
        "save(folder)",
        _call(lambda optimizer: optimizer.optimizer.state[None]),
    ),
    "whole, all tenants": (
        "save(folder)",
        _call(lambda optimizer: [*optimizer.optimizer.state.values()]),
    ),
    "whole, the inner optimizer's": (
        "load(folder)",
        _call(lambda ours: ours.optimizer.load_state_dict({})),
    ),
    "unscaled by the host": (
        "Call prepare_grads()",
        _call(lambda optimizer: optimizer._unscale_main_grads_and_check_for_nan()),
    ),
    "muon, low precision": ("float32", lambda: exact_training(SAVED, **MUON, EXP_AVG_DTYPE="int8")),
    "muon, the host's SGD": (
        "--optimizer adam",
        lambda: exact_training(SAVED.of(optimizer_name="sgd"), **MUON),
    ),
    "options without Muon": (
        "muon_momentum",
        lambda: exact_training(SAVED, **ADAM, MUON_MOMENTUM="0.9"),
    ),
}
if HAS_MUON:
    BY_HOST = SAVED.of(optimizer_name="muon")
    BIG, COUPLED = (
        BY_HOST.of(fields=(("muon_scale_mode", "big"),)),
        BY_HOST.of(decoupled_weight_decay=False),
    )
    REFUSED |= {
        "our options beside the host's": (
            "--muon-",
            lambda: exact_training(BY_HOST, **ADAM, MUON_MOMENTUM="0.9"),
        ),
        "an unknown scale": ("unit_rms_norm", lambda: exact_training(BIG, **ADAM)),
        "weight decay in the gradient": (
            "decoupled_weight_decay",
            lambda: exact_training(COUPLED, **ADAM),
        ),
    }


INNERS = ("muon", "whole") if HAS_TORCHS_MUON else ("whole",)


facts = facts_of(collect_facts, 2, seconds=300, core=True)


@pytest.mark.parametrize(("inner", "name"), CASES)
def test_training_when_updates_are_sharded_then_it_is_that_of_the_reference_without_sharding(
    inner: str, name: str, facts: Facts
) -> None:
    for apart, ours, whole in facts[inner, name]:
        assert apart == 0.0, f"{apart}, losses {ours}, and {whole}"
        assert ours == whole
        assert ours[-1] != ours[0], "something was trained"


@pytest.mark.parametrize("inner", INNERS)
def test_load_when_resumed_then_the_run_goes_on_and_only_parts_that_are_others_begin_anew(
    inner: str, facts: Facts
) -> None:
    of_ranks = facts["resumed", inner]
    for of_rank in of_ranks:
        assert of_rank["dp2"] == of_rank["saved"]
        assert not of_rank["new"]["dp2"]
        # With Muon bf16 products over a part of a matrix add up in another order, as in
        # test_megatron_core_parity.py. A class of whole params makes the first step of a part, so
        # losses are near and not equal.
        assert of_rank["tp2"] == pytest.approx(
            of_rank["saved"], abs=2e-3 if inner == "muon" else 0.5
        )
        assert all("linear" in name or "embedding" in name for name in of_rank["new"]["tp2"])
    anew = any(
        "linear_qkv.weight" in name for of_rank in of_ranks for name in of_rank["new"]["tp2"]
    )
    assert anew == (inner == "whole")


@pytest.mark.skipif(not HAS_TORCHS_MUON, reason="this torch has no Muon")
@pytest.mark.parametrize("name", AGAIN)
def test_load_when_muon_is_loaded_by_another_layout_then_it_saves_what_it_loaded(
    name: str, facts: Facts
) -> None:
    saved, again = (open_checkpoint(facts.folder / "muon" / each) for each in ("saved", name))
    keys = set(saved.tensors)
    assert {key.partition("/")[0] for key in keys} >= {"main", "momentum_buffer", "exp_avg"}
    assert keys == set(again.tensors)
    for key in keys:
        box = Box.whole(saved.tensors[key].shape)
        assert torch.equal(saved.read_box(key, box), again.read_box(key, box)), key


@pytest.mark.parametrize("name", REFUSED)
def test_start_when_something_is_not_served_then_refused_on_all_ranks(
    name: str, facts: Facts
) -> None:
    for refused in facts["refused"]:
        assert REFUSED[name][0] in refused[name]
