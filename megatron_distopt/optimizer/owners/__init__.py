"""Optimizers that need a whole matrix or a whole param: Muon, and classes of any kind. One rank
owns and updates each."""
