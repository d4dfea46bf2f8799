"""What a device really does, measured through ONNX Runtime sessions, kept on disk, and turned into cost models."""
