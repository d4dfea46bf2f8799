"""`open_source`: any model file as a bundle."""

from __future__ import annotations

import os
from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph
from rlx_ort.converters.sources.detect import Format, format_of
from rlx_ort.errors import ConversionError, GraphVerifyError

__all__ = ["open_source"]

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
            from rlx_ort.converters.sources.onnx_file import open_onnx

            return open_onnx(file)
        case Format.IR_JSON:
            return _open_json(file)
        case Format.PT2:
            from rlx_ort.converters.sources.pt2 import open_pt2

            return open_pt2(file, opset=opset)
    raise ConversionError(f"{file} is {detail if kind is Format.FOREIGN else kind.value}{_advice(kind, file, detail)}")


def _open_json(path: Path) -> ModelBundle:
    from rlx_ort.ir.serde import load_json

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
