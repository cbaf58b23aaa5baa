"""Ray trains in processes of its own, which a runner around the driver does not reach: what does.

ray is 250 MB and no requirement of the tests; where it is missing they are left out.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_distopt.cli.main import main
from tests.support.cases import Case

ray = pytest.importorskip("ray", reason="ray is not installed")

SIZE = 2


def _train(rank: int, store: str) -> tuple[str, list[float]]:
    """In an actor, with the host's own call: the module of the optimizer that it built, and
    losses."""
    import torch.distributed as dist

    from tests.support import gpt

    dist.init_process_group("gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE)
    training = gpt.Training(Case("host-distributed", dp=SIZE, num_microbatches=1))
    losses = [training.step().loss for _ in range(2)]
    return type(gpt.parts_of(training.optimizer)[0]).__module__, losses


@pytest.fixture(params=["nothing", "setup hook", "patched"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    path, environment = sys.path, dict[str, Any]()
    if request.param == "setup hook":
        environment["worker_process_setup_hook"] = "megatron_distopt.install"
    if request.param == "patched":
        core = find_spec("megatron.core")
        assert core is not None and core.origin is not None
        shutil.copytree(Path(core.origin).parent, tmp_path / "site" / "megatron" / "core")
        assert main(["patch", "--apply", str(tmp_path / "site")]) == 0
        path = [str(tmp_path / "site"), *path]
    environment["env_vars"] = {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=SIZE, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield request.param
    ray.shutdown()


def test_actor_when_the_package_is_hooked_in_or_patched_in_then_it_trains_with_ours(
    way: str, tmp_path: Path
) -> None:
    train = ray.remote(num_cpus=1)(_train)
    found = ray.get(
        [train.remote(rank, str(tmp_path / "store")) for rank in range(SIZE)], timeout=400
    )
    package = "megatron.core" if way == "nothing" else "megatron_distopt"
    assert {module.partition(".hosts")[0].partition(".optimizer")[0] for module, _ in found} == {
        package
    }
    assert found[0][1] == found[1][1]
