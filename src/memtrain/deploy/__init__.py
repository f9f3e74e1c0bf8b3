"""Trained networks for other programs: Hugging Face, ONNX, a page for a browser, a local server."""
