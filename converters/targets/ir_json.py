"""The graph format of `rlx_ort`: JSON, with the weights in a safetensors file beside it."""

from __future__ import annotations

from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, graph_from_bundle

__all__ = ["write_ir_json"]


def write_ir_json(bundle: ModelBundle, path: Path) -> None:
    """Write a graph file; the model's functions are inlined in it and its nodes become IR ops where those say the same.

    Raises:
        ConversionError: the model cannot be imported as a graph, or a file cannot be written.
    """
    from rlx_ort.ir.serde import save_json

    save_json(graph_from_bundle(bundle), path)
