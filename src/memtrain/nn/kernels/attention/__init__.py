"""Attention over heads whose queries and keys are turned, and its gradient."""
