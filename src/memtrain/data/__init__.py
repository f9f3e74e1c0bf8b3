"""What is learned: tasks that make batches of token sequences."""
