"""Files of megatron-core: its own optimizer files and its distributed checkpoints."""
