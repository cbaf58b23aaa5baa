"""Files of plain torch: its distributed checkpoints, and one file of `torch.save`."""
