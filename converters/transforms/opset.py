"""Moves a model to another ai.onnx opset and IR version, node by node; weights are not looked at.

ONNX's version converter is shown one node at a time. It cannot take whole models as they come: it reads every weight,
looks into no body and drops functions, names and metadata. Node by node all of that stays as it is, and a message can
name the node that fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx.inliner
import onnx.version_converter

from rlx_ort.converters.bundle import FREE_INITIALIZERS, ModelBundle, bundle_of
from rlx_ort.converters.onnx_types import schema_of, tensor_type, type_proto
from rlx_ort.converters.protos import bodies_of, copied, nodes_of, set_items, trimmed
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.converters.to_onnx.opset import NodeForm, meaning_change, obsolete_attributes, obstacle
from rlx_ort.converters.to_onnx.opset import ir_version as lowest_ir_version
from rlx_ort.converters.transforms.scope import Scope, all_value_names, label_of, read_names, typed_model
from rlx_ort.errors import ConversionError
from rlx_ort.ir.types import UnknownType

_LISTED = 10  # nodes named in one message
_FUNCTIONS_SINCE = 8  # IR version: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
# The converter compares the axis with the rank, and leaves these unchanged where flattening makes no difference.
_DECIDED_BY_RANK = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
_IR_VERSION = 10
# The errors of ONNX's C++ converter and inliner for failed assertions and missing adapters.
_CONVERTER_ERRORS: tuple[type[Exception], ...] = (
    onnx.version_converter.ConvertError, RuntimeError, ValueError, TypeError, IndexError, KeyError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpsetReport:
    """The result of `to_opset`: the ai.onnx opset before and after, the IR version after, and the nodes that changed.

    Attributes:
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
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise ConversionError(f"opset {opset} was asked for; onnx {onnx.__version__} knows 1 to {newest}")
    source = bundle.opset
    proto, rewritten, inlined = copied(bundle.proto), [], False
    if source and source != opset:
        if proto.functions and _functions_must_change(bundle, source, opset):
            try:
                proto, inlined = onnx.inliner.inline_local_functions(proto, convert_version=True), True
            except _CONVERTER_ERRORS as err:
                raise ConversionError(f"{bundle.origin}: the functions of the model cannot be inlined: {err}") from err
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
    adapter = _Adapter(
        source, target, UniqueNames(all_value_names(proto)), UniqueNames(n.name for n in nodes_of(proto))
    )
    rewritten: list[str] = []
    refused: list[str] = []

    def move(graph: onnx.GraphProto, twin: onnx.GraphProto, scope: Scope) -> None:
        """Rewrite one graph; `twin` is the same graph with inferred types."""
        nodes: list[onnx.NodeProto] = []
        count = len(rewritten)
        for node, typed_node in zip(graph.node, twin.node, strict=True):
            adapted = _Adapted([node], [])
            try:
                if node.domain in ("", "ai.onnx"):
                    adapted = adapter.adapt(node, scope)
            except ConversionError as err:
                refused.append(f"{label_of(node)}: {err}")
            if len(adapted.nodes) != 1 or adapted.nodes[0] is not node:
                rewritten.append(label_of(node))
            for body, typed_body in zip(bodies_of(adapted.nodes[0]), bodies_of(typed_node), strict=False):
                move(body, typed_body, scope.inner(bundle, typed_body, body))
            nodes += adapted.nodes
            graph.initializer.extend(adapted.initializers)
        if len(rewritten) > count:
            before = read_names(graph)
            set_items(graph.node, nodes)
            _drop_orphans(graph, before - read_names(graph))

    move(proto.graph, typed.graph, Scope().inner(bundle, typed.graph, bundle.proto.graph))
    if refused:
        more = f"\n  and {len(refused) - _LISTED} more" if len(refused) > _LISTED else ""
        lines = "\n  ".join(refused[:_LISTED]) + more
        raise ConversionError(f"{bundle.origin} cannot go from opset {source} to {target}:\n  {lines}")
    return rewritten


