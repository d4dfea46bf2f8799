"""ONNX -> `Graph`. Every valid model imports; exporting it again gives the same interface and the same results."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlx_ort.converters.collector import paused_collector
from rlx_ort.converters.from_onnx.source import Source
from rlx_ort.errors import ConversionError, GraphVerifyError

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.from_onnx.external import TensorFiles
    from rlx_ort.ir.graph import Graph

__all__ = ["from_onnx", "graph_of"]


@paused_collector()
def from_onnx(source: Source, *, base_dir: str | os.PathLike[str] | None = None) -> Graph:
    """Return an ONNX model as a graph; external weights stay in their files, mapped into memory.

    Initializers become parameters with data, small index-like ones constants; so do all those of subgraphs.
    Model-local functions are inlined, sparse initializers made dense, and nodes sorted if they are not. Inputs that
    have a default value become parameters: set them by name instead of feeding them.

    Args:
        source: a path, the bytes of a model, or a `ModelProto`.
        base_dir: folder of the external data; by default the folder of the file.

    Raises:
        ConversionError: the source is no ONNX model, is damaged, or refers to data it must not have.
    """
    from rlx_ort.converters.from_onnx.external import ExternalFiles
    from rlx_ort.converters.from_onnx.source import read_model

    model, folder = read_model(source, base_dir)
    return graph_of(model, ExternalFiles(folder))


@paused_collector()
def graph_of(model: onnx.ModelProto, files: TensorFiles) -> Graph:
    """Return a model as a graph; `files` is asked for external data.

    Raises:
        ConversionError: the model breaks a rule of ONNX that its meaning depends on, or data cannot be had.
    """
    from rlx_ort.converters.from_onnx.builder import GraphBuilder
    from rlx_ort.converters.from_onnx.rewrite import fill_types, with_ir_ops
    from rlx_ort.converters.from_onnx.source import is_fully_typed, skeleton
    from rlx_ort.converters.from_onnx.structure import check_model
    from rlx_ort.converters.to_onnx.infer import with_types

    try:
        check_model(model)
        typed = model if is_fully_typed(model) else with_types(skeleton(model))
        graph = GraphBuilder(model, typed, files).build()
        if model.functions:
            fill_types(graph)
        return with_ir_ops(graph)
    except UnicodeDecodeError as err:
        # Protobuf decodes a text when it is looked at, so this may come from anywhere.
        raise ConversionError(f"the model is damaged: a name in it is no UTF-8 text: {err}") from err
    except GraphVerifyError as err:
        raise ConversionError(f"the model cannot be imported: {err}") from err
