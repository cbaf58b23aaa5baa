"""The package's version, and the releases of torch and megatron-core that it supports. setup.py
reads them from here."""

VERSION = "0.1.0"
#: A requirement of pip's, which installs the newest of these that supports the machine's Python.
MEGATRON_CORE = "megatron-core>=0.9,<0.20"
#: The oldest release of torch that has all functions that the package calls.
OLDEST_TORCH = (2, 6)