def _drop_orphans(graph: onnx.GraphProto, names: set[str]) -> None:
    """Remove initializers and Constant nodes that only rewritten nodes used to read."""
    names -= {value.name for value in graph.input}
    orphans = [n for n in graph.node if n.op_type == "Constant" and not n.domain and names.issuperset(n.output)]
    for node in orphans:
        graph.node.remove(node)
    if any(tensor.name in names for tensor in graph.initializer):
        set_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in names])


def _functions_must_change(bundle: ModelBundle, source: int, target: int) -> bool:
    """Return whether a node of a function does not mean the same in both opsets, or the function has its own opset."""
    adapter = _Adapter(source, target, UniqueNames(), UniqueNames())
    for function in bundle.proto.functions:
        own = {entry.version for entry in function.opset_import if entry.domain in ("", "ai.onnx")}
        if own and own != {source}:
            return True
        for node in function.node:
            try:
                if [*bodies_of(node)] or (not node.domain and adapter.adapt(node, Scope()).nodes[0] is not node):
                    return True
            except ConversionError:
                return True
    return False


def _import(imports: Any, opset: int) -> None:
    """Declare the ai.onnx opset, once."""
    others = [entry for entry in imports if entry.domain not in ("", "ai.onnx")]
    set_items(imports, [onnx.helper.make_opsetid("", opset), *others])


def _ir_version(proto: onnx.ModelProto, opset: int, wanted: int | None) -> int:
    """Return the IR version to declare; weights become inputs too where it is too old to have them apart."""
    lowest = min((row[1] for row in onnx.helper.VERSION_TABLE if row[2] >= opset), default=onnx.IR_VERSION)
    if proto.functions:
        lowest = max(lowest, _FUNCTIONS_SINCE)
    by_types = lowest_ir_version(map(tensor_type, proto.graph.initializer))
    if by_types > lowest_ir_version([]):  # an element type newer than the usual ones
        lowest = max(lowest, by_types)
    if wanted is not None and not lowest <= wanted <= onnx.IR_VERSION:
        raise ConversionError(
            f"IR version {wanted} was asked for; opset {opset} and this model take {lowest} to {onnx.IR_VERSION}"
        )
    chosen = max(lowest, FREE_INITIALIZERS) if wanted is None else wanted
    if chosen < FREE_INITIALIZERS:
        inputs = {value.name for value in proto.graph.input}
        for tensor in proto.graph.initializer:
            if tensor.name not in inputs:
                kind = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                proto.graph.input.append(kind)
    return chosen


@dataclass(frozen=True, slots=True)
class _Adapted:
    """The replacement of a node: nodes that read and write the same values, and the constants they need."""

    nodes: list[onnx.NodeProto]
    initializers: list[onnx.TensorProto]


