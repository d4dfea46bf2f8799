"""The ONNX backend test suite in a form that tests can run: cases, comparison, and plain ONNX Runtime."""
