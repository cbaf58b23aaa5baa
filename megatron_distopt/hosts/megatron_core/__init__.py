"""megatron-core: our optimizer replaces the host's own. The host's DistributedDataParallel keeps
its buffers and collectives.

`facts` is data and imports nothing of the host. `get_in` builds the classes in `optimizer`.
"""