class _Adapter:
    """Moves nodes from one ai.onnx opset to another; new values get names that are free in the model."""

    def __init__(self, source: int, target: int, value_names: UniqueNames, node_names: UniqueNames) -> None:
        self._source = source
        self._target = target
        self._values = value_names
        self._nodes = node_names
        self._done: dict[bytes, onnx.GraphProto | str] = {}

    def adapt(self, node: onnx.NodeProto, scope: Scope) -> _Adapted:
        """Return the replacement of a node, itself where its meaning is the same in both opsets."""
        form = _form(node, scope)
        reason = obstacle(form, self._source, self._target)
        if not reason:
            return _Adapted([self._restamped(node)], [])
        if any(attribute.ref_attr_name for attribute in node.attribute) or [*bodies_of(node)]:
            raise ConversionError(reason)  # the converter leaves bodies as they are, and knows no references
        try:
            return self._converted(node, form, scope, reason)
        except ConversionError:
            expanded = self._expanded(node, scope)
            if expanded is None:
                raise
        whole = _Adapted([], [])
        for inner, inner_scope in expanded:
            part = self.adapt(inner, inner_scope)
            whole.nodes.extend(part.nodes)
            whole.initializers.extend(part.initializers)
        return whole

    def _restamped(self, node: onnx.NodeProto) -> onnx.NodeProto:
        names = [attribute.name for attribute in node.attribute]
        obsolete = set(obsolete_attributes(node.op_type, names, self._source, self._target))
        if not obsolete:
            return node
        kept = copied(node)
        set_items(kept.attribute, [attribute for attribute in node.attribute if attribute.name not in obsolete])
        return kept

    def _converted(self, node: onnx.NodeProto, form: NodeForm, scope: Scope, reason: str) -> _Adapted:
        """Let ONNX's version converter rewrite the node; it is asked once for nodes that differ in names only."""
        plain: dict[str, str] = {}
        for letter, names in (("i", node.input), ("o", node.output)):
            for index, name in enumerate(names):
                plain.setdefault(name, f"{letter}{index}" if name else "")
        model = _single_node_model(node, scope, self._source, plain)
        key = model.SerializeToString(deterministic=True)
        if key not in self._done:
            self._done[key] = _convert_version(model, self._target)
        done = self._done[key]
        if isinstance(done, str):
            raise ConversionError(reason + done)
        made = copied(done)
        changed = meaning_change(form, self._source, self._target)
        if (
            changed
            and node.op_type not in _DECIDED_BY_RANK
            and len(made.node) == 1
            and _same(made.node[0], model.graph.node[0])
        ):
            raise ConversionError(changed)  # the converter has no rule for it, and does not say so
        given = {tensor.name for tensor in model.graph.initializer}
        first = next(filter(None, node.output))
        fresh = {"": "", **{short: name for name, short in plain.items()}}
        initializers = []
        for tensor in made.initializer:
            if tensor.name not in given:
                fresh[tensor.name] = self._values.unique(f"{first}/{tensor.name}")
                tensor.name = fresh[tensor.name]
                initializers.append(tensor)
        self._rename(made, node, fresh)
        for inner in made.node:
            inner.doc_string = node.doc_string
            inner.metadata_props.extend(node.metadata_props)
        return _Adapted([*made.node], initializers)

    def _rename(self, graph: onnx.GraphProto, origin: onnx.NodeProto, fresh: dict[str, str]) -> None:
        """Give the nodes that replace a node, and their values, names that are free; `fresh` has those to keep."""
        first = next(filter(None, origin.output))
        for node in graph.node:
            for name in node.output:
                if name not in fresh:
                    fresh[name] = self._values.unique(f"{first}/{name}")
        for node in graph.node:
            node.input[:] = trimmed([fresh.get(name, name) for name in node.input])
            node.output[:] = trimmed([fresh[name] for name in node.output])
            if node.op_type == origin.op_type:
                node.name = origin.name
            elif origin.name:
                node.name = self._nodes.unique(f"{origin.name}/{node.op_type}")

    def _expanded(self, node: onnx.NodeProto, scope: Scope) -> list[tuple[onnx.NodeProto, Scope]] | None:
        """Return the nodes that ONNX defines the operator by, or None where it has no such definition."""
        schema = schema_of(node.op_type, self._source)
        # The stubs of onnx do not list these two.
        if schema is None or not any(getattr(schema, f"has_{kind}function") for kind in ("", "context_dependent_")):
            return None
        names = {name: name for name in ("", *node.input, *node.output)}
        model = _single_node_model(_with_defaults(node, schema), scope, self._source, names)
        try:
            done = onnx.inliner.inline_selected_functions(
                model, [("", node.op_type)], exclude=False, inline_schema_functions=True
            )
        except _CONVERTER_ERRORS:
            return None
        if any(inner.op_type == node.op_type or _invalid(inner, self._source) for inner in done.graph.node):
            return None
        self._rename(done.graph, node, names)
        bundle = bundle_of(done, origin=label_of(node))
        inner_scope = scope.inner(bundle, typed_model(bundle).graph, bundle.proto.graph)
        return [(copied(inner), inner_scope) for inner in done.graph.node]


