"""Sampling from trained models, and the bundled weights."""
