"""Keeps the search for doctests out of what only the ranks may import: it maps torch.cuda for the life of a process."""

collect_ignore = ["gpt.py"]