def _form(node: onnx.NodeProto, scope: Scope) -> NodeForm:
    """Return the facts of a node that the opset rules need."""

    def kinds(names: Sequence[str]) -> list[Any]:
        return [scope.types.get(name, UnknownType()) if name else None for name in trimmed(names)]

    attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
    return NodeForm(node.op_type, attributes, kinds(node.input), kinds(node.output))


def _value(attribute: onnx.AttributeProto) -> Any:
    if attribute.ref_attr_name:
        return object()  # equal to no default and to no listed value
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, int | float) or not hasattr(value, "__iter__") else tuple(value)


def _same(made: onnx.NodeProto, node: onnx.NodeProto) -> bool:
    def key(item: onnx.NodeProto) -> Any:
        attributes = {attribute.name: attribute.SerializeToString(deterministic=True) for attribute in item.attribute}
        return item.op_type, trimmed(item.input), attributes

    return bool(key(made) == key(node))


def _convert_version(model: onnx.ModelProto, target: int) -> onnx.GraphProto | str:
    """Return the graph that ONNX's version converter makes of a model of one node, or why it cannot be used."""
    try:
        made = onnx.version_converter.convert_version(model, target).graph
    except _CONVERTER_ERRORS as err:
        lines = str(err).strip().splitlines()
        text = lines[-1].rpartition("failed: ")[2] if lines else type(err).__name__  # without the source location
        return "" if text.startswith(("No Previous Version", "Operator or type")) else f" ({text})"
    wanted = [value.name for value in model.graph.output]
    if not made.node or [value.name for value in made.output] != wanted:
        return " (ONNX's converter gives no node for it)"
    wrong = next(filter(None, (_invalid(inner, target) for inner in made.node)), "")
    return f" (ONNX's converter leaves {wrong})" if wrong else made


def _single_node_model(node: onnx.NodeProto, scope: Scope, opset: int, names: Mapping[str, str]) -> onnx.ModelProto:
    """Return a model of one node, its values named by `names`: small constants are initializers, the others inputs."""
    reads = list(dict.fromkeys(filter(None, node.input)))
    unknown = [name for name in reads if name not in scope.types and name not in scope.constants]
    if unknown:
        raise ConversionError(f"the type of its input {unknown[0]!r} cannot be inferred")

    def declared(values: Iterable[str]) -> list[onnx.ValueInfoProto]:
        kinds = {name: type_proto(scope.types[name]) if name in scope.types else None for name in values}
        return [onnx.ValueInfoProto(name=names[name], type=kind) for name, kind in kinds.items()]

    constants = []
    for name in (name for name in reads if name in scope.constants):
        constants.append(copied(scope.constants[name]))
        constants[-1].name = names[name]
    plain = [[names.get(name, "") for name in values] for values in (node.input, node.output)]
    lone = onnx.helper.make_node(node.op_type, plain[0], plain[1])
    lone.attribute.extend(node.attribute)
    inputs = declared(name for name in reads if name not in scope.constants)
    graph = onnx.helper.make_graph([lone], "node", inputs, declared(filter(None, node.output)), initializer=constants)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=_IR_VERSION)


def _invalid(node: onnx.NodeProto, opset: int) -> str:
    """Return which attribute of a node its operator lacks or needs in an opset; empty when the node is right.

    The converter leaves attributes alone that an older operator has not, and the inliner loses some references.
    """
    schema = schema_of(node.op_type, opset, node.domain)
    if schema is None:
        return f"{node.op_type}, which is not there" if not node.domain else ""
    given = {attribute.name for attribute in node.attribute}
    lacking = [name for name, attribute in schema.attributes.items() if attribute.required and name not in given]
    if node.op_type == "Constant" and not given:
        lacking = ["value"]
    wrong = sorted(given - schema.attributes.keys()) or lacking
    return f"attribute {wrong[0]} of {node.op_type} wrong" if wrong else ""


def _with_defaults(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> onnx.NodeProto:
    """Return the node with its defaults written out, since the inliner drops references to absent attributes."""
    full = copied(node)
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            full.attribute.add().CopyFrom(attribute.default_value)
            full.attribute[-1].name = name
    return full
