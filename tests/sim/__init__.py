"""The package on a simulated accelerator."""
