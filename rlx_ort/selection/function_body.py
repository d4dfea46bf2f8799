"""Expansion of ONNX operators that are defined by a function, with the types of every node."""

from __future__ import annotations

import functools
from typing import Any

from rlx_ort.converters.onnx_types import type_of, type_proto
from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.types import ValueType

__all__ = ["function_body", "is_function"]


@functools.cache
def is_function(domain: str, op_type: str, version: int) -> bool:
    """Return whether ONNX defines the operator by a function that may be used in a model of this opset version."""
    import onnx

    try:
        schema: Any = onnx.defs.get_schema(op_type, version, domain)  # its stubs lack the function members
    except onnx.defs.SchemaError:
        return False  # an operator of another domain
    written = [known for known in schema.function_opset_versions if known <= version]
    if written:
        body = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(written)))
        return all(_unchanged(node, max(written), version) for node in body.node)
    return any(known <= version for known in schema.context_dependent_function_opset_versions)


def _unchanged(node: Any, written: int, version: int) -> bool:
    """Return whether an operator of a body still means what it meant in the opset the body was written for.

    ONNX refuses the body otherwise: Softplus, for one, is written with the CastLike of opset 18, which 19 changed.
    https://github.com/onnx/onnx/blob/main/onnx/defs/schema.cc (ValidateReferencedOpsInFunction)
    """
    import onnx

    if node.domain not in ("", "ai.onnx"):
        return True
    then, now = (onnx.defs.get_schema(node.op_type, opset, "").since_version for opset in (written, version))
    return then == now


def function_body(node: ExportedNode) -> tuple[ExportedNode, ...] | None:
    """Return the nodes that a function operator expands into, or None when that depends on its attributes."""
    return _body(node.domain, node.op_type, node.version, node.inputs, node.outputs)


@functools.lru_cache(maxsize=1024)
def _body(
    domain: str, op_type: str, version: int, kinds: tuple[ValueType | None, ...], results: tuple[ValueType | None, ...]
) -> tuple[ExportedNode, ...] | None:
    import onnx
    from onnx import helper, inliner

    inputs = [f"i{place}" if kind is not None else "" for place, kind in enumerate(kinds)]
    outputs = [f"o{place}" for place in range(len(results))]
    call = helper.make_node(op_type, inputs, outputs, domain=domain)
    graph = helper.make_graph(
        [call],
        "call",
        [_info(name, kind) for name, kind in zip(inputs, kinds, strict=True) if kind is not None],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, version)])
    try:
        model = inliner.inline_selected_functions(model, [(domain, op_type)], False, True)
        model = onnx.shape_inference.infer_shapes(model)
    except (RuntimeError, ValueError, onnx.shape_inference.InferenceError):
        return None  # the body needs an attribute or an input type that is not known here
    types = {info.name: type_of(info.type) for info in (*model.graph.input, *model.graph.value_info)}
    versions = {entry.domain: entry.version for entry in model.opset_import}
    found = [
        ExportedNode.of(
            name="",
            domain=inner.domain,
            op_type=inner.op_type,
            version=versions[inner.domain],
            origin=0,
            inputs=tuple(types.get(name) for name in inner.input),
            outputs=tuple(types.get(name) for name in inner.output),
        )
        for inner in model.graph.node
    ]
    # A body that depends on attributes, which are not known here, is not expanded: the call is still there.
    if any((inner.domain, inner.op_type) == (domain, op_type) for inner in found):
        return None
    return tuple(found)


def _info(name: str, kind: ValueType) -> Any:
    import onnx

    return onnx.ValueInfoProto(name=name, type=type_proto(kind))
