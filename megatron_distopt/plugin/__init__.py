"""The install methods: how the package gets into a host, and out of it again."""

from megatron_distopt.plugin.arguments import add_arguments
from megatron_distopt.plugin.install import Installation, install

__all__ = ["Installation", "add_arguments", "install"]
