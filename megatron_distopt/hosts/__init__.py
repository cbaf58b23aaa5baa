"""Adapters that translate between a host's names and ours. No other folder imports megatron.*, and
this one only when a host is used."""
