"""The command `megatron-distopt`. Each command has a file that answers it, with an `Answer`."""
