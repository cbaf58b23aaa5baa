"""What benchmarks compare this package with: one peer a file, each with the same model and the same
state."""
