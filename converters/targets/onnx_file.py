"""ONNX files: weights inside, in a data file, or in a safetensors file that the model refers to."""

from __future__ import annotations

from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, external_tensors, location_of
from rlx_ort.converters.files import save_bundle
from rlx_ort.converters.protos import copied
from rlx_ort.converters.targets.options import TargetOptions

__all__ = ["write_onnx"]


def write_onnx(bundle: ModelBundle, path: Path, options: TargetOptions) -> None:
    """Write an ONNX file, at the chosen opset and IR version.

    Raises:
        ConversionError: a node cannot be said in the opset, the file would be above 2 GB, or it cannot be written.
    """
    if options.opset is not None or options.ir_version is not None:
        from rlx_ort.converters.transforms.opset import to_opset

        bundle, _ = to_opset(bundle, options.opset or bundle.opset, options.ir_version)
    if options.params is not None:
        _detach(bundle, path, options.params)
        return
    save_bundle(bundle, path, external_data=options.external_data, progress=options.progress)


def _detach(bundle: ModelBundle, path: Path, name: str) -> None:
    """Write the weights to a safetensors file, and the model with references to places in it."""
    from rlx_ort.ir.tensor_file import read_tensors, write_tensors

    beside = path.with_name(name)
    write_tensors(beside, bundle.weights, {"format": "onnx"})
    stored, _ = read_tensors(beside)
    model = copied(bundle.proto)
    for tensor in external_tensors(model):
        data = stored[location_of(tensor)]
        del tensor.external_data[:]
        offset = 0 if data.source is None else data.source.offset
        for key, value in (("location", name), ("offset", offset), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString(deterministic=True))
