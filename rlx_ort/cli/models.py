"""Reading a model for a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort.cli.show import progress

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["read_model"]


def read_model(path: Path) -> Graph:
    """Return the graph of an ONNX or IR JSON file, with a spinner while a large one is read.

    Raises:
        ConversionError: the file is neither, is damaged, or its weight files are missing.
    """
    from rlx_ort.converters.from_onnx import load_graph

    with progress(f"reading {path}"):
        return load_graph(path)
