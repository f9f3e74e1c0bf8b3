"""A local HTTP server of a trained network, in the form of OpenAI's completions."""
