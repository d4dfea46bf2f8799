"""What a user builds: dtypes, shapes, op families, `Graph` and `Value`, verification and JSON.

Nothing here knows ONNX or a device; this package imports numpy and ml_dtypes only.
"""
