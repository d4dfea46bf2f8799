"""ONNX forms of control flow, and of the ops that stand for a graph: blocks, and what a user brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.imported import imported_node
from rlx_ort.converters.to_onnx.kernel_dtypes import where_in
from rlx_ort.converters.to_onnx.loops import repeat_steps
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import tensor_input
from rlx_ort.ir.ops.blocks import AxialRope2d, FusedAttentionBlock, FusedTransformerLayer
from rlx_ort.ir.ops.composite import Composite
from rlx_ort.ir.ops.control import If, Scan, While
from rlx_ort.ir.ops.custom import Custom, CustomFn
from rlx_ort.ir.ops.fused import AdaLayerNorm, FusedConvBiasAct, GatedResidual, SoftmaxCrossEntropyWithLogits
from rlx_ort.ir.ops.gqa import GroupedQueryAttention
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType, ValueType

__all__: list[str] = []

_COUNTER = TensorType(DType.I64, Shape())
_FLAG = TensorType(DType.BOOL, Shape())


@lowers(If)
def _if(emit: Emitter, op: If, inputs: Sequence[Any]) -> Any:
    predicate, captures = inputs[0], inputs[1:]
    types = _input_types(emit)
    if op.elementwise(types):
        yes, no = emit.inline(op.then_body, captures), emit.inline(op.else_body, captures)
        dtypes = [tensor_input(op, emit.node.types, index, "result").dtype for index in range(len(yes))]
        chosen = zip(dtypes, yes, no, strict=True)
        return tuple(where_in(emit, predicate, dtype, left, right) for dtype, left, right in chosen)
    # ONNX gives the branches of an If no inputs of their own: they use the values around them.
    yes_graph = emit.block("then", (), lambda inner, _: inner.inline(op.then_body, captures))
    no_graph = emit.block("else", (), lambda inner, _: inner.inline(op.else_body, captures))
    count = len(emit.node.types)
    test = _scalar(emit, predicate, tensor_input(op, types, 0, "predicate"))
    return emit.op("If", test, then_branch=yes_graph, else_branch=no_graph, outputs=count)


@lowers(While)
def _while(emit: Emitter, op: While, inputs: Sequence[Any]) -> Any:
    carries, captures = inputs[: op.carries], inputs[op.carries :]
    kind = op.cond.outputs[0].type
    assert isinstance(kind, TensorType)  # noqa: S101  # infer made sure of it

    def test(at: Emitter, values: Sequence[Any]) -> Any:
        return _scalar(at, at.inline(op.cond, [*values, *captures])[0], kind)

    def write(inner: Emitter, formal: Sequence[Any]) -> list[Any]:
        following = inner.inline(op.body, [*formal[2:], *captures])
        return [test(inner, following), *following]

    carried: list[tuple[str, ValueType]] = [("carry", value) for value in emit.node.types]
    body = emit.block("pass", [("counter", _COUNTER), ("go_on", _FLAG), *carried], write)
    limit = None if op.max_iterations is None else emit.constant(op.max_iterations, DType.I64)
    return emit.op("Loop", limit, test(emit, carries), *carries, body=body, outputs=op.carries)


@lowers(Scan)
def _scan(emit: Emitter, op: Scan, inputs: Sequence[Any]) -> Any:
    carry, bcasts, sequences = inputs[0], inputs[1 : 1 + op.num_bcast], inputs[1 + op.num_bcast :]
    kinds = op.body_inputs(_input_types(emit))
    saves = op.save_trajectory or op.num_checkpoints > 0

    def step(at: Emitter, state: Sequence[Any], rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        following = at.inline(op.body, [*state, *bcasts, *rows])
        return following, following if saves else ()

    steps = list(zip(sequences, kinds[1 + op.num_bcast :], strict=True))
    last, stacked = repeat_steps(emit, step, op.length, [(carry, kinds[0])], steps, kinds[:1] if saves else ())
    if op.num_checkpoints:
        return emit.op("Gather", stacked[0], emit.i64(op.checkpoint_rows), axis=0)
    return stacked[0] if saves else last[0]


def _input_types(emit: Emitter) -> list[TensorType]:
    return [emit.input_type(index) for index in range(len(emit.node.inputs))]


def _scalar(emit: Emitter, value: Any, kind: TensorType) -> Any:
    """Return a value of one element without dimensions, as the conditions of If and Loop should be."""
    return value if kind.shape is not None and not kind.shape.rank else emit.op("Reshape", value, emit.i64([]))


@lowers(AdaLayerNorm)
@lowers(AxialRope2d)
@lowers(FusedAttentionBlock)
@lowers(FusedConvBiasAct)
@lowers(FusedTransformerLayer)
@lowers(GatedResidual)
@lowers(GroupedQueryAttention)
@lowers(SoftmaxCrossEntropyWithLogits)
def _composite(emit: Emitter, op: Composite, inputs: Sequence[Any]) -> Any:
    body = op.expand([emit.input_type(index) for index in range(len(inputs))])
    return emit.inline(body, inputs)


@lowers(Custom)
def _custom(emit: Emitter, op: Custom, inputs: Sequence[Any]) -> Any:
    count = len(op.types)
    node = OnnxNode(op.name, op.domain, op.version, "", op.attributes, {}, len(inputs), count)
    return imported_node(emit, node, inputs)


@lowers(CustomFn)
def _custom_fn(emit: Emitter, op: CustomFn, inputs: Sequence[Any]) -> Any:
    return emit.inline(op.fwd, inputs)
