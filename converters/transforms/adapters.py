"""Rewrites one node of ai.onnx for another opset with ONNX's version converter, which is shown that node only.

The converter cannot take whole models as they come: it reads every weight, looks into no body and drops functions,
names and metadata. With one node at a time all of that stays as it is, and a message can name the node that fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.bundle import bundle_of
from rlx_ort.converters.protos import bodies_of, copied, set_items
from rlx_ort.converters.to_onnx.opset import meaning_change, obsolete_attributes, obstacle
from rlx_ort.converters.to_onnx.semantics import NodeForm
from rlx_ort.converters.to_onnx.writer import UniqueNames
from rlx_ort.converters.transforms.one_node import (
    check_known,
    converted,
    converter_errors,
    invalid,
    single_node_model,
    trimmed,
    with_defaults,
    with_plain_names,
)
from rlx_ort.converters.transforms.scope import Scope, label_of, model_scope, typed_model
from rlx_ort.errors import ConversionError
from rlx_ort.ir.types import UnknownType

if TYPE_CHECKING:
    import onnx

__all__ = ["Adapted", "NodeAdapter", "node_form"]

# The converter compares the axis with the rank, and leaves these as they are where flattening makes no difference.
_DECIDED_BY_RANK = frozenset({"Hardmax", "LogSoftmax", "Softmax"})


@dataclass(frozen=True, slots=True)
class Adapted:
    """What stands in place of a node: nodes that read and write the same values, and the constants they need."""

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
        """Return what a node becomes: itself where its meaning is the same in both opsets.

        Raises:
            ConversionError: the target opset cannot say it, or nobody knows how; the message is about this node.
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
        lone, plain_scope, real = with_plain_names(node, scope)
        model = single_node_model(lone, plain_scope, self._source)
        key = model.SerializeToString(deterministic=True)
        if key not in self._done:
            self._done[key] = converted(model, self._target)
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
        for inner in made.node:
            for name in inner.output:
                if name not in fresh:
                    fresh[name] = self._values.unique(f"{first}/{name}")
        return Adapted([self._renamed(inner, node, fresh) for inner in made.node], initializers)

    def _renamed(self, made: onnx.NodeProto, origin: onnx.NodeProto, fresh: Mapping[str, str]) -> onnx.NodeProto:
        inputs, outputs = [fresh[name] for name in made.input], [fresh[name] for name in made.output]
        del made.input[:], made.output[:]
        made.input.extend(trimmed(inputs))
        made.output.extend(trimmed(outputs))
        if made.op_type == origin.op_type:
            made.name = origin.name
        elif origin.name:
            made.name = self._nodes.unique(f"{origin.name}/{made.op_type}")
        made.doc_string = origin.doc_string
        made.metadata_props.extend(origin.metadata_props)
        return made

    def _expanded(self, node: onnx.NodeProto, scope: Scope) -> list[tuple[onnx.NodeProto, Scope]] | None:
        """Return the nodes that ONNX defines the operator by, or None where it has no such definition."""
        import onnx.inliner

        schema = onnx.defs.get_schema(node.op_type, self._source, "") if onnx.defs.has(node.op_type) else None
        # The stubs of onnx do not list these two.
        if schema is None or not any(getattr(schema, f"has_{kind}function") for kind in ("", "context_dependent_")):
            return None
        check_known(node, scope)
        model = single_node_model(with_defaults(node, schema), scope, self._source)
        try:
            done = onnx.inliner.inline_selected_functions(
                model, [("", node.op_type)], exclude=False, inline_schema_functions=True
            )
        except converter_errors():
            return None
        if any(inner.op_type == node.op_type or invalid(inner, self._source) for inner in done.graph.node):
            return None
        outside = {name for name in (*node.input, *node.output) if name}
        fresh = {"": ""} | {name: name for name in outside}
        for inner in done.graph.node:
            for name in inner.output:
                if name not in fresh:
                    fresh[name] = self._values.unique(f"{next(filter(None, node.output))}/{name}")
        for inner in done.graph.node:
            inputs, outputs = [fresh.get(name, name) for name in inner.input], [fresh[name] for name in inner.output]
            del inner.input[:], inner.output[:]
            inner.input.extend(trimmed(inputs))
            inner.output.extend(trimmed(outputs))
            if node.name:
                inner.name = self._nodes.unique(f"{node.name}/{inner.op_type}")
        bundle = bundle_of(done, origin=label_of(node))
        inner_scope = model_scope(bundle, typed_model(bundle))
        merged = Scope({**scope.types, **inner_scope.types}, {**scope.constants, **inner_scope.constants})
        return [(copied(inner), merged) for inner in done.graph.node]


def node_form(node: onnx.NodeProto, scope: Scope) -> NodeForm:
    """Return what the opset rules need to know of a node."""

    def kinds(names: Iterable[str]) -> list[Any]:
        return [scope.types.get(name, UnknownType()) if name else None for name in trimmed([*names])]

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
        return item.op_type, trimmed([*item.input]), {a.name: a.SerializeToString(True) for a in item.attribute}

    return bool(key(made) == key(node))
