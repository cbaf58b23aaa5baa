"""megatron-core: its DistributedDataParallel keeps buffers and collectives, our optimizer takes the
place of its own.

`facts` is data and imports nothing of the host; `adapter` builds; `optimizer` holds the classes
that the host gets.
"""
