"""Chooses the opset of an exported model: the lowest that expresses every node, 21 unless a node needs another.

A node that was written for one opset version may be stamped with another only if its operator means the same there:
the schemas agree on everything the node uses, and no silent change of meaning (`semantics`) lies between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import type_proto_text
from rlx_ort.converters.to_onnx.emitter import DEFAULT_OPSET
from rlx_ort.converters.to_onnx.semantics import BREAKS, RENAMED, Break, is_redundant
from rlx_ort.converters.to_onnx.writer import ModelWriter, NodeRecord
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType, ValueType

if TYPE_CHECKING:
    import onnx
    import onnx_ir

__all__ = ["MAX_OPSET", "choose_imports", "ir_version", "obstacle"]

MAX_OPSET = 26
"""The newest ai.onnx opset that ONNX Runtime 1.31 loads."""

# IR version -> the element types it brought: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, `Version`.
_IR_VERSION = 10
_NEWER_TYPES = {DType.F4E2M1: 11, DType.F8E8M0: 12, DType.I2: 13, DType.U2: 13}


def choose_imports(writer: ModelWriter) -> dict[str, int]:
    """Return domain -> opset version for a model, and take attributes off that the version does not know.

    Candidates, best first: 21, the versions above it, the version an imported model had, the versions below 21. When
    none takes all nodes and the whole model was imported at one version, it stays there, for the engine to judge.

    Raises:
        ConversionError: no version takes every node; the message names the nodes.
    """
    imports: dict[str, int] = {}
    standard = []
    for record in writer.records:
        domain = record.node.domain
        if domain == "":
            standard.append(record)
        else:
            imports[domain] = max(imports.get(domain, 1), record.written)
    target = _choose(writer, standard)
    for record in standard:
        for name in _obsolete(record.node, record.written, target):
            del record.node.attributes[name]
    return {"": target, **imports}


def ir_version(types: Iterable[ValueType]) -> int:
    """Return the lowest IR version that has every element type, 10 at least; ONNX Runtime 1.24 reads 10."""
    return max((_NEWER_TYPES.get(dtype, _IR_VERSION) for kind in types for dtype in _dtypes(kind)), default=_IR_VERSION)


def obstacle(node: onnx_ir.Node, written: int, target: int, types: dict[onnx_ir.Value, ValueType]) -> str:
    """Return why a node of ai.onnx written for one opset version must not be stamped with another; empty if it may."""
    old, new = _schema(node.op_type, written), _schema(node.op_type, target)
    if old is None:
        return "" if written == target else f"ai.onnx has no {node.op_type} in opset {written}"
    if new is None or new.deprecated:
        return f"ai.onnx has no {node.op_type} in opset {target}"
    if old.since_version == new.since_version:
        return ""
    for change in BREAKS.get(node.op_type, ()):
        if min(written, target) < change.version <= max(written, target) and _concerns(change, node):
            return f"{node.op_type} changed in opset {change.version}: {change.reason}"
    return _attribute_obstacle(node, old, new, types) or _value_obstacle(node, old, new, types)


def _choose(writer: ModelWriter, records: list[NodeRecord]) -> int:
    own = sorted({record.written for record in records if record.imported}, reverse=True)
    above = [*range(DEFAULT_OPSET, MAX_OPSET + 1)]
    below = [*range(DEFAULT_OPSET - 1, 0, -1)]
    refused: dict[int, tuple[NodeRecord, str]] = {}
    for target in dict.fromkeys([*above, *(version for version in own if version <= MAX_OPSET), *below]):
        for record in records:
            reason = obstacle(record.node, record.written, target, writer.types)
            if reason:
                refused[target] = (record, reason)
                break
        else:
            return target
    if len(own) == 1 and all(record.imported for record in records):
        return own[0]
    reasons = {f"{record.label}: {reason}" for record, reason in refused.values()}
    raise ConversionError(
        "no opset takes every node of the graph:\n  " + "\n  ".join(sorted(reasons)) + "\nreplace one of these nodes"
    )


@functools.cache
def _schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    import onnx

    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def _concerns(change: Break, node: onnx_ir.Node) -> bool:
    if change.fewer_inputs and len(node.inputs) >= change.fewer_inputs:
        return False
    if change.unless is not None:
        attribute = node.attributes.get(change.unless[0])
        if attribute is not None and attribute.value == change.unless[1]:
            return False
    if not change.attributes:
        return True
    given = [node.attributes[name].value for name in change.attributes if name in node.attributes]
    given = [value for value in given if not isinstance(value, tuple) or any(value)]  # all zeros is no padding
    return bool(given) and (not change.values or any(value in change.values for value in given))


def _attribute_obstacle(
    node: onnx_ir.Node, old: onnx.defs.OpSchema, new: onnx.defs.OpSchema, types: dict[onnx_ir.Value, ValueType]
) -> str:
    for name in node.attributes:
        if name in new.attributes:
            known = old.attributes.get(name)
            if known is not None and known.type != new.attributes[name].type:
                return f"attribute {name} of {node.op_type} is of another kind in opset {new.since_version}"
        elif not _is_default(node, name, old) and not is_redundant(node, name, types):
            return f"{node.op_type} has no attribute {name} in opset {new.since_version}"
    for name, attribute in new.attributes.items():
        if name in node.attributes:
            continue
        if attribute.required:
            return f"{node.op_type} needs attribute {name} in opset {new.since_version}"
        before = old.attributes.get(name)
        if before is not None and before.default_value != attribute.default_value:
            return f"attribute {name} of {node.op_type} has another default in opset {new.since_version}"
    return ""


def _obsolete(node: onnx_ir.Node, written: int, target: int) -> list[str]:
    """Return the attributes that the target version lacks; `obstacle` made sure that nothing is lost with them."""
    new = _schema(node.op_type, target)
    return [] if new is None or written == target else [name for name in node.attributes if name not in new.attributes]


def _is_default(node: onnx_ir.Node, name: str, schema: onnx.defs.OpSchema) -> bool:
    import onnx
    import onnx_ir

    known = schema.attributes.get(name)
    if known is None or not known.default_value.type:
        return False
    default: object = onnx.helper.get_attribute_value(known.default_value)
    value = node.attributes[name].value
    if isinstance(value, str):
        value = value.encode("utf-8")
    return not isinstance(value, onnx_ir.Graph) and bool(value == default)


def _value_obstacle(
    node: onnx_ir.Node, old: onnx.defs.OpSchema, new: onnx.defs.OpSchema, types: dict[onnx_ir.Value, ValueType]
) -> str:
    given = [value if value is not None and value.name != "" else None for value in node.inputs]
    made = [value if value.name != "" else None for value in node.outputs]
    for values, before, after in ((given, old.inputs, new.inputs), (made, old.outputs, new.outputs)):
        for index, value in enumerate(values):
            was, now = _formal(before, index), _formal(after, index)
            if value is None or was is None:
                continue
            if now is None or (was.name != now.name and (node.op_type, was.name, now.name) not in RENAMED):
                return f"{node.op_type} has no {was.name} in opset {new.since_version}"
            allowed, known = _allowed(new, now), type_proto_text(types.get(value, UnknownType()))
            if known not in allowed and not (_allowed(old, was) <= allowed):
                return f"{node.op_type} does not take {known or 'an unknown type'} in opset {new.since_version}"
        for index in range(len(values), len(after)):
            if values is given and after[index].option.name == "Single":
                return f"{node.op_type} needs input {after[index].name} in opset {new.since_version}"
    return ""


def _formal(formals: list[onnx.defs.OpSchema.FormalParameter], index: int) -> onnx.defs.OpSchema.FormalParameter | None:
    if index < len(formals):
        return formals[index]
    return formals[-1] if formals and formals[-1].option.name == "Variadic" else None


def _allowed(schema: onnx.defs.OpSchema, formal: onnx.defs.OpSchema.FormalParameter) -> frozenset[str]:
    for constraint in schema.type_constraints:
        if constraint.type_param_str == formal.type_str:
            return frozenset(constraint.allowed_type_strs)
    return frozenset({formal.type_str})


def _dtypes(kind: ValueType) -> Iterable[DType]:
    match kind:
        case TensorType():
            yield kind.dtype
        case SequenceType() | OptionalType():
            yield from _dtypes(kind.element)
        case MapType():
            yield kind.key
            yield from _dtypes(kind.value)
