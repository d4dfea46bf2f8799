"""Rewrites one node of ai.onnx for another opset with ONNX's version converter, which is shown that node only.

The converter cannot take whole models as they come: it reads every weight, looks into no body and drops functions,
names and metadata. With one node at a time all of that stays as it is, and a message can name the node that fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.bundle import bundle_of
from rlx_ort.converters.onnx_types import type_proto
from rlx_ort.converters.protos import bodies_of, copied, set_items
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.converters.to_onnx.opset import NodeForm, meaning_change, obsolete_attributes, obstacle
from rlx_ort.converters.transforms.scope import Scope, label_of, model_scope, typed_model
from rlx_ort.errors import ConversionError
from rlx_ort.ir.types import UnknownType

if TYPE_CHECKING:
    import onnx

__all__ = ["Adapted", "NodeAdapter", "converter_errors", "node_form"]

# The converter compares the axis with the rank, and leaves these unchanged where flattening makes no difference.
_DECIDED_BY_RANK = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
_IR_VERSION = 10


@dataclass(frozen=True, slots=True)
class Adapted:
    """The replacement of a node: nodes that read and write the same values, and the constants they need."""

    nodes: list[onnx.NodeProto]
    initializers: list[onnx.TensorProto]


class NodeAdapter:
    """Moves nodes from one ai.onnx opset to another; new values get names that are free in the model."""

    def __init__(self, source: int, target: int, value_names: UniqueNames, node_names: UniqueNames) -> None:
        self._source = source
        self._target = target
        self._values = value_names
        self._nodes = node_names
        self._done: dict[bytes, onnx.GraphProto | str] = {}

    def adapt(self, node: onnx.NodeProto, scope: Scope) -> Adapted:
        """Return the replacement of a node: itself where its meaning is the same in both opsets.

        Raises:
            ConversionError: the target opset cannot express it, or no conversion is known; the message names why.
        """
        form = node_form(node, scope)
        reason = obstacle(form, self._source, self._target)
        if not reason:
            return Adapted([self._restamped(node)], [])
        if any(attribute.ref_attr_name for attribute in node.attribute) or any(True for _ in bodies_of(node)):
            raise ConversionError(reason)  # the converter leaves bodies as they are, and knows no references
        try:
            return self._converted(node, form, scope, reason)
        except ConversionError:
            expanded = self._expanded(node, scope)
            if expanded is None:
                raise
        nodes: list[onnx.NodeProto] = []
        initializers: list[onnx.TensorProto] = []
        for inner, inner_scope in expanded:
            part = self.adapt(inner, inner_scope)
            nodes += part.nodes
            initializers += part.initializers
        return Adapted(nodes, initializers)

    def _restamped(self, node: onnx.NodeProto) -> onnx.NodeProto:
        names = [attribute.name for attribute in node.attribute]
        obsolete = set(obsolete_attributes(node.op_type, names, self._source, self._target))
        if not obsolete:
            return node
        kept = copied(node)
        set_items(kept.attribute, [attribute for attribute in node.attribute if attribute.name not in obsolete])
        return kept

    def _converted(self, node: onnx.NodeProto, form: NodeForm, scope: Scope, reason: str) -> Adapted:
        """Let ONNX's version converter rewrite the node; it is asked once for nodes that differ in names only."""
        lone, plain_scope, real = _with_plain_names(node, scope)
        model = _single_node_model(lone, plain_scope, self._source)
        key = model.SerializeToString(deterministic=True)
        if key not in self._done:
            self._done[key] = _convert_version(model, self._target)
        done = self._done[key]
        if isinstance(done, str):
            raise ConversionError(reason + done)
        made = copied(done)
        changed = meaning_change(form, self._source, self._target)
        if changed and node.op_type not in _DECIDED_BY_RANK and len(made.node) == 1 and _same(made.node[0], lone):
            raise ConversionError(changed)  # the converter has no rule for it, and does not say so
        given = {tensor.name for tensor in model.graph.initializer}
        first = next(filter(None, node.output))
        fresh = {"": "", **real}
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
        return Adapted([*made.node], initializers)

    def _rename(self, graph: onnx.GraphProto, origin: onnx.NodeProto, fresh: dict[str, str]) -> None:
        """Give the nodes that replace a node, and their values, names that are free; `fresh` has those to keep."""
        first = next(filter(None, origin.output))
        for node in graph.node:
            for name in node.output:
                if name not in fresh:
                    fresh[name] = self._values.unique(f"{first}/{name}")
        for node in graph.node:
            inputs, outputs = [fresh.get(name, name) for name in node.input], [fresh[name] for name in node.output]
            del node.input[:], node.output[:]
            node.input.extend(_trimmed(inputs))
            node.output.extend(_trimmed(outputs))
            if node.op_type == origin.op_type:
                node.name = origin.name
            elif origin.name:
                node.name = self._nodes.unique(f"{origin.name}/{node.op_type}")

    def _expanded(self, node: onnx.NodeProto, scope: Scope) -> list[tuple[onnx.NodeProto, Scope]] | None:
        """Return the nodes that ONNX defines the operator by, or None where it has no such definition."""
        import onnx.inliner

        schema = onnx.defs.get_schema(node.op_type, self._source, "") if onnx.defs.has(node.op_type) else None
        # The stubs of onnx do not list these two.
        if schema is None or not any(getattr(schema, f"has_{kind}function") for kind in ("", "context_dependent_")):
            return None
        _check_known(node, scope)
        model = _single_node_model(_with_defaults(node, schema), scope, self._source)
        try:
            done = onnx.inliner.inline_selected_functions(
                model, [("", node.op_type)], exclude=False, inline_schema_functions=True
            )
        except converter_errors():
            return None
        if any(inner.op_type == node.op_type or _invalid(inner, self._source) for inner in done.graph.node):
            return None
        self._rename(done.graph, node, {name: name for name in ("", *node.input, *node.output)})
        bundle = bundle_of(done, origin=label_of(node))
        inner_scope = model_scope(bundle, typed_model(bundle))
        merged = Scope({**scope.types, **inner_scope.types}, {**scope.constants, **inner_scope.constants})
        return [(copied(inner), merged) for inner in done.graph.node]


