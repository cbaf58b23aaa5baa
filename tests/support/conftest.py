"""Keeps the search for doctests out of what only other processes may import: it changes torch or
the host for good."""

collect_ignore = ["gpt.py", "preloaded.py", "preloaded_core.py", "main_line"]
