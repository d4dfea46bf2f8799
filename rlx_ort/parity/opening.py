"""Opens a model without importing it as a graph, so that the file that users get is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, bundle_of, location_of
from rlx_ort.converters.from_onnx.tensor_files import Folders
from rlx_ort.converters.onnx_types import tensor_proto, tensor_type
from rlx_ort.converters.protos import copied, graphs_of, infer_proto, nodes_of
from rlx_ort.converters.sources import open_source
from rlx_ort.converters.to_onnx.exported import (
    ExportedModel,
    ExportedNode,
    is_shape_type,
    may_hold_sizes,
    shape_only_nodes,
)
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError
from rlx_ort.execution.inputs import InputPlan
from rlx_ort.execution.placement import Placement, build_placement, enforce
from rlx_ort.execution.session import working_provider
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.storage import read_regular


@dataclass(frozen=True, slots=True)
class OrtFormatFile:
    """The file of a model in ONNX Runtime's own format, which only a session can read."""

    path: Path

    @property
    def origin(self) -> str:
        """The path, for messages."""
        return str(self.path)


ModelSource: TypeAlias = ModelBundle | OrtFormatFile | Graph | onnx.ModelProto | str | Path
"""A model, or the file of one."""


def as_model(source: ModelSource, trusted_links: Folders = ()) -> ModelBundle | OrtFormatFile:
    """Return a model in a form that `open_model` takes; weights in files are mapped, not read.

    Links of a file's external data may lead into the trusted folders; see `from_onnx`.

    Raises:
        ConversionError: the file's format is unknown or damaged, or the graph cannot be exported.
    """
    if isinstance(source, ModelBundle | OrtFormatFile):
        return source
    if isinstance(source, Graph):
        return bundle_from_graph(source)
    if isinstance(source, onnx.ModelProto):
        return bundle_of(source)
    path = Path(source)
    if path.suffix.lower() == ".ort":
        return OrtFormatFile(path)
    return open_source(path, trusted_links=trusted_links)


class OpenModel:
    """An open session of a model, with the inputs that a run needs; extra outputs come last."""

    def __init__(self, session: EngineSession, input_types: Mapping[str, ValueType], placement: Placement) -> None:
        self._session = session
        self._plan = InputPlan(input_types)
        self.input_types = input_types
        self.output_names = list(session.output_types)
        self.placement = placement

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        """Run once and return outputs by name, all by default.

        Raises:
            InputError: an input is missing, unknown, or of another type than declared.
            EngineError: the run failed, or the session is closed.
        """
        return self._session.run(list(outputs or self.output_names), self._plan.feeds(feeds))


@contextmanager
def open_model(
    model: ModelBundle | OrtFormatFile,
    device: Device | str = "cpu",
    options: CompileOptions | None = None,
    *,
    extra_outputs: Sequence[str] = (),
) -> Iterator[OpenModel]:
    """Open a session of a model on a device for a block; weights that are mapped stay mapped.

    The device runs every node, unless `options.placement` is assisted; options about the export of graphs have no
    effect. `extra_outputs` are values inside the model to return as outputs too.

    Raises:
        DeviceUnavailableError: the device does not work here.
        PlacementError: nodes are not on the device.
        LegalizeError: a node has no kernel.
        EngineError: the engine refused the model.
    """
    device = Device(device)
    options = options or CompileOptions()
    provider = working_provider(device)
    weights: dict[str, TensorData] = {}
    if isinstance(model, OrtFormatFile):
        exported: ExportedModel = _OrtModel(onnx.ModelProto(), (), (), {}, {}, path=model.path)
    else:
        exported, weights = _exported(model, extra_outputs, described=device != Device.CPU)
    session = provider.open(SessionRequest(device, exported, weights, options))
    try:
        placement = build_placement(provider.ep_name or provider.name, session.assignments, exported)
        enforce(placement, options.placement or PlacementRule.STRICT, device)
        # Sessions list inputs that have a default too.
        inputs = session.input_types if isinstance(model, OrtFormatFile) else model.input_types()
        yield OpenModel(session, inputs, placement)
    finally:
        session.close()


def _exported(
    model: ModelBundle, extra_outputs: Sequence[str], *, described: bool
) -> tuple[ExportedModel, dict[str, TensorData]]:
    """Return the model in the form that providers take: weights referenced by name, and stored in bodies."""
    proto = copied(model.proto)
    weights = {}
    for graph in graphs_of(proto):
        for tensor in graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            data = model.weights[location_of(tensor)]
            if graph is proto.graph:
                weights[tensor.name] = data
                del tensor.external_data[:]
                tensor.external_data.add(key="location", value=tensor.name)
            else:  # engines take references in the main graph only
                tensor.CopyFrom(tensor_proto(data, tensor.name))
    known = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra_outputs if name not in known)
    nodes = _nodes(proto) if described else ()
    names = {node.origin: node.name for node in nodes}
    return ExportedModel(proto, tuple(weights), nodes, names, model.input_types()), weights


def _nodes(proto: onnx.ModelProto) -> tuple[ExportedNode, ...]:
    """Return the nodes with the shape computation marked; nodes without a name get one."""
    types = infer_proto(proto)
    versions = {entry.domain: entry.version for entry in proto.opset_import}
    names = UniqueNames(node.name for node in nodes_of(proto, functions=False))
    nodes: list[ExportedNode] = []
    small, fed = set(), set()
    for graph in graphs_of(proto, functions=False):
        small |= {tensor.name for tensor in graph.initializer if may_hold_sizes(tensor_type(tensor))}
        fed |= {value.name for value in graph.input if is_shape_type(types.get(value.name))}
        for node in graph.node:
            if not node.name:
                node.name = names.unique(node.op_type)
            reads, writes = tuple(node.input), tuple(filter(None, node.output))
            kinds = (tuple(map(types.get, reads)), tuple(map(types.get, writes)))
            version, body = versions.get(node.domain, 1), graph is not proto.graph
            made = (node.name, node.domain, node.op_type, version, len(nodes), *kinds, reads, writes)
            nodes.append(ExportedNode.of(*made, body=body))
    return tuple(shape_only_nodes(nodes, small, fed))


@dataclass(frozen=True)
class _OrtModel(ExportedModel):
    """A model whose bytes are those of a file; ONNX Runtime detects the format by its magic bytes."""

    path: Path = Path()

    def model_bytes(self, weights: Mapping[str, Any]) -> bytes:
        try:
            return read_regular(self.path)
        except OSError as err:
            raise ConversionError(f"{self.path} cannot be read: {err}") from err
