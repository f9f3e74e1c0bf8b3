"""Measuring what was trained, and what the training cost."""
