"""Reading a fork's source without importing it: on a login node, without its GPU and its packages.

`survey` reads a tree and returns what `found` describes; `tree` finds files and asks their syntax trees; `block` is the
text that the entry point puts into a fork.
"""
