"""The update: which kernel, which scale, which norm, and the sharded step that ties them together
(step.py)."""