def node_form(node: onnx.NodeProto, scope: Scope) -> NodeForm:
    """Return what the opset rules need to know of a node."""

    def kinds(names: Iterable[str]) -> list[Any]:
        return [scope.types.get(name, UnknownType()) if name else None for name in _trimmed([*names])]

    attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
    return NodeForm(node.op_type, attributes, kinds(node.input), kinds(node.output))


def _value(attribute: onnx.AttributeProto) -> Any:
    import onnx

    if attribute.ref_attr_name:
        return object()  # equal to no default and to no listed value
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, int | float) or not hasattr(value, "__iter__") else tuple(value)


def _same(made: onnx.NodeProto, node: onnx.NodeProto) -> bool:
    def key(item: onnx.NodeProto) -> Any:
        attributes = {found.name: found.SerializeToString(deterministic=True) for found in item.attribute}
        return item.op_type, _trimmed([*item.input]), attributes

    return bool(key(made) == key(node))


def converter_errors() -> tuple[type[Exception], ...]:
    """Return the errors that ONNX's C++ converter and inliner raise for failed assertions and missing adapters."""
    import onnx.version_converter

    own: type[Exception] = onnx.version_converter.ConvertError
    return (own, RuntimeError, ValueError, TypeError, IndexError, KeyError)


def _check_known(node: onnx.NodeProto, scope: Scope) -> None:
    """Return if the type of each input is known.

    Raises:
        ConversionError: one is not.
    """
    unknown = [name for name in node.input if name and name not in scope.types and name not in scope.constants]
    if unknown:
        raise ConversionError(f"the type of its input {unknown[0]!r} cannot be inferred")


