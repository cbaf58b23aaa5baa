"""Files of the Megatrons of 2023: model files, and the optimizer's state as plain, gathered or
per-rank files."""
