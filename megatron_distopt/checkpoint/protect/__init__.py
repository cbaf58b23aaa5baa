"""Snapshots of the optimizer state in the memory of two nodes, from which a run goes on after it
lost one of them."""
