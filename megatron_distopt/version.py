"""The package's version; setup.py reads it from here."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
