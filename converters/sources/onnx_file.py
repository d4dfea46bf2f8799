"""ONNX files as bundles: any opset, data inside or in files beside the model."""

from __future__ import annotations

from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, take_out
from rlx_ort.converters.from_onnx.mapped import read_mapped
from rlx_ort.converters.from_onnx.structure import check_model
from rlx_ort.errors import ConversionError

__all__ = ["open_onnx"]


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
