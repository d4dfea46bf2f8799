"""`read_weights`: any weight file as a mapping of names to tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

from rlx_ort.converters.sources.detect import Format, format_of
from rlx_ort.converters.sources.weight_file import WeightFile
from rlx_ort.errors import ConversionError

__all__ = ["GgufAs", "read_weights"]

GgufAs: TypeAlias = Literal["f32", "f16", "packed"]
"""What quantised tensors of a GGUF file are read as: floats, or their blocks as bytes `(rows, row bytes)`."""


def read_weights(path: str | os.PathLike[str], *, gguf_as: GgufAs = "f32") -> WeightFile:
    """Return the tensors of a weight file by name; the content decides what it is, not the name.

    Tensors of safetensors files, stored members of npz archives, initializers of ONNX models and plain tensors of
    GGUF files are mapped, not read. Compressed and quantised ones are made when they are asked for.

    Args:
        path: safetensors, an index of safetensors files, npz, GGUF, or an ONNX model, whose initializers are taken.
        gguf_as: what quantised tensors of a GGUF file are read as.

    Raises:
        ConversionError: there is no such file, it holds no weights or damaged ones, names files outside its folder,
            or a package it needs is not installed.
    """
    file = Path(path)
    kind, detail = format_of(file)
    match kind:
        case Format.SAFETENSORS:
            from rlx_ort.ir.tensor_file import read_tensors

            return WeightFile.of(str(file), read_tensors(file)[0])
        case Format.SAFETENSORS_INDEX:
            from rlx_ort.converters.sources.sharded import read_sharded

            return read_sharded(file)
        case Format.NPZ:
            from rlx_ort.converters.sources.npz import read_npz

            return read_npz(file)
        case Format.GGUF:
            from rlx_ort.converters.sources.gguf_file import read_gguf

            return read_gguf(file, gguf_as)
        case Format.ONNX:
            return _initializers(file)
    what = detail if kind is Format.FOREIGN else kind.value
    if kind in (Format.PICKLE, Format.TORCH_PICKLE, Format.TORCHSCRIPT):
        what += (
            ". Reading one runs code that is in the file, so that is never done. Where you trust it, load it in "
            "PyTorch yourself and save its weights with safetensors.torch.save_file"
        )
    elif kind is Format.UNKNOWN:
        what += f": {detail}"
    raise ConversionError(f"{file} is {what}; known weight files are safetensors, npz, GGUF and ONNX")


def _initializers(path: Path) -> WeightFile:
    from rlx_ort.converters.from_onnx.external import ExternalFiles
    from rlx_ort.converters.from_onnx.tensors import tensor_data
    from rlx_ort.converters.sources.onnx_file import open_onnx

    bundle = open_onnx(path)
    inside = {
        tensor.name: tensor_data(tensor, ExternalFiles(None))
        for tensor in bundle.proto.graph.initializer
        if tensor.name not in bundle.weights
    }
    return WeightFile.of(str(path), {**bundle.weights, **inside})
