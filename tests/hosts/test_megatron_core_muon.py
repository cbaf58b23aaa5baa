"""Muon in megatron-core, by our flags and by its own, against Muon on whole matrices.

The reference is the host's own optimizer without sharding, with `WholeMuon` for its Adam. Gradients are on a grid, so
that their sums over ranks are exact, and nothing is clipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_distopt.checkpoint.source import open_checkpoint
from megatron_distopt.layout import Box
from tests.support.cases import Case, Curve
from tests.support.core_version import core_mentions
from tests.support.exact_core import (
    BF16,
    EXACT,
    OVERLAPPED,
    PLAIN,
    TIED,
    assert_equal,
    assert_learns,
    compared,
    crossed,
    exact_training,
    in_worlds_of_two_and_four,
    refusals,
    train_exactly,
)
from tests.support.whole_muon import SCALES, Reference, in_place_of_adam

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

HAS_MUON = core_mentions("optimizer/optimizer_config.py", "muon_momentum")
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
#: With torch's formula, and with megatron-core's as its config has it by default.
TORCHS = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
MEGATRONS = {"momentum": 0.95, "nesterov": False, "coefficients": QUINTIC, "scale": SCALES["spectral"], "extra": 1.0}


@dataclass(frozen=True)
class Both:
    """One training with the reference and with ours.

    Args:
        case: of ours.
        reference: see `Reference`.
        options: of ours, by name.
        layer_wise: whether ours runs over the buffers of the host's layer-wise optimizer, which has them since 0.18.
    """

    case: Case
    reference: Reference = field(default_factory=lambda: Reference(options=TORCHS))
    options: dict[str, str] = field(default_factory=dict)
    layer_wise: bool = False


ADAM = {"ADAM": "torch_foreach"}
_training = partial(exact_training, **ADAM)
OTHER = {"momentum": 0.9, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}
OURS = {
    "fp32 dp2": Both(EXACT.of(dp=2)),
    "bf16 dp2, overlapped": Both(BF16.of(dp=2, **OVERLAPPED)),
    "bf16 dp2, fp32 norms": Both(BF16.of(dp=2, fp32_norms=True)),
    "fp16 dp2": Both(EXACT.of(dp=2, precision="fp16")),
    "bf16 pp2": Both(BF16.of(pp=2, tied=TIED)),
    "tp2, heads share keys": Both(EXACT.of(tp=2, query_groups=2)),
    "tp2, gates": Both(EXACT.of(tp=2, gated=True), Reference(options=TORCHS, splits_gates=True), {"MUON_SPLIT": "all"}),
    "tp2, gates not split": Both(EXACT.of(tp=2, gated=True)),
    "tp2, blockwise": Both(EXACT.of(tp=2), Reference(options=TORCHS, joins=False), {"MUON_TP_MODE": "blockwise"}),
    "dp2, options": Both(
        EXACT.of(dp=2),
        Reference(options=OTHER, split=False),
        {
            "MUON_MOMENTUM": "0.9",
            "MUON_NESTEROV": "no",
            "MUON_NS_STEPS": "3",
            "MUON_ADJUST_LR": "original",
            "MUON_SPLIT": "none",
        },
    ),
    "bf16 tp2 dp2": Both(BF16.of(tp=2, dp=2)),
    "bf16 experts ep2": Both(BF16.of(dp=4, num_experts=4, ep=2)),
}
if core_mentions("transformer/torch_norm.py", "class WrappedTorchNorm"):  # see tests/support/gpt.py
    OURS["experts tp2 ep2"] = Both(EXACT.of(tp=2, dp=2, num_experts=4, ep=2))


def _by_host(case: Case, reference: dict[str, Any] | None = None, joins: bool = False, **fields: Any) -> Both:
    """With megatron-core's own flags; the host takes a part of a tensor-parallel rank for a matrix by default."""
    options = {**MEGATRONS, **(reference or {})}
    case = case.of(optimizer_name="muon", fields=tuple(fields.items()))
    return Both(case, Reference(True, options, fields.get("muon_split_qkv", True), joins=joins))


NESTEROV = "muon_nesterov" if core_mentions("optimizer/optimizer_config.py", "muon_nesterov") else "muon_use_nesterov"
HOSTS = {
    "bf16 dp2, the host's": _by_host(BF16.of(dp=2)),
    "bf16 dp2, overlapped, the host's": _by_host(BF16.of(dp=2, **OVERLAPPED)),
    "fp32 tp2, the host's": _by_host(EXACT.of(tp=2)),
    "tp2, gathered, the host's": _by_host(EXACT.of(tp=2), joins=True, muon_tp_mode="duplicated"),
    "dp2, options of the host": _by_host(
        EXACT.of(dp=2),
        {
            "momentum": 0.8,
            "nesterov": True,
            "coefficients": (*QUINTIC, QUINTIC[0]),
            "scale": SCALES["unit_rms_norm"],
            "extra": 0.3,
        },
        muon_momentum=0.8,
        **{NESTEROV: True},
        muon_num_ns_steps=6,
        muon_scale_mode="unit_rms_norm",
        muon_extra_scale_factor=0.3,
        muon_split_qkv=False,
    ),
    "bf16 experts ep2, the host's": _by_host(BF16.of(dp=4, num_experts=4, ep=2)),
}
#: What megatron.training makes of --optimizer muon --use-distributed-optimizer.
FIELDS = {"use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": True}
LAYER_WISE = {
    "bf16 dp2, layer-wise buffers": replace(_by_host(BF16.of(dp=2), **FIELDS), layer_wise=True),
    "bf16 dp2, overlapped, layer-wise buffers": replace(
        _by_host(BF16.of(dp=2, tied=False, **OVERLAPPED), **FIELDS), layer_wise=True
    ),
}
HAS_LAYER_WISE = core_mentions("optimizer/layer_wise_optimizer.py", "def compute_full_param_layout")
CASES = OURS | (HOSTS if HAS_MUON else {}) | (LAYER_WISE if HAS_LAYER_WISE else {})


