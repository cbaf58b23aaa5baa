"""One pool for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.pool import Pool, pool


@pytest.fixture(scope="session")
def running() -> Iterator[Pool]:
    with pool() as started:
        yield started
