"""A pytest plugin (`-p tests.support.preloaded_core`): ranks are forked from processes that know megatron-core as well.

For a run of files that all need it: it is imported by two processes, and not by each rank of each file.
"""

from __future__ import annotations

from multiprocessing.forkserver import ForkServer

import pytest

from tests.support import spawn


class CoreServer(ForkServer):
    def set_forkserver_preload(self, modules_names: list[str]) -> None:
        super().set_forkserver_preload([*modules_names, "tests.support.gpt"])


def pytest_configure(config: pytest.Config) -> None:
    spawn._SERVERS = (CoreServer(), CoreServer())
