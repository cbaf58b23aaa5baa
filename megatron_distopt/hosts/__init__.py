"""Translation between a host's names and ours. The only folder that imports megatron.*, and only
when a host is used."""
