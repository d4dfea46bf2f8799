"""Loads a graph from a file of any format this library writes or imports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["load_graph"]


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Return the graph in an ONNX file or an IR JSON file; the content decides, not the name.

    Raises:
        ConversionError: there is no such file, or it is neither.
    """
    from rlx_ort.converters.from_onnx import from_onnx
    from rlx_ort.ir.serde import load_json

    file = Path(path)
    if not file.is_file():
        raise ConversionError(f"{file} is no file; give the path of an .onnx or IR .json file")
    try:
        with file.open("rb") as stream:
            start = stream.read(64)
    except OSError as err:
        raise ConversionError(f"{file} cannot be read: {err}") from err
    # An ONNX file starts with a protobuf key, never with a brace: 0x7b would be a field with the removed group type.
    if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        return load_json(file)
    return from_onnx(file)
