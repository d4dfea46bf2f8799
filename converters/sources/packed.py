"""Keeps quantised weights packed: products of a graph with them become `DequantMatMul`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.dequant import DequantMatMul
from rlx_ort.ir.ops.leaf import Param
from rlx_ort.ir.ops.linalg import MatMul
from rlx_ort.ir.ops.shape import Transpose
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = ["PackedProduct", "pack", "packable"]


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """A parameter whose every use is a product that takes it packed.

    Attributes:
        param: the node of the parameter.
        kind: its type packed: u8 `(N, row bytes)`.
        products: the nodes that multiply by it, each with the op it becomes.
        between: the transposition they read it through so far; nothing reads that afterwards.
    """

    param: Node
    kind: TensorType
    products: tuple[tuple[Node, Op], ...]
    between: Node | None = None


def packable(
    graph: Graph, name: str, blocks: tuple[int, int], scheme: str, *, transposed: bool
) -> PackedProduct | None:
    """Return how a parameter can stay packed, None where it cannot.

    Rows of blocks run along K, so they fit `x @ w` with w `(K, N)` if the file has `(N, K)`, its transpose, and
    `x @ transpose(w)` with w `(N, K)` if the file has the same.

    Args:
        graph: the graph.
        name: the parameter.
        blocks: N and the bytes of a row.
        scheme: the format of the blocks.
        transposed: whether the file has the transpose of the parameter.
    """
    leaf = next((node for node in graph.nodes if isinstance(node.op, Param) and node.op.name == name), None)
    if leaf is None or leaf.id in {value.ref.node for value in graph.outputs}:
        return None
    source = leaf
    if not transposed:
        users = _users(graph, leaf)
        if len(users) != 1 or users[0].op != Transpose((1, 0)):
            return None
        source = users[0]
        if source.id in {value.ref.node for value in graph.outputs}:
            return None
    kind = TensorType(DType.U8, Shape(blocks))
    products = []
    for node in _users(graph, source):
        ref = node.inputs[1] if isinstance(node.op, MatMul) else None
        x = node.inputs[0] if ref is not None and ref.node == source.id else None
        if x is None or x.node == source.id:
            return None
        op = DequantMatMul(scheme)
        try:
            (result,) = op.infer([graph.nodes[x.node].types[x.output], kind])
        except GraphVerifyError:
            return None  # x has no known K, or is no matrix of floats
        if result != node.types[0]:
            return None
        products.append((node, op))
    return PackedProduct(leaf, kind, tuple(products), None if source is leaf else source) if products else None


def pack(graph: Graph, plans: Mapping[str, tuple[PackedProduct, TensorData]]) -> None:
    """Change the graph so that parameters are packed and their products take them so."""
    for name, (plan, data) in plans.items():
        plan.param.op = Param(name, plan.kind)
        plan.param.types = (plan.kind,)
        graph.weights[name] = data
        if plan.between is not None:
            plan.between.types = tuple(plan.between.op.infer([plan.kind]))
        for node, op in plan.products:
            node.op = op
            node.inputs = (node.inputs[0], graph.value(plan.param.id).ref)
    if plans:
        graph.revision += 1


def _users(graph: Graph, node: Node) -> list[Node]:
    return graph.users(graph.value(node.id).ref)
