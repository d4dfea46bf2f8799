"""Models of one node: what ONNX's version converter and inliner are shown, and what they make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import type_proto
from rlx_ort.converters.protos import copied
from rlx_ort.converters.transforms.scope import Scope
from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import onnx

__all__ = [
    "check_known",
    "converted",
    "converter_errors",
    "invalid",
    "single_node_model",
    "trimmed",
    "with_defaults",
    "with_plain_names",
]

_IR_VERSION = 10


def converter_errors() -> tuple[type[Exception], ...]:
    """Return what comes out of ONNX's C++ converter and inliner for failed assertions and missing adapters."""
    import onnx.version_converter

    own: type[Exception] = onnx.version_converter.ConvertError
    return (own, RuntimeError, ValueError, TypeError, IndexError, KeyError)


def check_known(node: onnx.NodeProto, scope: Scope) -> None:
    """Return if the type of each input is known.

    Raises:
        ConversionError: one is not.
    """
    unknown = [name for name in node.input if name and name not in scope.types and name not in scope.constants]
    if unknown:
        raise ConversionError(f"the type of its input {unknown[0]!r} cannot be inferred")


def with_plain_names(node: onnx.NodeProto, scope: Scope) -> tuple[onnx.NodeProto, Scope, dict[str, str]]:
    """Return the node with numbered names, what the scope knows of them, and plain name -> real name."""
    plain: dict[str, str] = {}
    for letter, names in (("i", node.input), ("o", node.output)):
        for index, name in enumerate(names):
            if name:
                plain.setdefault(name, f"{letter}{index}")
    check_known(node, scope)
    lone = type(node)(op_type=node.op_type, attribute=node.attribute)
    lone.input.extend(plain.get(name, "") for name in node.input)
    lone.output.extend(plain.get(name, "") for name in node.output)
    types = {short: scope.types[name] for name, short in plain.items() if name in scope.types}
    constants = {short: scope.constants[name] for name, short in plain.items() if name in scope.constants}
    return lone, Scope(types, constants), {short: name for name, short in plain.items()}


def converted(model: onnx.ModelProto, target: int) -> onnx.GraphProto | str:
    """Return what ONNX's version converter makes of a model of one node, or what is wrong with that."""
    import onnx.version_converter

    try:
        made = onnx.version_converter.convert_version(model, target).graph
    except converter_errors() as err:
        return _detail(err)
    wanted = [value.name for value in model.graph.output]
    if not made.node or [value.name for value in made.output] != wanted:
        return " (ONNX's converter gives no node for it)"
    wrong = next(filter(None, (invalid(inner, target) for inner in made.node)), "")
    return f" (ONNX's converter leaves {wrong})" if wrong else made


def single_node_model(node: onnx.NodeProto, scope: Scope, opset: int) -> onnx.ModelProto:
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


def invalid(node: onnx.NodeProto, opset: int) -> str:
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
    """Return what the converter says beyond that there is no such operator, without the place in its source."""
    lines = str(err).strip().splitlines()
    text = lines[-1].rpartition("failed: ")[2] if lines else type(err).__name__
    return "" if text.startswith(("No Previous Version", "Operator or type")) else f" ({text})"


def with_defaults(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> onnx.NodeProto:
    """Return the node with its defaults written out, since the inliner drops references to absent attributes."""
    full = copied(node)
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            full.attribute.add().CopyFrom(attribute.default_value)
            full.attribute[-1].name = name
    return full


def trimmed(names: list[str]) -> list[str]:
    """Return names without the empty ones at the end, which are taken off the list."""
    while names and not names[-1]:
        names.pop()
    return names


def _named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    if tensor.name == name:
        return tensor
    copy = copied(tensor)
    copy.name = name
    return copy
