"""Run folders, the training loop and step, checkpoints, several processes."""