def _with_plain_names(node: onnx.NodeProto, scope: Scope) -> tuple[onnx.NodeProto, Scope, dict[str, str]]:
    """Return the node with numbered names, what the scope knows of them, and plain name -> real name."""
    plain: dict[str, str] = {}
    for letter, names in (("i", node.input), ("o", node.output)):
        for index, name in enumerate(names):
            if name:
                plain.setdefault(name, f"{letter}{index}")
    _check_known(node, scope)
    lone = type(node)(op_type=node.op_type, attribute=node.attribute)
    lone.input.extend(plain.get(name, "") for name in node.input)
    lone.output.extend(plain.get(name, "") for name in node.output)
    types = {short: scope.types[name] for name, short in plain.items() if name in scope.types}
    constants = {short: scope.constants[name] for name, short in plain.items() if name in scope.constants}
    return lone, Scope(types, constants), {short: name for name, short in plain.items()}


def _convert_version(model: onnx.ModelProto, target: int) -> onnx.GraphProto | str:
    """Return the graph that ONNX's version converter makes of a model of one node, or why it cannot be used."""
    import onnx.version_converter

    try:
        made = onnx.version_converter.convert_version(model, target).graph
    except converter_errors() as err:
        return _detail(err)
    wanted = [value.name for value in model.graph.output]
    if not made.node or [value.name for value in made.output] != wanted:
        return " (ONNX's converter gives no node for it)"
    wrong = next(filter(None, (_invalid(inner, target) for inner in made.node)), "")
    return f" (ONNX's converter leaves {wrong})" if wrong else made


def _single_node_model(node: onnx.NodeProto, scope: Scope, opset: int) -> onnx.ModelProto:
    """Return a model of one node: small constants are initializers, everything else is an input of its type."""
    import onnx

    names = list(dict.fromkeys(name for name in node.input if name))
    inputs = [
        onnx.ValueInfoProto(name=name, type=type_proto(scope.types[name]))
        for name in names
        if name not in scope.constants
    ]
    outputs = [
        onnx.ValueInfoProto(name=name, type=type_proto(scope.types[name]) if name in scope.types else None)
        for name in node.output
        if name
    ]
    constants = [_named(scope.constants[name], name) for name in names if name in scope.constants]
    lone = copied(node)
    lone.ClearField("metadata_props")
    graph = onnx.helper.make_graph([lone], "node", inputs, outputs, initializer=constants)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=_IR_VERSION)


def _invalid(node: onnx.NodeProto, opset: int) -> str:
    """Return which attribute of a node its operator lacks or needs in an opset; empty when the node is right.

    The converter leaves attributes alone that an older operator has not, and the inliner loses some references.
    """
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return f"{node.op_type}, which is not there" if not node.domain else ""
    given = {attribute.name for attribute in node.attribute}
    lacking = [name for name, attribute in schema.attributes.items() if attribute.required and name not in given]
    if node.op_type == "Constant" and not given:
        lacking = ["value"]
    wrong = sorted(given - schema.attributes.keys()) or lacking
    return f"attribute {wrong[0]} of {node.op_type} wrong" if wrong else ""


def _detail(err: Exception) -> str:
    """Return the converter's message without its source location; empty if it only reports a missing operator."""
    lines = str(err).strip().splitlines()
    text = lines[-1].rpartition("failed: ")[2] if lines else type(err).__name__
    return "" if text.startswith(("No Previous Version", "Operator or type")) else f" ({text})"


def _with_defaults(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> onnx.NodeProto:
    """Return the node with its defaults written out, since the inliner drops references to absent attributes."""
    full = copied(node)
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            full.attribute.add().CopyFrom(attribute.default_value)
            full.attribute[-1].name = name
    return full


def _trimmed(names: list[str]) -> list[str]:
    """Return the list without empty names at the end; changes it in place."""
    while names and not names[-1]:
        names.pop()
    return names


def _named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    if tensor.name == name:
        return tensor
    copy = copied(tensor)
    copy.name = name
    return copy
