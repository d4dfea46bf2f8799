"""`open_source`: any model file as a bundle. `read_weights`: any weight file as a mapping of names to tensors."""

from __future__ import annotations

import os
from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, take_out
from rlx_ort.converters.from_onnx.structure import check_model
from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles, read_mapped
from rlx_ort.converters.from_onnx.tensors import tensor_data
from rlx_ort.converters.sources.detect import Format, format_of
from rlx_ort.converters.sources.gguf_file import read_gguf
from rlx_ort.converters.sources.npz import read_npz
from rlx_ort.converters.sources.pt2 import open_pt2
from rlx_ort.converters.sources.weights import GgufAs, WeightFile, read_sharded
from rlx_ort.errors import ConversionError, GraphVerifyError
from rlx_ort.ir.serde import load_json
from rlx_ort.ir.tensor import read_tensors

__all__ = ["open_onnx", "open_source", "read_weights"]

_KNOWN = "known are ONNX, graph files of rlx_ort (.json) and exported programs of PyTorch (.pt2)"


def open_source(path: str | os.PathLike[str], *, opset: int | None = None) -> ModelBundle:
    """Return the model in a file as a bundle; the content decides what it is, not the name.

    Weights of ONNX and graph files stay in their files, mapped. Nothing in a file is unpickled or executed.

    Args:
        path: an ONNX file, a graph file of `rlx_ort`, or an exported program of PyTorch (`.pt2`).
        opset: the opset to export a program of PyTorch with; the other formats have theirs.

    Raises:
        ConversionError: there is no such file, it is no model or damaged, or a package it needs is not installed.
    """
    file = Path(path)
    kind, detail = format_of(file)
    match kind:
        case Format.ONNX:
            return open_onnx(file)
        case Format.IR_JSON:
            return _open_json(file)
        case Format.PT2:
            return open_pt2(file, opset=opset)
    raise ConversionError(f"{file} is {detail if kind is Format.FOREIGN else kind.value}{_advice(kind, file, detail)}")


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
            return WeightFile.of(str(file), read_tensors(file)[0])
        case Format.SAFETENSORS_INDEX:
            return read_sharded(file)
        case Format.NPZ:
            return read_npz(file)
        case Format.GGUF:
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


def _open_json(path: Path) -> ModelBundle:
    try:
        return bundle_from_graph(load_json(path), origin=str(path))
    except GraphVerifyError as err:
        raise ConversionError(f"{path}: {err}") from err


def _advice(kind: Format, path: Path, detail: str) -> str:
    if kind.is_weights:
        return (
            ", which holds weights and no computation; give the model itself, and these as its weights: "
            f"apply_weights(model, read_weights({str(path)!r})), or --params on the command line"
        )
    match kind:
        case Format.ORT:
            return ", which cannot be turned back into ONNX; convert the ONNX model it was made from"
        case Format.PICKLE | Format.TORCH_PICKLE | Format.TORCHSCRIPT:
            return (
                ". Opening one runs code that is in the file, so that is never done. Where you trust it, load it in "
                "PyTorch yourself and save torch.export.export(...) as .pt2, or its weights as safetensors"
            )
        case Format.UNKNOWN:
            return f": {detail}; {_KNOWN}"
        case _:
            return f"; {_KNOWN}"


def open_onnx(path: Path) -> ModelBundle:
    """Return a model file as a bundle; its weights stay in the file, mapped, and are not read.

    Raises:
        ConversionError: the file cannot be read, is no ONNX model, is damaged, or names data outside its folder.
    """
    model, files = read_mapped(path)
    try:
        check_model(model)
        light, weights = take_out(model, files)
    except UnicodeDecodeError as err:
        # Protobuf decodes a text when it is looked at, so this may come from anywhere.
        raise ConversionError(f"{path} is damaged: a name in it is no UTF-8 text: {err}") from err
    except ConversionError as err:
        raise ConversionError(f"{path}: {err}") from err
    return ModelBundle(light, weights, str(path))


def _initializers(path: Path) -> WeightFile:
    bundle = open_onnx(path)
    inside = {
        tensor.name: tensor_data(tensor, ExternalFiles(None))
        for tensor in bundle.proto.graph.initializer
        if tensor.name not in bundle.weights
    }
    return WeightFile.of(str(path), {**bundle.weights, **inside})
