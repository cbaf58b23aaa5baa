"""Keeps pytest away from the fork: its `megatron` wins over an installed one in processes of its
own only."""

collect_ignore_glob = ["megatron/*", "pretrain.py"]
