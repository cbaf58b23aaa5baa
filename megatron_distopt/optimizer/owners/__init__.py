"""Optimizers that need a matrix or a param whole: Muon, and classes of any kind. One rank owns each
and updates it."""
