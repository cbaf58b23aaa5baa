"""What tests of several folders set up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

#: Files that take longest, with many seconds in few tests. They begin first, or one process would have them at the end.
LONGEST = (
    *("differential/test_random_programs", "hosts/test_megatron_2023_checkpoints", "hosts/test_megatron_core_versions"),
    *("hosts/test_megatron_2023_install_methods", "sim/test_training", "optimizer/test_triton_interpreted"),
    *("differential/test_idioms", "hosts/test_promise_2023", "hosts/test_megatron_core_parity", "plugin/test_runner"),
    *("hosts/test_megatron_2023_overlap", "hosts/test_megatron_2023_numerics", "sim/test_hosts", "comm/test_end"),
    *("test_configs", "sim/test_counts", "hosts/test_param_overlap", "test_quickstart", "benchmarks/test_gpu_check"),
    *("hosts/test_megatron_2023_contract", "hosts/test_megatron_2023_defects", "hosts/test_promise_core"),
    *("differential/test_scripts", "optimizer/test_compiled_kernels", "hosts/test_megatron_core_folders"),
    *("comm/test_pairwise", "benchmarks/test_plots", "recipes/test_recipes", "hosts/test_megatron_2023_own_files"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts these files first; the order within a file stays."""
    places = {f"tests/{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
