"""Whether a kernel list covers an exported node, with two rules that the list itself does not contain.

ONNX Runtime expands a node whose operator is a function when no kernel takes it, the CPU's included, and on the CPU
it casts f16 to f32 around a node that has no f16 kernel. Neither is a reason to refuse a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import onnx
from onnx import helper, inliner

from rlx_ort.converters.onnx_types import type_of, type_proto
from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import KernelClaim
from rlx_ort.providers.claims import takes


def takes_node(
    claims: Sequence[KernelClaim],
    cpu_claims: Sequence[KernelClaim] | None,
    node: ExportedNode,
    functions: Collection[tuple[str, str]],
) -> bool:
    """Return whether a kernel takes the node, or ONNX Runtime expands it because the CPU has no kernel either.

    `functions` are the domain and name of those that the model brings.
    """
    if _has_kernel(claims, node):
        return True
    return not _has_kernel(cpu_claims or (), node) and _takes_expanded(claims, cpu_claims, node, functions)


def cpu_takes_node(
    cpu_claims: Sequence[KernelClaim], node: ExportedNode, functions: Collection[tuple[str, str]]
) -> bool:
    """Return whether the CPU takes the node, if need be expanded or with its f16 values cast to f32."""
    if _has_kernel(cpu_claims, node):
        return True
    wide = node._replace(pattern=node.pattern.alike(_widened(node.inputs), _widened(node.outputs)))
    if _has_kernel(cpu_claims, wide):
        return True
    return _takes_expanded(cpu_claims, None, wide, functions)


def signature(node: ExportedNode) -> str:
    """Return the operator with its version and the element types it was asked for."""
    kinds = [kind for kind in (*node.inputs, *node.outputs) if kind is not None]
    elements = dict.fromkeys(kind.dtype.value if isinstance(kind, TensorType) else str(kind) for kind in kinds)
    return f"{node.domain or 'ai.onnx'}::{node.op_type}-{node.version} ({', '.join(elements)})"


def _has_kernel(claims: Sequence[KernelClaim], node: ExportedNode) -> bool:
    return takes(claims, node.domain, node.op_type, node.version, node.inputs, node.outputs)


def _takes_expanded(
    claims: Sequence[KernelClaim],
    cpu_claims: Sequence[KernelClaim] | None,
    node: ExportedNode,
    functions: Collection[tuple[str, str]],
) -> bool:
    """Return whether the nodes of a function's body are taken; a body that cannot be expanded here counts as taken."""
    if (node.domain, node.op_type) in functions:
        return True
    if not is_function(node.domain, node.op_type, node.version):
        return False
    body = function_body(node)
    return body is None or all(
        inner.op_type == "Constant" or _is_shape(inner) or takes_node(claims, cpu_claims, inner, functions)
        for inner in body
    )


def _is_shape(node: ExportedNode) -> bool:
    return all(
        isinstance(kind, TensorType) and kind.dtype is DType.I64 and kind.shape is not None and kind.shape.rank < 2
        for kind in node.outputs
    )


def _widened(kinds: Sequence[ValueType | None]) -> tuple[ValueType | None, ...]:
    return tuple(
        TensorType(DType.F32, kind.shape) if isinstance(kind, TensorType) and kind.dtype is DType.F16 else kind
        for kind in kinds
    )


@functools.cache
def is_function(domain: str, op_type: str, version: int) -> bool:
    """Return whether ONNX defines the operator by a function that may be used in a model of this opset version."""
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
    info = onnx.ValueInfoProto
    inputs = [f"i{place}" if kind is not None else "" for place, kind in enumerate(kinds)]
    outputs = [f"o{place}" for place in range(len(results))]
    call = helper.make_node(op_type, inputs, outputs, domain=domain)
    graph = helper.make_graph(
        [call],
        "call",
        [info(name=name, type=type_proto(kind)) for name, kind in zip(inputs, kinds, strict=True) if kind is not None],
        [info(name=name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, version)])
    try:
        model = inliner.inline_selected_functions(model, [(domain, op_type)], False, True)
        model = onnx.shape_inference.infer_shapes(model)
    except (RuntimeError, ValueError, onnx.shape_inference.InferenceError):
        return None  # the body needs an attribute or an input type that is not known here
    types = {info.name: type_of(info.type) for info in (*model.graph.input, *model.graph.value_info)}
    versions = {entry.domain: entry.version for entry in model.opset_import}
    # A body that depends on attributes, which are not known here, is not expanded: the call is still there.
    if any((inner.domain, inner.op_type) == (domain, op_type) for inner in model.graph.node):
        return None
    claims = []
    for inner in model.graph.node:
        reads, writes = (tuple([types.get(name) for name in names]) for names in (inner.input, inner.output))
        claims.append(ExportedNode.of("", inner.domain, inner.op_type, versions[inner.domain], 0, reads, writes))
    return tuple(claims)
