"""The update: kernels, loss scale, gradient norm, and the sharded step that uses them (step.py)."""
