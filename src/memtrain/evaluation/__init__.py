"""Held-out scores, n-gram baselines and the cost of training."""
