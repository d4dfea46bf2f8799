"""The speed of devices, measured through ONNX Runtime sessions, kept on disk, and turned into cost models."""