@contextlib.contextmanager
def _layer_wise_buffers(is_on: bool) -> Iterator[None]:
    """As `wrap_model_chunks_with_ddp` of megatron.training wraps a chunk."""
    from tests.support import gpt

    def wrap(config: Any, ddp_config: Any, model: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.optimizer import layer_wise_optimizer

        layer_wise_optimizer.tag_params_for_buffer_routing([model])
        layout = layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(model.parameters()),
            ddp_config.bucket_size,
            parallel_state.get_data_parallel_world_size(),
            ddp_config,
        )
        return original(config, ddp_config, model, full_param_layout=layout, **kwargs)

    original = gpt.DistributedDataParallel
    with mock.patch.object(gpt, "DistributedDataParallel", wrap) if is_on else contextlib.nullcontext():
        yield


def _ours(both: Both) -> Curve:
    chosen = {} if both.case.optimizer_name == "muon" else {"OPTIMIZER": "muon"}
    return train_exactly(both.case, **ADAM, **chosen, **both.options)


def _whole(both: Both) -> Curve:
    with in_place_of_adam(both.reference):
        return train_exactly(both.case.of(optimizer="host-plain", optimizer_name="adam", fields=(), **PLAIN))


def collect(rank: int, size: int, folder: str) -> dict[str, Any]:
    """In a rank: every case of this many ranks with the reference and with ours."""
    found: dict[str, Any] = {}
    for name, both in CASES.items():
        if both.case.ranks == size:
            found[name] = compared(_ours(both), _whole(both))
    if size == 2:
        from_adam = crossed(SAVED, {**ADAM, "OPTIMIZER": "muon"}, folder, with_head=False)  # Muon has more groups
        found |= {"resumed": _resumed(folder), "crossed": from_adam, "refused": refusals(REFUSED)}
    return found


SAVED = BF16.of(dp=2)
#: How it goes on; tensor-parallel ranks have the global batch in as many microbatches.
AGAIN = {"dp2": SAVED, "tp2": BF16.of(tp=2, num_microbatches=4)}


def _resumed(folder: str) -> dict[str, Any]:
    """Collective: a run that was saved goes on, and what a run of another layout saves at once."""
    found: dict[str, Any] = {}
    with _training(SAVED, OPTIMIZER="muon") as training:
        for _ in range(2):
            training.step()
        training.optimizer.save(f"{folder}/saved")
        found["whole"] = [training.step().loss for _ in range(2)]
    for name, case in AGAIN.items():
        with _training(case, OPTIMIZER="muon") as training:
            training.optimizer.load(f"{folder}/saved")
            training.optimizer.save(f"{folder}/{name}")
            training.steps_taken = 2
            found[name] = [training.step().loss for _ in range(2)]
    return found


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "state in low precision": ("float32", lambda: _training(SAVED, OPTIMIZER="muon", EXP_AVG_DTYPE="int8")),
    "the host's SGD": ("--optimizer adam", lambda: _training(SAVED.of(optimizer_name="sgd"), OPTIMIZER="muon")),
    "options without Muon": ("muon_momentum", lambda: _training(SAVED, MUON_MOMENTUM="0.9")),
}
if HAS_MUON:
    BY_HOST = SAVED.of(optimizer_name="muon")
    REFUSED |= {
        "our options beside the host's": ("--muon-", lambda: _training(BY_HOST, MUON_MOMENTUM="0.9")),
        "an unknown scale": ("unit_rms_norm", lambda: _training(BY_HOST.of(fields=(("muon_scale_mode", "big"),)))),
        "weight decay in the gradient": (
            "decoupled_weight_decay",
            lambda: _training(BY_HOST.of(decoupled_weight_decay=False)),
        ),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[Any]]:
    return in_worlds_of_two_and_four(collect, folder)


@pytest.mark.parametrize("name", CASES)
def test_training_when_muon_is_sharded_then_it_is_that_of_whole_matrices(name: str, found: dict[str, Any]) -> None:
    assert_equal(found[name], CASES[name].case.ranks)


def test_load_when_muon_was_saved_then_the_run_goes_on(found: dict[str, Any]) -> None:
    for losses in found["resumed"]:
        assert losses["dp2"] == losses["whole"]
        # bf16 products over a part of a matrix add up in another order, as in test_megatron_core_parity.py.
        assert losses["tp2"] == pytest.approx(losses["whole"], abs=2e-3)


@pytest.mark.parametrize("name", AGAIN)
def test_load_when_the_layout_is_another_then_it_saves_what_it_loaded(
    name: str, found: dict[str, Any], folder: Path
) -> None:
    saved, again = (open_checkpoint(folder / each) for each in ("saved", name))
    keys = set(saved.tensors)
    assert {key.partition("/")[0] for key in keys} >= {"main", "momentum_buffer", "exp_avg"}
    assert keys == set(again.tensors)
    for key in keys:
        box = Box.whole(saved.tensors[key].shape)
        assert torch.equal(saved.read_box(key, box), again.read_box(key, box)), key


def test_load_when_the_optimizer_is_another_then_params_stay_and_it_learns(found: dict[str, Any]) -> None:
    assert_learns(found["crossed"])


@pytest.mark.parametrize("name", REFUSED)
def test_start_when_muon_cannot_serve_it_then_refused_on_all_ranks(name: str, found: dict[str, Any]) -> None:
    for messages in found["refused"]:
        assert REFUSED[name][0] in messages[name]
