"""What the environment says that this fork should be; README.md has the table."""

import os

FILE_LAYOUT = os.environ.get("MINI_FORK_FILE_LAYOUT", "gathered")
FLAGS = os.environ.get("MINI_FORK_FLAGS", "hyphen")
ADAM = os.environ.get("MINI_FORK_ADAM", "fused")
# Helps the fork's own optimizers onto a CPU.
NATIVE = os.environ.get("MINI_FORK_NATIVE") == "1"
# Gives experts and sequence parallelism the groups that they need, for reference curves.
REPAIRED = os.environ.get("MINI_FORK_REPAIRED") == "1"

# Where the model, its buffers and its batches are.
DEVICE = os.environ.get("MINI_FORK_DEVICE", "cpu")

for _name, _value, _known in (
    ("FILE_LAYOUT", FILE_LAYOUT, ("per_rank", "gathered")),
    ("FLAGS", FLAGS, ("hyphen", "underscore")),
    ("ADAM", ADAM, ("fused", "torch")),
):
    if _value not in _known:
        raise ImportError(f"MINI_FORK_{_name}={_value} must be one of {_known}")
