"""A run on disk and its processes: folder, ownership, progress, checkpoints, several devices."""
