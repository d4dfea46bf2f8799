"""Damaged ONNX models by number, and children that open, compile and run them beside plain ONNX Runtime."""
