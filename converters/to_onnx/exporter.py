"""Graph -> ONNX model in normal form. ARCHITECTURE.md, "Normal form", says what every exported model is like."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.collector import paused_collector
from rlx_ort.converters.to_onnx.dispatch import Dispatcher, KernelSet, has_choice
from rlx_ort.converters.to_onnx.emitter import Emitter, live_nodes
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.converters.to_onnx.infer import inferred_types
from rlx_ort.converters.to_onnx.model import ModelGraph, ModelValue, WholeModel, model_proto
from rlx_ort.converters.to_onnx.opset import choose_imports, ir_version
from rlx_ort.converters.to_onnx.shape_only import shape_only_nodes
from rlx_ort.converters.to_onnx.writer import ModelWriter, UniqueNames
from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.types import UnknownType, ValueType

if TYPE_CHECKING:
    from rlx_ort.execution.options import CompileOptions
    from rlx_ort.ir.core import Node, Ref
    from rlx_ort.ir.graph import Graph

__all__ = ["export_model", "exported"]


@paused_collector()
def export_model(
    graph: Graph, options: CompileOptions | None = None, kernels: KernelSet | None = None
) -> ExportedModel:
    """Return the graph as an ONNX model in normal form; the data of its weights stays outside.

    Named dims that `options.dims` knows are bound first, then the precision policy is applied. Ops that have a fused
    and a basic form get the one that `options.kernel_dispatch` and `kernels`, those of the provider the model is for,
    decide on; without kernels that is the basic one, which every provider takes. Nodes that no output needs are left
    out. An output that is an input, a parameter or another output gets its own value through an Identity, under a name
    that is free.

    Raises:
        GraphVerifyError: the graph breaks a rule of the IR.
        ConversionError: a node has no ONNX form, or lacks the one that is forced, or no opset takes all nodes.
    """
    from rlx_ort.converters.precision import apply_precision
    from rlx_ort.execution.options import CompileOptions

    options = options or CompileOptions()
    if options.dims:
        graph = graph.bind(options.dims)
    _check(graph)
    user = graph
    graph, origins, stored_as, _ = apply_precision(graph, options.effective_precision)
    live = live_nodes(graph)
    inputs = [node for node in graph.nodes if isinstance(node.op, Input)]
    leaves = [node for node in graph.nodes if isinstance(node.op, Input) or _is_live_param(node, live)]
    dispatcher = Dispatcher(options.kernel_dispatch, kernels)
    reserved = UniqueNames(name for node in leaves for name in node.output_names)
    writer = ModelWriter(reserved, dispatcher=dispatcher, origins=origins)
    wanted = {name: writer.value_names.unique(name) for name in graph.output_names}
    names: dict[Ref, str] = {}
    for name, value in zip(graph.output_names, graph.outputs, strict=True):
        names.setdefault(value.ref, wanted[name])

    emitter = Emitter(writer)
    values = [_input_value(writer, node) for node in inputs]
    results = emitter.lower(graph, values, names=names)
    outputs = []
    for name, result, source in zip(graph.output_names, results, graph.outputs, strict=True):
        writer.origin = origins.get(source.ref.node, source.ref.node)
        writer.origin_label = str(source.node)
        outputs.append(emitter.output(result, wanted[name], reserved=True))
    dispatcher.check(user)

    imports = choose_imports(writer, options.opset)
    main = ModelGraph(values, outputs, emitter.nodes, graph.name or "graph", writer.tensors, graph.doc)
    model = WholeModel(main, writer.types, imports, ir_version(writer.types.values()), graph.metadata)
    return replace(_described(user, writer, model), forms=dispatcher.decided, stored_as=stored_as)


def exported(graph: Graph, options: CompileOptions | None = None, kernels: KernelSet | None = None) -> ExportedModel:
    """Return `export_model(graph, options, kernels)`, remembered for as long as the graph lives and does not change.

    Raises:
        GraphVerifyError: the graph breaks a rule of the IR.
        ConversionError: a node has no ONNX form, or lacks the one that is forced, or no opset takes all nodes.
    """
    from rlx_ort.execution.options import CompileOptions

    options = options or CompileOptions()
    dims = tuple(sorted(options.dims.items()))
    # Without a choice the model is the same for every provider, and so it is made once.
    choice = (options.kernel_dispatch, kernels) if has_choice(graph) else None
    key = (graph.revision, dims, options.effective_precision, options.opset, choice)
    with _lock:
        known = _cache.setdefault(graph, {})
        if key not in known:
            for stale in [old for old in known if old[0] != graph.revision]:
                del known[stale]
            known[key] = export_model(graph, options, kernels)
        return known[key]


_cache: weakref.WeakKeyDictionary[Graph, dict[Any, ExportedModel]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def _check(graph: Graph) -> None:
    from rlx_ort.ir.verify import verify

    problems = verify(graph)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise GraphVerifyError(f"graph {graph.name!r} cannot be exported:\n{listed}")


def _is_live_param(node: Node, live: set[int]) -> bool:
    return isinstance(node.op, Param) and node.id in live


def _input_value(writer: ModelWriter, node: Node) -> ModelValue:
    value = ModelValue(name=node.output_names[0])
    writer.set_type(value, node.types[0])
    return value


def _described(graph: Graph, writer: ModelWriter, model: WholeModel) -> ExportedModel:
    proto = model_proto(model)
    types: dict[str, ValueType] = {str(value.name): kind for value, kind in writer.types.items()}
    seen = {str(value.name) for record in writer.records for value in record.node.outputs if value.name}
    seen |= {str(value.name) for value in model.graph.outputs}
    if any(isinstance(types.get(name, UnknownType()), UnknownType) for name in seen):
        types = inferred_types(proto, types) | {k: v for k, v in types.items() if not isinstance(v, UnknownType)}
    imports = model.opset_imports
    nodes = tuple(
        ExportedNode(
            name=str(record.node.name),
            domain=record.node.domain,
            op_type=record.node.op_type,
            version=imports[record.node.domain],
            origin=record.origin,
            inputs=_types_of(record.node.inputs, types),
            outputs=_types_of(record.node.outputs, types),
            input_names=tuple("" if value is None else str(value.name) for value in record.node.inputs),
            output_names=tuple(str(value.name) for value in record.node.outputs),
            body=record.body,
        )
        for record in writer.records
    )
    return ExportedModel(
        model=proto,
        params=tuple(writer.params),
        nodes=shape_only_nodes(nodes, _small_integers(writer)),
        origin_names={node.id: node.name for node in graph.nodes},
        input_types=_interface(model.graph.inputs, types),
        output_types=_interface(model.graph.outputs, types),
        constants=dict(writer.constants),
    )


def _small_integers(writer: ModelWriter) -> set[str]:
    from rlx_ort.converters.to_onnx.shape_only import is_shape_type

    return {name for name, value in writer.initializers.items() if is_shape_type(writer.types[value])}


def _types_of(values: Any, types: Mapping[str, ValueType]) -> tuple[ValueType | None, ...]:
    return tuple(
        types.get(str(value.name), UnknownType()) if value is not None and value.name else None for value in values
    )


def _interface(values: Any, types: Mapping[str, ValueType]) -> dict[str, ValueType]:
    return {str(value.name): types.get(str(value.name), UnknownType()) for value in values}
