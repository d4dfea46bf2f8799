"""Everything between graphs of the IR and files of other formats.

- `to_onnx` writes a `Graph` as an ONNX model in normal form; `from_onnx` reads an ONNX model as a `Graph`.
- `bundle.ModelBundle` is a model on its way through a conversion, with its weights beside it. `sources` make bundles of
  files and PyTorch modules, `transforms` change them, `targets` writes them.
- `precision_pass` and `decompose` rewrite graphs of the IR.

No module here opens a session: functions that need ONNX Runtime are handed in by the caller.
"""
