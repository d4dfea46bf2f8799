"""Graph -> ONNX model in normal form, which ARCHITECTURE.md describes under "Normal form".

`draft` checks and lowers the graph, which is all that choosing a device needs. `Draft.finished` makes the model when a
session is opened, so a graph is lowered once for both.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx_ort.converters.fusion import fuse
from rlx_ort.converters.precision_pass import apply_precision
from rlx_ort.converters.protos import infer_proto, paused_collector
from rlx_ort.converters.to_onnx.dispatch import Dispatcher, KernelSet, has_choice
from rlx_ort.converters.to_onnx.emitter import Emitter
from rlx_ort.converters.to_onnx.exported import ExportedModel, Outline
from rlx_ort.converters.to_onnx.model import ModelGraph, ModelValue, ModelWriter, UniqueNames, model_proto
from rlx_ort.converters.to_onnx.opset import choose_imports, ir_version
from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, live_nodes, name_open_dims, require_graph
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.types import UnknownType
from rlx_ort.ir.verify import verify
from rlx_ort.options.compile_options import CompileOptions


@dataclass(eq=False)
class Draft:
    """The nodes of a model with the opsets they are for; `finished` makes the protobuf, once.

    Drafts are compared by identity. May be used from several threads.
    """

    _writer: ModelWriter
    _main: ModelGraph
    _imports: Mapping[str, int]
    _metadata: Mapping[str, str]
    _origin_names: Mapping[int, str]
    _forms: Mapping[int, frozenset[str]]
    _stored_as: Mapping[str, DType]
    _outline: Outline | None = None
    _finished: ExportedModel | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def outline(self) -> Outline:
        """The outline of the model, for choosing a device. Makes the model if ONNX has to infer some type."""
        with self._lock:
            if self._outline is None and self._all_known():
                self._outline = Outline.of_writer(self._writer, self._main, self._imports)
            elif self._outline is None:
                self.finished()
            assert self._outline is not None  # noqa: S101  # made with the model
            return self._outline

    def finished(self) -> ExportedModel:
        """Return the model; the data of external weights stays outside."""
        with self._lock, paused_collector():
            if self._finished is None:
                self._finished = self._made_model()
                del self._writer, self._main  # all of it is in the model and the outline
            return self._finished

    def _made_model(self) -> ExportedModel:
        writer, main = self._writer, self._main
        proto = model_proto(main, writer.types, self._imports, ir_version(writer.types.values()), self._metadata)
        if not self._all_known():
            own = {str(value.name): kind for value, kind in writer.types.items()}
            known = {name: kind for name, kind in own.items() if not isinstance(kind, UnknownType)}
            inferred = {**own, **infer_proto(proto), **known}
            self._outline = Outline.of_writer(writer, main, self._imports, inferred)
        outline = self.outline
        return ExportedModel(
            model=proto,
            params=tuple(writer.params),
            nodes=tuple(outline.nodes),
            origin_names=self._origin_names,
            input_types=outline.input_types,
            output_types=outline.output_types,
            constants=dict(writer.constants),
            forms=self._forms,
            stored_as=self._stored_as,
        )

    def _all_known(self) -> bool:
        """Return whether the type of every value that a node writes or the model gives is known."""
        types, unknown = self._writer.types, UnknownType()
        first = [record.pattern for record in self._writer.records if not record.name]
        values = [value for node in first for value in node.writes if value.name]
        return not any(isinstance(types.get(value, unknown), UnknownType) for value in [*values, *self._main.outputs])


def export_model(
    graph: Graph, options: CompileOptions | None = None, kernels: KernelSet | None = None
) -> ExportedModel:
    """Return the graph as an ONNX model in normal form; the data of its weights stays outside.

    Dims of inputs without a name get one, named dims that `options.dims` knows are bound, then the precision policy is
    applied. Ops with a fused and a
    basic form get the one that `options.kernel_dispatch` and `kernels`, those of the provider the model is for, decide
    on; without kernels that is the basic one, which every provider takes. Nodes that no output needs are left out. An
    output that is an input, a parameter or another output gets its own value, with a free name, through an Identity,
    unless it is an input or a parameter and has the name of that.

    Raises:
        GraphVerifyError: the graph breaks a rule of the IR, or has no dim that `options.dims` names.
        ConversionError: a node has no ONNX form, or lacks the one that is forced, or no opset takes all nodes.
    """
    return draft(graph, options, kernels).finished()


@paused_collector()
def draft(graph: Graph, options: CompileOptions | None = None, kernels: KernelSet | None = None) -> Draft:
    """Return the graph checked and lowered, as far as choosing a device needs it; raises as `export_model` does."""
    require_graph(graph)
    options, sizes, graph = options or CompileOptions(), graph.size_inputs, name_open_dims(graph)
    if options.dims:
        graph = graph.bind(options.dims)
    if problems := verify(graph):
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise GraphVerifyError(f"graph {graph.name!r} cannot be exported:\n{listed}")
    user = graph
    graph, origins, stored_as, _ = apply_precision(graph, options.effective_precision)
    if options.fusion:
        graph, sources = fuse(graph, kernels, user.weights)
        origins = {new: origins.get(old, old) for new, old in sources.items()} or origins
    live = live_nodes(graph)
    inputs = [node for node in graph.nodes if isinstance(node.op, Input)]
    params = [node for node in graph.nodes if isinstance(node.op, Param) and node.id in live]
    dispatcher = Dispatcher(options.kernel_dispatch, kernels)
    reserved = UniqueNames(name for node in (*inputs, *params) for name in node.output_names)
    writer = ModelWriter(reserved, dispatcher=dispatcher, origins=origins, sizes=sizes)
    leaves = {node.output_names[0]: node.id for node in (*inputs, *params)}
    # Those that have to get a number come last, so that it is one that no other output has.
    named = sorted(zip(graph.output_names, graph.outputs, strict=True), key=lambda pair: pair[0] in leaves)
    wanted = {
        name: name if leaves.get(name) == value.ref.node else writer.value_names.unique(name) for name, value in named
    }
    names: dict[int, dict[int, str]] = {}
    for name, value in zip(graph.output_names, graph.outputs, strict=True):
        names.setdefault(value.ref.node, {}).setdefault(value.ref.output, wanted[name])

    emitter = Emitter(writer)
    values = [ModelValue(node.output_names[0]) for node in inputs]
    writer.types.update(zip(values, (node.types[0] for node in inputs), strict=True))
    results = emitter.lower(graph, values, names=names, live=live)
    outputs = []
    for name, result, source in zip(graph.output_names, results, graph.outputs, strict=True):
        writer.origin = origins.get(source.ref.node, source.ref.node)
        writer.source = source.node
        outputs.append(emitter.output(result, wanted[name], reserved=True))
    dispatcher.check(user)

    imports = choose_imports(writer, options.opset)
    main = ModelGraph(values, outputs, emitter.nodes, graph.name or "graph", writer.tensors, graph.doc)
    names_by_id = {node.id: node.name for node in user.nodes}
    forms = {origin: frozenset(chosen) for origin, chosen in dispatcher.forms.items()}
    return Draft(writer, main, imports, dict(graph.metadata), names_by_id, forms, stored_as)


def exported(graph: Graph, options: CompileOptions | None = None, kernels: KernelSet | None = None) -> ExportedModel:
    """Return `export_model(graph, options, kernels)`, cached while the graph lives and does not change."""
    return drafted(graph, options, kernels).finished()


def drafted(graph: Graph, options: CompileOptions | None = None, kernels: KernelSet | None = None) -> Draft:
    """Return `draft(graph, options, kernels)`, cached while the graph lives and does not change."""
    options = options or CompileOptions()
    dims = tuple(sorted(options.dims.items()))
    # Without a choice the model is the same for every provider, and so it is made once.
    choice = (options.kernel_dispatch, kernels, options.fusion) if options.fusion or has_choice(graph) else None
    key = (graph.revision, dims, options.effective_precision, options.opset, choice)
    with _lock:
        known = _cache.setdefault(graph, {})
        if key not in known:
            for stale in [old for old in known if old[0] != graph.revision]:
                del known[stale]
            begun = time.perf_counter()
            known[key] = draft(graph, options, kernels)
            took_s = time.perf_counter() - begun
            _log.debug("graph %r: exported %d nodes in %.3g s", graph.name, len(graph.nodes), took_s)
        return known[key]


_cache: weakref.WeakKeyDictionary[Graph, dict[Any, Draft]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_log = logging.getLogger(__name__)
