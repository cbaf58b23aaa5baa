"""The table of features that exclude each other: each row is refused, in either order, with what to
do instead."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata
from typing import Any

import pytest

import megatron_distopt
from megatron_distopt import DistOptConfig
from megatron_distopt.compatibility import EXCLUSIONS, Feature, check_compatible
from megatron_distopt.errors import ConfigError

#: By feature, an option that asks for it.
ASKED: dict[Feature, dict[str, Any]] = {
    Feature.OFFLOAD: {"offload_fraction": 0.5},
    Feature.LOW_PRECISION: {"exp_avg_sq_dtype": "int8"},
    Feature.BF16_MAIN_PARAMS: {"main_params_dtype": "remainder"},
    Feature.GATHERED_FORMAT: {"checkpoint_format": "gathered"},
    Feature.REDUCE_DTYPE: {"reduce_dtype": "bfloat16"},
    Feature.OVERLAPPED_GATHER: {"overlap_param_gather": True},
    Feature.NO_LOSS_SCALE: {},
    Feature.MUON_OPTIONS: {"muon_momentum": 0.9},
    Feature.NOT_MUON: {"optimizer": "sgd"},
    Feature.NOT_ADAM: {"optimizer": "torch.optim:Adagrad"},
    Feature.WHOLE_PARAMS: {"optimizer": "muon"},
    Feature.AVERAGES: {"ema_decay": 0.999},
    Feature.NO_AVERAGES: {},
    Feature.AVERAGED_EVALUATION: {"ema_eval": True},
}


PAIRS = [(feature, other) for feature, excluded in EXCLUSIONS.items() for other in excluded]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(feature.name for feature in pair))
def test_features_when_they_exclude_each_other_then_both_are_named_with_what_to_do(
    pair: tuple[Feature, Feature],
) -> None:
    options = {name: value for feature in pair for name, value in ASKED.get(feature, {}).items()}
    others = {feature: f"words of {feature.name}" for feature in pair if feature not in ASKED}
    if Feature.HOSTS_MUON in pair:
        options["optimizer"] = "muon"
    with pytest.raises(ConfigError) as refused:
        check_compatible(DistOptConfig(**options), others)
    assert EXCLUSIONS[pair[0]][pair[1]] in str(refused.value)
    assert all(words in str(refused.value) for words in others.values())


@pytest.mark.parametrize("feature", ASKED)
def test_feature_when_it_stands_alone_then_taken(feature: Feature) -> None:
    if feature not in (Feature.MUON_OPTIONS, Feature.AVERAGED_EVALUATION):
        check_compatible(DistOptConfig(**ASKED[feature]))
    check_compatible(DistOptConfig(loss_scale="dynamic"), {Feature.FP16_PARAMS: "fp16 params"})


@pytest.mark.parametrize(
    ("installed", "is_served"),
    [("2.5.1+cu124", False), ("1.13.1", False), ("2.6.0a0+git", True), ("2.13.0+cpu", True)],
)
def test_import_when_torch_is_older_than_the_oldest_that_is_served_then_it_says_what_to_type(
    installed: str, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    with (
        nullcontext()
        if is_served
        else pytest.raises(ImportError, match=r"pip install 'torch>=2\.6'")
    ):
        megatron_distopt._check_torch()
