"""The parts of a graph: dtypes, shapes, op families, `Graph` and `Value`, verification and JSON.

The package is independent of ONNX and of devices; it imports numpy and ml_dtypes only.
"""
