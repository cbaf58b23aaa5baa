"""`megatron-distopt doctor`: `diagnose` asks about the fork, this machine and the launch flags, in `findings`."""
