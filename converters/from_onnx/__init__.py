"""ONNX -> `Graph`. Every valid model imports; exporting it again gives the same interface and the same results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rlx_ort.converters.protos import paused_collector
from rlx_ort.errors import ConversionError, GraphVerifyError
from rlx_ort.storage import read_regular

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.from_onnx.tensor_files import Folders, TensorFiles
    from rlx_ort.ir.graph import Graph

__all__ = ["Source", "from_onnx", "graph_of", "read_model"]

Source: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"


def read_model(source: Source, base_dir: str | os.PathLike[str] | None) -> tuple[onnx.ModelProto, Path | None]:
    """Return the model and the folder of its external data, None when that is unknown.

    Raises:
        ConversionError: there is no such file, or it is no ONNX model.
    """
    import onnx

    from rlx_ort.converters.from_onnx.tensor_files import parsed_model

    folder = None if base_dir is None else Path(base_dir)
    if isinstance(source, onnx.ModelProto):
        return parsed_model(source, "the model"), folder
    if isinstance(source, bytes | bytearray | memoryview):
        return parsed_model(bytes(source), "the bytes"), folder
    path = Path(source)
    try:
        data = read_regular(path)
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    return parsed_model(data, str(path)), folder or path.parent


@paused_collector()
def from_onnx(source: Source, *, base_dir: str | os.PathLike[str] | None = None, trusted_links: Folders = ()) -> Graph:
    """Return an ONNX model as a graph; external weights stay in their files, mapped into memory.

    Initializers become parameters with data, small index-like ones constants; so do all those of subgraphs.
    Model-local functions are inlined, sparse initializers made dense, and nodes sorted if they are not. Inputs that
    have a default value become parameters: set them by name instead of feeding them.

    Args:
        source: a path, the bytes of a model, or a `ModelProto`.
        base_dir: folder of the external data; by default the folder of the file.
        trusted_links: folders outside of it that links of external data may lead into, such as the `blobs` of a model
            in Hugging Face's cache. Without, a link that leaves the folder is refused.

    Raises:
        ConversionError: the source is no ONNX model, is damaged, or refers to data it must not have.
    """
    from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles, trusted_folders

    trusted = trusted_folders(trusted_links)
    model, folder = read_model(source, base_dir)
    return graph_of(model, ExternalFiles(folder, trusted))


@paused_collector()
def graph_of(model: onnx.ModelProto, files: TensorFiles) -> Graph:
    """Return a model as a graph; `files` is asked for external data.

    Raises:
        ConversionError: the model breaks a rule of ONNX that its meaning depends on, or data cannot be had.
    """
    from rlx_ort.converters.from_onnx.builder import GraphBuilder
    from rlx_ort.converters.from_onnx.rewrite import check_operands, fill_types, transpose_at_once, upgraded
    from rlx_ort.converters.from_onnx.structure import check_model
    from rlx_ort.converters.protos import declared_types

    try:
        check_model(model)
        graph = GraphBuilder(model, declared_types(model), files).build()
        if model.functions:
            fill_types(graph)
        check_operands(graph)
        graph = upgraded(graph)
        transpose_at_once(graph)
        return graph
    except UnicodeDecodeError as err:
        # Protobuf decodes a text when it is looked at, so this may come from anywhere.
        raise ConversionError(f"the model is damaged: a name in it is not UTF-8 text: {err}") from err
    except GraphVerifyError as err:
        raise ConversionError(f"the model cannot be imported: {err}") from err
