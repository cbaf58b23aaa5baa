"""megatron-core's formula of Muon: figures that emerging_optimizers gave, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.owners.muon import orthogonalize
from megatron_distopt.optimizer.owners.muon_options import MegatronMuonOptions

MATRIX = ((1.0, 2.0, -3.0), (0.5, -1.0, 2.0))
#: By coefficient_type: steps, and what `newton_schulz` of emerging_optimizers (August 2026) makes
#: of it in fp32.
FIGURES = {
    "simple": (5, ((0.43221, 0.37753, -0.44457), (0.54071, -0.10762, 0.45868))),
    "quintic": (6, ((0.05091, 0.06294, -0.08468), (0.05137, -0.02499, 0.06942))),
    "polar_express": (9, ((0.60329, 0.51859, -0.60589), (0.76031, -0.14463, 0.63326))),
    "aol": (5, ((-0.19434, 0.20557, -0.45692), (-0.49334, -0.20183, 0.10653))),
    "deepseekv4": (11, ((0.60329, 0.51859, -0.60589), (0.76031, -0.14463, 0.63326))),
}


@pytest.mark.parametrize("name", FIGURES)
def test_orthogonalize_when_coefficients_are_named_then_the_figures_of_the_package(
    name: str,
) -> None:
    steps, expected = FIGURES[name]
    options = MegatronMuonOptions(coefficient_type=name, ns_steps=steps, matmul_precision="highest")
    found = orthogonalize(torch.tensor(MATRIX), options)
    # Figures have five digits; a polynomial that is not yet near its fixed point multiplies
    # roundings of fp32 by 1e3.
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_orthogonalize_when_products_are_fp32_then_the_users_precision_is_as_before() -> None:
    before = torch.get_float32_matmul_precision()
    orthogonalize(torch.tensor(MATRIX), MegatronMuonOptions(matmul_precision="high"))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("mode", "factor"), [("spectral", 3.0), ("shape_scaling", 1.0), ("unit_rms_norm", 2 / 3)]
)
def test_factor_when_the_scale_mode_is_given_then_it_is_that_of_the_shape(
    mode: str, factor: float
) -> None:
    assert MegatronMuonOptions(scale_mode=mode, extra_scale_factor=0.5).factor((4, 9)) == factor / 2


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"coefficient_type": "cubic5"}, "polar_express, aol"),
        ({"scale_mode": "original"}, "unit_rms_norm"),
        ({"matmul_precision": "low"}, "medium"),
        ({"ns_steps": 0}, "at least 1"),
        ({"momentum": math.nan}, "at least 0"),
    ],
)
def test_options_when_a_value_cannot_work_then_refused(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        MegatronMuonOptions(**wrong)
