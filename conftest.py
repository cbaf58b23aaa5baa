"""For all tests, doctests included."""

import os

# Importing DeepSpeed takes seconds in every spawned rank and writes a line to stdout. What follows from asking it is
# tested where it is the subject: tests/optimizer/test_accelerator.py and tests/test_configs.py.
os.environ.setdefault("MEGATRON_DISTOPT_ACCELERATOR", "torch")

# Collecting doctests imports a module, and these import megatron, which only spawned ranks should do.
collect_ignore_glob = ["megatron_distopt/hosts/megatron_core/*", "megatron_distopt/hosts/megatron_2023/*"]
