"""The install methods: how the package gets into a host, and out of it again.

Imports nothing, because commands that only read files use parts of it without torch.
"""
