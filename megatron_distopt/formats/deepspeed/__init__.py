"""Files of DeepSpeed: ZeRO checkpoints and universal checkpoints."""
