"""How training runs: the step, the engine under it, checkpoints, metrics."""
