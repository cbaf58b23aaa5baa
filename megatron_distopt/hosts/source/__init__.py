"""Reading a fork's source without importing it: on a login node, without its GPU and its packages.

`survey` says what `found` describes; `tree` finds and parses files, `syntax` and `aliases` ask them questions.
"""
