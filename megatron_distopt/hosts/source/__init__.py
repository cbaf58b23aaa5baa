"""Reading a fork's source without importing it: on a login node, without its GPU and its packages."""
