"""pytorch_optimizer, imported without transformers: it would only ask that whether DeepSpeed's ZeRO-3 is on."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from unittest import mock

_find_spec = importlib.util.find_spec


def _find_others(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name == "transformers" else _find_spec(name, package)


# Importing transformers takes more than a second, in each worker and in each rank.
with mock.patch("importlib.util.find_spec", _find_others):
    import pytorch_optimizer  # noqa: F401
