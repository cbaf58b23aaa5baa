"""Tests of examples/recipes."""
