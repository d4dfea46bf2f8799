"""Moves a model to another ai.onnx opset and IR version, node by node; weights are not looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.converters.bundle import ModelBundle, graphs_of
from rlx_ort.converters.onnx_types import dtype_of
from rlx_ort.converters.protos import bodies_of, copied, read_names, set_items
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.converters.to_onnx.opset import ir_version as lowest_ir_version
from rlx_ort.converters.transforms.adapters import NodeAdapter, converter_errors
from rlx_ort.converters.transforms.scope import (
    Scope,
    all_value_names,
    label_of,
    model_scope,
    typed_model,
)
from rlx_ort.errors import ConversionError
from rlx_ort.ir.types import TensorType

if TYPE_CHECKING:
    import onnx

__all__ = ["OpsetReport", "to_opset"]

_LISTED = 10  # nodes named in one message
_FUNCTIONS_SINCE, _FREE_INITIALIZERS_SINCE = 8, 4  # IR versions: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto


@dataclass(frozen=True, slots=True)
class OpsetReport:
    """What `to_opset` did.

    Attributes:
        source: the ai.onnx opset before.
        target: the ai.onnx opset after.
        ir_version: the IR version after.
        rewritten: labels of the nodes that were rewritten; all others mean the same in both opsets.
        functions_inlined: whether calls of model-local functions were replaced by their nodes, as one had to change.
    """

    source: int
    target: int
    ir_version: int
    rewritten: tuple[str, ...] = ()
    functions_inlined: bool = False


def to_opset(bundle: ModelBundle, opset: int, ir_version: int | None = None) -> tuple[ModelBundle, OpsetReport]:
    """Return the model for another ai.onnx opset, up or down; names, metadata and other domains stay.

    A node that means the same in both opsets is not changed. Any other goes through ONNX's version converter alone,
    or is replaced by the nodes ONNX defines it by. Calls of functions are inlined when a node of one has to change.
    Runs shape inference on the model without its weights.

    Args:
        bundle: the model.
        opset: the ai.onnx opset to go to, 1 to the newest that the installed `onnx` knows.
        ir_version: the IR version to declare; None takes the lowest that has the opset and all that the model uses.

    Raises:
        ConversionError: there is no such opset or IR version, or it cannot express some nodes; all of them are named.
    """
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise ConversionError(f"opset {opset} was asked for; onnx {onnx.__version__} knows 1 to {newest}")
    source = bundle.opset
    proto, rewritten, inlined = copied(bundle.proto), [], False
    if source and source != opset:
        if proto.functions and _functions_must_change(bundle, source, opset):
            proto, inlined = _inlined(proto, bundle.origin), True
        rewritten = _move(bundle.with_proto(proto), proto, source, opset)
        for function in proto.functions:
            _import(function.opset_import, opset)
    _import(proto.opset_import, opset)
    proto.ir_version = _ir_version(proto, opset, ir_version)
    report = OpsetReport(source, opset, proto.ir_version, tuple(rewritten), inlined)
    return bundle.with_proto(proto), report


def _move(bundle: ModelBundle, proto: onnx.ModelProto, source: int, target: int) -> list[str]:
    """Rewrite the nodes of the main graph and of all bodies in place; return the labels of those that changed."""
    typed = typed_model(bundle)
    node_names = UniqueNames(node.name for graph in graphs_of(proto) for node in graph.node if node.name)
    mover = _Mover(bundle, NodeAdapter(source, target, UniqueNames(all_value_names(proto)), node_names))
    mover.graph(proto.graph, typed.graph, model_scope(bundle, typed))
    if mover.refused:
        listed = mover.refused[:_LISTED]
        more = len(mover.refused) - len(listed)
        lines = "\n  ".join(listed) + (f"\n  and {more} more" if more else "")
        raise ConversionError(f"{bundle.origin} cannot go from opset {source} to {target}:\n  {lines}")
    return mover.rewritten


class _Mover:
    """Walks the graphs of one model."""

    def __init__(self, bundle: ModelBundle, adapter: NodeAdapter) -> None:
        self.rewritten: list[str] = []
        self.refused: list[str] = []
        self._bundle = bundle
        self._adapter = adapter

    def graph(self, graph: onnx.GraphProto, typed: onnx.GraphProto, scope: Scope) -> None:
        """Rewrite one graph; `typed` is the same graph with inferred types."""
        nodes: list[onnx.NodeProto] = []
        changed = False
        for node, twin in zip(graph.node, typed.node, strict=True):
            if node.domain not in ("", "ai.onnx"):
                self._bodies(node, twin, scope)
                nodes.append(node)
                continue
            try:
                adapted = self._adapter.adapt(node, scope)
            except ConversionError as err:
                self.refused.append(f"{label_of(node)}: {err}")
                continue
            for kept in adapted.nodes[:1]:  # a node with bodies is never more than restamped
                self._bodies(kept, twin, scope)
            if len(adapted.nodes) != 1 or adapted.nodes[0] is not node:
                changed = True
                self.rewritten.append(label_of(node))
            nodes += adapted.nodes
            graph.initializer.extend(adapted.initializers)
        if changed:
            before = read_names(graph)
            set_items(graph.node, nodes)
            _drop_orphans(graph, before - read_names(graph))

    def _bodies(self, node: onnx.NodeProto, twin: onnx.NodeProto, scope: Scope) -> None:
        for body, typed_body in zip(bodies_of(node), bodies_of(twin), strict=True):
            inner = scope.inner(typed_body, self._bundle)
            inner.read(body, self._bundle)
            self.graph(body, typed_body, inner)


def _drop_orphans(graph: onnx.GraphProto, names: set[str]) -> None:
    """Remove initializers and Constant nodes that only rewritten nodes used to read."""
    names -= {value.name for value in graph.input}
    kept = [tensor for tensor in graph.initializer if tensor.name not in names]
    if len(kept) != len(graph.initializer):
        set_items(graph.initializer, kept)
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.op_type == "Constant" and not node.domain and names.issuperset(node.output):
            del graph.node[index]


def _functions_must_change(bundle: ModelBundle, source: int, target: int) -> bool:
    """Return whether a node of a function does not mean the same in both opsets, or the function has its own opset."""
    adapter = NodeAdapter(source, target, UniqueNames(), UniqueNames())
    for function in bundle.proto.functions:
        own = {entry.version for entry in function.opset_import if entry.domain in ("", "ai.onnx")}
        if own and own != {source}:
            return True
        for node in function.node:
            if any(True for _ in bodies_of(node)):
                return True
            try:
                adapted = node if node.domain else adapter.adapt(node, Scope()).nodes[0]
            except ConversionError:
                return True
            if adapted is not node:
                return True
    return False


def _inlined(proto: onnx.ModelProto, origin: str) -> onnx.ModelProto:
    import onnx.inliner

    try:
        return onnx.inliner.inline_local_functions(proto, convert_version=True)
    except converter_errors() as err:
        raise ConversionError(f"{origin}: the functions of the model cannot be inlined: {err}") from err


def _import(imports: object, opset: int) -> None:
    """Declare the ai.onnx opset, once."""
    others = [(e.domain, e.version) for e in imports if e.domain not in ("", "ai.onnx")]  # type: ignore[attr-defined]  # protobuf's containers have no common type
    del imports[:]  # type: ignore[attr-defined]
    for domain, version in [("", opset), *others]:
        imports.add(domain=domain, version=version)  # type: ignore[attr-defined]


def _ir_version(proto: onnx.ModelProto, opset: int, wanted: int | None) -> int:
    """Return the IR version to declare; weights become inputs too where it is too old to have them apart."""
    import onnx

    lowest = min((row[1] for row in onnx.helper.VERSION_TABLE if row[2] >= opset), default=onnx.IR_VERSION)
    if proto.functions:
        lowest = max(lowest, _FUNCTIONS_SINCE)
    kinds = [TensorType(dtype_of(tensor.data_type), None) for tensor in proto.graph.initializer]
    by_types = lowest_ir_version(kinds)
    if by_types > lowest_ir_version([]):  # an element type newer than the usual ones
        lowest = max(lowest, by_types)
    if wanted is not None and not lowest <= wanted <= onnx.IR_VERSION:
        raise ConversionError(
            f"IR version {wanted} was asked for; opset {opset} and this model take {lowest} to {onnx.IR_VERSION}"
        )
    chosen = max(lowest, _FREE_INITIALIZERS_SINCE) if wanted is None else wanted
    if chosen < _FREE_INITIALIZERS_SINCE:
        inputs = {value.name for value in proto.graph.input}
        for tensor in proto.graph.initializer:
            if tensor.name not in inputs:
                kind = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                proto.graph.input.append(kind)
    return chosen
