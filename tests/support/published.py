"""pytorch_optimizer, imported without transformers: it would only ask that whether DeepSpeed's
ZeRO-3 is on."""

from importlib.util import find_spec
from unittest import mock

# Importing transformers takes more than a second, in each worker and in each rank.
with mock.patch(
    "importlib.util.find_spec",
    lambda name, *of: None if name == "transformers" else find_spec(name, *of),
):
    import pytorch_optimizer  # noqa: F401
