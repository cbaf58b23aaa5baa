"""The doors: how the package gets into a host, and out of it again."""

from megatron_distopt.plugin.install import Installation, install

__all__ = ["Installation", "install"]
