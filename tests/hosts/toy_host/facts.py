"""What the small host beside this file looks like, by the steps 1 and 2 of
docs/porting.md. Imports nothing of the host."""

from __future__ import annotations

from megatron_distopt.patch_points import PatchPoint
from megatron_distopt.plugin.detect import Generation

PATCH_POINT = PatchPoint("megatron.toy.optimizer", "get_megatron_optimizer", ("args", "model"))
CLASS = "ToyDistributedOptimizer"
TOY = Generation(
    "toy", "the tests'", ("megatron.toy.optimizer",), (PATCH_POINT,), "tests.hosts.toy_host.get_in"
)
