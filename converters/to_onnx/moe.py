"""ONNX forms of the ops of mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.ir.bodies import as_body
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.leaf import Capture
from rlx_ort.ir.ops.moe import GroupedMatMul, ScatterAdd
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.model import ModelValue
    from rlx_ort.ir.graph import Graph

__all__ = ["grouped_product", "picked_product", "picks"]


@lowers(GroupedMatMul)
def _grouped_matmul(emit: Emitter, op: GroupedMatMul, inputs: Sequence[Any]) -> Any:
    x, w = emit.input_type(0), emit.input_type(1)
    experts = emit.cast(inputs[2], DType.I64)
    if picks(known_shape(op, x, "x"), known_shape(op, w, "w")):
        return picked_product(emit, inputs[0], emit.op("Gather", inputs[1], experts, axis=0))
    return grouped_product(emit, (inputs[0], inputs[1], experts), (x, w))


@lowers(ScatterAdd)
def _scatter_add(emit: Emitter, op: ScatterAdd, inputs: Sequence[Any]) -> Any:
    updates = emit.input_type(0)
    dtype = updates.dtype
    # The CPU kernel adds neither f16 nor bf16, and sums are better in f32 anyway.
    wide = DType.F32 if dtype in {DType.F16, DType.BF16} else dtype
    shape = emit.dims((op.rows, *known_shape(op, updates, "updates")[1:]))
    zeros = emit.op("Expand", emit.constant(0, wide), shape)
    places = emit.op("Unsqueeze", emit.cast(inputs[1], DType.I64), emit.i64([-1]))
    total = emit.op("ScatterND", zeros, places, emit.cast(inputs[0], wide), reduction="add")
    return total if wide is dtype else emit.op("Cast", total, to=dtype)


def picks(x: Shape, w: Shape) -> bool:
    """Return whether copying a matrix for each row is the cheaper way: no more rows than experts, known beforehand."""
    return isinstance(x[0], int) and isinstance(w[0], int) and x[0] <= w[0]


def picked_product(emit: Emitter, x: ModelValue, matrices: ModelValue) -> Any:
    """Write x `(M, K)` times a matrix for each row, `(M, K, N)`."""
    product = emit.op("MatMul", emit.op("Unsqueeze", x, emit.i64([1])), matrices)
    return emit.op("Squeeze", product, emit.i64([1]))


def grouped_product(
    emit: Emitter, inputs: tuple[ModelValue, ModelValue, ModelValue], types: tuple[TensorType, TensorType]
) -> Any:
    """Write x `(M, K)` times w `(E, K, N)` by experts (i64): a loop over the experts that skips those without rows."""
    x, w, experts = inputs
    rows, count, columns = (
        known_shape(emit.node.op, types[place], "xw"[place])[axis] for place, axis in ((0, 0), (1, 0), (1, 2))
    )
    total = TensorType(types[0].dtype, Shape((rows, columns)))
    zeros = emit.op("Expand", emit.constant(0, total.dtype), emit.dims((rows, columns)), types=[total])
    captured = (*types, TensorType(DType.I64, Shape((rows,))))
    body = as_body(
        lambda graph, step, going, sums: _step(graph, (step, going, sums), captured, total),
        [("expert", TensorType(DType.I64, Shape())), ("going", TensorType(DType.BOOL, Shape())), ("sums", total)],
        "experts",
    )
    trips = emit.op("Squeeze", emit.dims([count]))
    return emit.op("Loop", trips, emit.constant(True, DType.BOOL), zeros, body=emit.subgraph(body, (x, w, experts)))


def _step(
    graph: Graph, inputs: tuple[Value, Value, Value], captured: Sequence[TensorType], total: TensorType
) -> Sequence[Value]:
    step, going, sums = inputs
    x, w, experts = (graph.append(Capture(place, kind)) for place, kind in enumerate(captured))
    chosen = graph.eq_(experts, step)
    used = graph.compare("gt", graph.sum(graph.cast(chosen, DType.I32)), 0)
    # The branches read what stands around them: their captures are inputs 1 to 5 of the If.
    outer = (sums, x, w, step, chosen)
    kinds = [value.type for value in outer]
    then = as_body(lambda inner: _product(inner, kinds), [], "rows")
    otherwise = as_body(lambda inner: inner.append(Capture(1, total)), [], "none")
    branches = {"then_branch": then, "else_branch": otherwise}
    node = OnnxNode("If", "", 21, "", branches, {}, 1, 1)
    result = graph.add_node(node, [used, *outer], types=[total])[0]
    return (going, result)


def _product(graph: Graph, kinds: Sequence[Any]) -> Value:
    sums, x, w, step, chosen = (graph.append(Capture(place, kind)) for place, kind in enumerate(kinds, 1))
    found = TensorType(DType.I64, Shape((1, None)))
    rows = graph.onnx_node("NonZero", [chosen], types=[found])[0]
    places = graph.transpose(rows, (1, 0))
    picked = graph.onnx_node("GatherND", [x, places], types=[TensorType(x.dtype, Shape((None, x.shape[1])))])[0]
    product = graph.matmul(picked, graph.gather(w, step, axis=0))
    return graph.onnx_node("ScatterND", [sums, places, product], types=[sums.type])[0]
