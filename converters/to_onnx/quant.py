"""ONNX forms of the quantised ops, the products with packed weights and mixtures of experts.

GGUF blocks become f32 in basic ONNX ops, so that packed weights can be set, and set again, in the bytes of the file.
ONNX Runtime computes all of this once, when it opens the session, if the bytes are weights: runs then cost nothing
more, and the weights take four bytes each. ONNX has no op that reads two bytes as one f16, so scales come from tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.dispatch import NoNativeForm, lowers_native
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import op_in
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS, BlockFormat, scales_and_mins
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import known_shape, tensor_input
from rlx_ort.ir.ops.control import as_body
from rlx_ort.ir.ops.dequant import DequantGroupedMatMul, DequantMatMul, DequantMoEWeights, GroupedMatMul, ScatterAdd
from rlx_ort.ir.ops.leaf import Capture
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.quant import QMAX, Dequantize, FakeQuantize, FakeQuantizeLSQ, QConv2d, QMatMul, Quantize
from rlx_ort.ir.types import Dim, Shape, TensorType

_SMALLEST_SCALE = 1e-12
_NVFP4_BLOCK = 16


@lowers(Quantize)
def _quantize(emit: Emitter, op: Quantize, inputs: Sequence[Any]) -> Any:
    """QuantizeLinear, which divides and rounds half to even; f64, which it lacks, step by step."""
    kind = emit.input_type(0)
    if kind.dtype is not DType.F64:
        dtype = kind.dtype if kind.dtype is DType.F16 else DType.F32
        scale, zero = _per_axis(emit, op, op.scales, dtype), _per_axis(emit, op, op.zero_points, DType.I8)
        return emit.op("QuantizeLinear", emit.cast(inputs[0], dtype), scale, zero, axis=op.axis)
    shape = [1] * (0 if kind.shape is None else kind.shape.rank)
    if op.axis is not None:
        shape[op.axis] = len(op.scales)
    scale, zero = (emit.constant(np.reshape(given, shape), DType.F64) for given in (op.scales, op.zero_points))
    rounded = emit.op("Round", emit.op("Div", inputs[0], scale))
    return _clipped(emit, emit.op("Add", rounded, zero))


@lowers(Dequantize)
def _dequantize(emit: Emitter, op: Dequantize, inputs: Sequence[Any]) -> Any:
    scale, zero = _per_axis(emit, op, op.scales, DType.F32), _per_axis(emit, op, op.zero_points, DType.I8)
    return emit.op("DequantizeLinear", inputs[0], scale, zero, axis=op.axis)


def _per_axis(emit: Emitter, op: Quantize | Dequantize, numbers: Sequence[float], dtype: DType) -> Any:
    return emit.constant(numbers[0] if op.axis is None else numbers, dtype)


@lowers(FakeQuantize, FakeQuantizeLSQ)
def _fake_quantize(emit: Emitter, op: FakeQuantize | FakeQuantizeLSQ, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    rank = 0 if kind.shape is None else kind.shape.rank
    if kind.shape is not None and 0 in kind.shape:
        return emit.op("Identity", inputs[0])  # there is no largest element of nothing
    # f16 cannot hold the smallest scale, and few kernels take bf16.
    wide = DType.F64 if kind.dtype is DType.F64 else DType.F32
    x = emit.cast(inputs[0], wide)
    if isinstance(op, FakeQuantize) and op.scale_mode == "per_batch":
        kept = None if op.axis is None else op.axis % rank
        axes = emit.i64([axis for axis in range(rank) if axis != kept])
        size = emit.op("Abs", x)
        largest = emit.op("ReduceMax", size, axes, keepdims=1, noop_with_empty_axes=1)
        ratio = emit.op("Div", largest, emit.constant(float(QMAX[op.bits]), wide))
        scale = emit.op("Max", ratio, emit.constant(_SMALLEST_SCALE, wide))
    else:
        spread = [] if op.axis is None else [-1] + [1] * (rank - 1 - op.axis % rank)
        scale = emit.op("Reshape", emit.cast(inputs[1], wide), emit.i64(spread))
    bounds = (emit.constant(float(bound), wide) for bound in (-QMAX[op.bits], QMAX[op.bits]))
    steps = emit.op("Clip", emit.op("Round", emit.op("Div", x, scale)), *bounds)
    result = emit.op("Mul", steps, scale)
    return result if kind.dtype is wide else emit.op("Cast", result, to=kind.dtype)


@lowers(QMatMul)
def _q_matmul(emit: Emitter, op: QMatMul, inputs: Sequence[Any]) -> Any:
    if known_shape(op, emit.input_type(0), "x")[-1] == 0:
        # MatMulInteger of ONNX Runtime 1.31 leaves its result unset when there is nothing to add up.
        shape = known_shape(op, tensor_input(op, emit.node.types, 0, "result"), "result")
        acc = emit.op("Expand", emit.constant(0, DType.I32), emit.dims(shape))
    else:
        zeros = (emit.constant(np.asarray(zero, np.int8)) for zero in (op.x_zp, op.w_zp))
        acc = emit.op("MatMulInteger", inputs[0], inputs[1], *zeros)
    if len(inputs) > 2:
        acc = emit.op("Add", acc, inputs[2])
    return _requantized(emit, acc, op.mult, op.out_zp)


@lowers(QConv2d)
def _q_conv2d(emit: Emitter, op: QConv2d, inputs: Sequence[Any]) -> Any:
    """ConvInteger over an input that is padded with its zero point beforehand, so that padding adds nothing."""
    x_zero, w_zero = (emit.constant(np.asarray(zero, np.int8)) for zero in (op.x_zp, op.w_zp))
    x = inputs[0]
    if any(op.padding):
        x = emit.op("Pad", x, emit.i64([0, 0, *op.padding, 0, 0, *op.padding]), x_zero)
    acc = emit.op(
        "ConvInteger", x, inputs[1], x_zero, w_zero, strides=op.stride, dilations=op.dilation, group=op.groups
    )
    if len(inputs) > 2:
        acc = emit.op("Add", acc, emit.op("Unsqueeze", inputs[2], emit.i64([1, 2])))
    return _requantized(emit, acc, op.mult, op.out_zp)


def _requantized(emit: Emitter, acc: Any, mult: float, zero_point: int) -> Any:
    # f64: f32 holds whole numbers exactly only up to 2^24.
    scaled = emit.op("Mul", emit.op("Cast", acc, to=DType.F64), emit.constant(mult, DType.F64))
    shifted = emit.op("Add", emit.op("Round", scaled), emit.constant(float(zero_point), DType.F64))
    return _clipped(emit, shifted)


def _clipped(emit: Emitter, value: Any) -> Any:
    bounds = (emit.constant(bound, DType.F64) for bound in (-128.0, 127.0))
    return emit.op("Cast", emit.op("Clip", value, *bounds), to=DType.I8)


@lowers(GroupedMatMul)
def _grouped_matmul(emit: Emitter, op: GroupedMatMul, inputs: Sequence[Any]) -> Any:
    x, w = emit.input_type(0), emit.input_type(1)
    experts = emit.cast(inputs[2], DType.I64)
    if _picks(known_shape(op, x, "x"), known_shape(op, w, "w")):
        return _picked_product(emit, inputs[0], emit.op("Gather", inputs[1], experts, axis=0))
    return _grouped_product(emit, (inputs[0], inputs[1], experts), (x, w))


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


def _picks(x: Shape, w: Shape) -> bool:
    """Return whether copying a matrix for each row is the cheaper way: no more rows than experts, known beforehand."""
    return isinstance(x[0], int) and isinstance(w[0], int) and x[0] <= w[0]


def _picked_product(emit: Emitter, x: ModelValue, matrices: ModelValue) -> Any:
    """Write x `(M, K)` times a matrix for each row, `(M, K, N)`."""
    product = emit.op("MatMul", emit.op("Unsqueeze", x, emit.i64([1])), matrices)
    return emit.op("Squeeze", product, emit.i64([1]))


def _grouped_product(
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

    def step(graph: Graph, place: Value, going: Value, sums: Value) -> Sequence[Value]:
        x, w, experts = (graph.append(Capture(index, kind)) for index, kind in enumerate(captured))
        chosen = graph.eq_(experts, place)
        # In f32: a sum of i32 takes nine nodes on CUDA, and with them on the host ONNX Runtime 1.31.1 ends the process
        # while it opens the session (docs/results/README.md, h100-2026-11-26-second).
        used = graph.compare("gt", graph.sum(graph.cast(chosen, DType.F32)), 0)
        # The branches read values around them: their captures are inputs 1 to 5 of the If.
        outer = (sums, x, w, place, chosen)
        kinds = [value.type for value in outer]
        then = as_body(lambda inner: _product(inner, kinds), [], "rows")
        otherwise = as_body(lambda inner: inner.append(Capture(1, total)), [], "none")
        node = OnnxNode("If", "", 21, "", {"then_branch": then, "else_branch": otherwise}, {}, 1, 1)
        return (going, graph.add_node(node, [used, *outer], types=[total])[0])

    formal = [("expert", TensorType(DType.I64, Shape())), ("going", TensorType(DType.BOOL, Shape())), ("sums", total)]
    body = as_body(step, formal, "experts")
    trips = emit.op("Squeeze", emit.dims([count]))
    return emit.op("Loop", trips, emit.constant(True, DType.BOOL), zeros, body=emit.subgraph(body, (x, w, experts)))


def _product(graph: Graph, kinds: Sequence[Any]) -> Value:
    sums, x, w, step, chosen = (graph.append(Capture(place, kind)) for place, kind in enumerate(kinds, 1))
    sizes = TensorType(DType.I64, Shape((1, None)))
    rows = graph.onnx_node("NonZero", [chosen], types=[sizes])[0]
    places = graph.transpose(rows, (1, 0))
    picked = graph.onnx_node("GatherND", [x, places], types=[TensorType(x.dtype, Shape((None, x.shape[1])))])[0]
    product = graph.matmul(picked, graph.gather(w, step, axis=0))
    return graph.onnx_node("ScatterND", [sums, places, product], types=[sums.type])[0]


@lowers(DequantMatMul)
def _dequant_matmul(emit: Emitter, op: DequantMatMul, inputs: Sequence[Any]) -> Any:
    x = emit.input_type(0)
    types = emit.input_types
    k, n = op.sizes(types)
    wide = DType.F64 if x.dtype is DType.F64 else DType.F32
    if op.gguf is not None:
        rows = emit.op("Reshape", decode_blocks(emit, op.gguf, inputs[1]), emit.i64([n, k]))
        weight = emit.op("Transpose", rows, perm=[1, 0])
    elif op.scheme == "nvfp4_block":
        weight = _nvfp4(emit, inputs, types, k, n)
    elif op.block is None:
        scale = emit.cast(inputs[2], DType.F32)
        weight = emit.op("Mul", _fp8(emit, inputs[1], types[1].dtype, op.scheme), scale)
    else:
        weight = _blocks(emit, op, inputs, k, n, wide)
    # Products are taken in the dtype of x; a weight in f32 is rounded to it once, when the session opens.
    if x.dtype is not DType.F32:
        weight = emit.op("Cast", weight, to=x.dtype)
    return op_in(emit, "MatMul", x.dtype, inputs[0], weight)


@lowers_native(DequantMatMul, when=lambda op: op.packed, portable=True)
def _packed_matmul(emit: Emitter, op: DequantMatMul, inputs: Sequence[Any]) -> Any:
    """Write MatMulNBits, with the weight repacked to its layout: rows of N, low half first."""
    types = emit.input_types
    (k, n), dtype = op.sizes(types), types[0].dtype
    if dtype is DType.F64:
        raise NoNativeForm("MatMulNBits computes no f64")
    compute = dtype if dtype is DType.F16 else DType.F32
    kind, code = TensorType(compute), TensorType(DType.U8)
    zeros = None if op.scheme == "q4_0" else kind if op.gguf is None and len(inputs) > 3 else code
    emit.require_kernel("MatMulNBits", kind, code, kind, zeros, domain="com.microsoft")
    x = emit.cast(inputs[0], compute)
    block, mins = op.block or 32, None
    # Without a zero point MatMulNBits takes 8, as q4_0 means; the others count from 0.
    zero = None if op.scheme == "q4_0" else emit.constant(np.zeros((n, (k // block + 1) // 2), np.uint8))
    if op.gguf is None:
        scale, *rest = (emit.op("Transpose", item, perm=[1, 0]) for item in inputs[2:])
        flat = emit.cast(_nibbles(emit, inputs[1], k * n), DType.U8)
        codes = Packed(emit, emit.op("Transpose", emit.op("Reshape", flat, emit.i64([k, n])), perm=[1, 0]))
        zero = emit.op("Cast", rest[0], to=compute) if rest else zero
    else:
        raw = Packed(emit, inputs[1]).reshape(-1, op.gguf.bytes)
        if op.scheme == "q4_0":
            codes, factors = raw[:, 2:18].nibbles(), raw[:, 0:2].halves()
        else:
            codes = raw[:, 16:144].reshape(-1, 4, 32).nibbles()
            factors, mins = scales_and_mins(raw)
        scale = factors.reshape(n, k // block).value
    product = emit.op(
        "MatMulNBits",
        x,
        _repacked(codes, n, k // block, block),
        emit.op("Cast", scale, to=compute),
        zero,
        domain="com.microsoft",
        K=k,
        N=n,
        bits=4,
        block_size=block,
    )
    if mins is not None:
        # A block's minimum subtracts that minimum times the sum of x over the block.
        split = emit.op("Reshape", x, emit.i64([*[0] * (known_shape(op, types[0], "x").rank - 1), k // block, block]))
        sums = emit.op("ReduceSum", split, emit.i64([-1]), keepdims=0)
        by_block = emit.op("Transpose", mins.reshape(n, k // block).value, perm=[1, 0])
        product = emit.op("Sub", product, emit.op("MatMul", sums, emit.op("Cast", by_block, to=compute)))
    return product if compute is dtype else emit.op("Cast", product, to=dtype)


@lowers(DequantGroupedMatMul)
def _dequant_grouped_matmul(emit: Emitter, op: DequantGroupedMatMul, inputs: Sequence[Any]) -> Any:
    x = emit.input_type(0)
    experts, k, n = op.sizes(emit.input_types)
    chosen = emit.cast(inputs[2], DType.I64)
    weights = Shape((experts, k, n))
    shape = known_shape(op, x, "x")
    if _picks(shape, weights):
        raw = emit.op("Gather", inputs[1], chosen, axis=0)
        return _picked_product(emit, inputs[0], _slab(emit, op.scheme, raw, (shape[0], n, k), x.dtype))
    expanded = _slab(emit, op.scheme, inputs[1], (experts, n, k), x.dtype)
    return _grouped_product(emit, (inputs[0], expanded, chosen), (x, TensorType(x.dtype, weights)))


@lowers(DequantMoEWeights)
def _dequant_moe_weights(emit: Emitter, op: DequantMoEWeights, inputs: Sequence[Any]) -> Any:
    kind = GGUF_FORMATS[op.scheme]
    experts, rows, size = known_shape(op, emit.input_type(0), "bytes")
    k = size // kind.bytes * kind.elements if isinstance(size, int) else 0
    return _slab(emit, op.scheme, inputs[0], (experts, rows, k), DType.F32)


def _slab(emit: Emitter, scheme: str, raw: Any, dims: Sequence[Dim], dtype: DType) -> Any:
    """Write the weights `(E, K, N)` of experts, of which `(E, N, K)` are the dims of the packed ones."""
    values = decode_blocks(emit, GGUF_FORMATS[scheme], raw)
    rows = emit.op("Reshape", values, emit.dims(dims), allowzero=1)
    weights = emit.op("Transpose", rows, perm=[0, 2, 1])
    return weights if dtype is DType.F32 else emit.op("Cast", weights, to=dtype)


def _blocks(emit: Emitter, op: DequantMatMul, inputs: Sequence[Any], k: int, n: int, wide: DType) -> Any:
    """Write (w - zp) * s of a block scheme, `(K, N)`."""
    block = op.block or 1
    codes = _nibbles(emit, inputs[1], k * n) if op.scheme == "int4_block" else inputs[1]
    split = emit.i64([k // block, block, n])
    values = emit.op("Reshape", emit.op("Cast", codes, to=wide), split, allowzero=1)
    scale, *zero = (emit.op("Unsqueeze", emit.cast(item, wide), emit.i64([1])) for item in inputs[2:])
    if zero:
        values = emit.op("Sub", values, zero[0])
    return emit.op("Reshape", emit.op("Mul", values, scale), emit.i64([k, n]), allowzero=1)


def _nibbles(emit: Emitter, data: ModelValue, count: int) -> Any:
    """Write packed half bytes, low half first, as `count` numbers; u4 is passed on unchanged."""
    if emit.input_dtype(1) is DType.U4:
        return data
    flat = emit.op("Reshape", Packed(emit, data).nibbles(-1).value, emit.i64([-1]))
    if count % 2 == 0:
        return flat
    return emit.op("Slice", flat, emit.i64([0]), emit.i64([count]), emit.i64([0]))


def _fp8(emit: Emitter, data: ModelValue, dtype: DType, scheme: str) -> Any:
    """Write 8-bit floats as f32; bytes go through a table of the 256 numbers there are."""
    if dtype is not DType.U8:
        return emit.op("Cast", data, to=DType.F32)
    kind = DType.F8E4M3 if scheme == "fp8_e4m3" else DType.F8E5M2
    numbers = np.arange(256, dtype=np.uint8).view(kind.numpy).astype(np.float32)
    return emit.op("Gather", emit.constant(numbers), emit.op("Cast", data, to=DType.I32))


def _nvfp4(emit: Emitter, inputs: Sequence[Any], types: Sequence[TensorType], k: int, n: int) -> Any:
    numbers = np.arange(16, dtype=np.uint8).view(DType.F4E2M1.numpy).astype(np.float32)
    codes = emit.op("Cast", Packed(emit, inputs[1]).nibbles(-1).value, to=DType.I32)
    values = emit.op("Gather", emit.constant(numbers), codes)
    split = emit.i64([k // _NVFP4_BLOCK, _NVFP4_BLOCK, n])
    scale = emit.op("Unsqueeze", _fp8(emit, inputs[2], types[2].dtype, "fp8_e4m3"), emit.i64([1]))
    scaled = emit.op("Mul", emit.op("Reshape", values, split, allowzero=1), scale)
    whole = emit.op("Reshape", emit.cast(inputs[3], DType.F32), emit.i64([]))
    return emit.op("Reshape", emit.op("Mul", scaled, whole), emit.i64([k, n]), allowzero=1)


def _repacked(codes: Packed, n: int, blocks: int, block: int) -> Any:
    """Pack neighbours of half bytes into bytes `(N, blocks, block / 2)`, the first of each two in the low half."""
    pairs = codes.reshape(n, blocks, block // 2, 2)
    return (pairs[..., 0:1] | pairs[..., 1:2] << 4).reshape(n, blocks, block // 2).value


@dataclass(frozen=True, slots=True)
class Packed:
    """A value of the graph with the operations in which `rlx_ort.ir.gguf_blocks` defines the layouts; u8, or f32."""

    emit: Emitter
    value: ModelValue

    def __getitem__(self, at: tuple[Any, slice | None]) -> Packed:
        axis = at[-1]
        if axis is None:  # a new last axis
            return Packed(self.emit, self.emit.op("Unsqueeze", self.value, self.emit.i64([-1])))
        return Packed(self.emit, slice_axis(self.emit, self.value, -1, axis.start, axis.stop))

    def __and__(self, mask: int) -> Packed:
        return self._bits("BitwiseAnd", mask)

    def __or__(self, other: Packed) -> Packed:
        return self._bits("BitwiseOr", other)

    def __lshift__(self, places: int) -> Packed:
        return self._bits("BitShift", places, direction="LEFT")

    def __rshift__(self, places: npt.ArrayLike) -> Packed:
        return self._bits("BitShift", places, direction="RIGHT")

    def _bits(self, op_type: str, other: Packed | npt.ArrayLike, **attributes: Any) -> Packed:
        right = other.value if isinstance(other, Packed) else self.emit.constant(np.asarray(other, np.uint8))
        return Packed(self.emit, self.emit.op(op_type, self.value, right, **attributes))

    def __mul__(self, other: Packed) -> Packed:
        return Packed(self.emit, self.emit.op("Mul", self.value, other.value))

    def __sub__(self, other: Packed | float) -> Packed:
        right = other.value if isinstance(other, Packed) else self.emit.constant(other)
        return Packed(self.emit, self.emit.op("Sub", self.value, right))

    def reshape(self, *dims: int) -> Packed:
        """Return the elements under other dimensions."""
        return Packed(self.emit, self.emit.op("Reshape", self.value, self.emit.i64(dims)))

    def join(self, other: Packed, axis: int = -1) -> Packed:
        """Return both, one after the other along an axis."""
        return Packed(self.emit, self.emit.op("Concat", self.value, other.value, axis=axis))

    def nibbles(self, axis: int = -2) -> Packed:
        """Return the low halves, then the high ones, along a new axis; -1 makes the halves of a byte neighbours."""
        emit = self.emit
        low, high = (emit.op("Unsqueeze", half.value, emit.i64([axis])) for half in (self & 15, self >> 4))
        return Packed(emit, emit.op("Concat", low, high, axis=axis))

    def floats(self) -> Packed:
        """Return the bytes as f32."""
        return Packed(self.emit, self.emit.op("Cast", self.value, to=DType.F32))

    def signed(self) -> Packed:
        """Return the bytes, read as i8, as f32: with 128 added they count up from 0."""
        return self._bits("BitwiseXor", 128).floats() - 128.0

    def halves(self) -> Packed:
        """Return two bytes, read as f16, as f32 `(blocks, 1)`; infinities and NaN become infinities."""
        emit = self.emit
        high = emit.op("Cast", self[:, 1:2].value, to=DType.I32)
        power, start = (emit.op("Gather", emit.constant(table), high) for table in _HALF_TABLES)
        mantissa = emit.op("Add", start, self[:, 0:1].floats().value)
        return Packed(emit, emit.op("Mul", power, mantissa))

    def singles(self) -> Packed:
        """Return four bytes, read as f32, `(blocks, 1)`; numbers below 2^-125 become 0."""
        emit = self.emit
        top, second = (emit.op("Cast", self[:, place : place + 1].value, to=DType.I32) for place in (3, 2))
        power, start, unit = (
            emit.op("Gather", emit.constant(table), index)
            for table, index in zip(_SINGLE_TABLES, (top, second, second), strict=True)
        )
        weights = emit.constant(np.array([2.0**-23, 2.0**-15], np.float32))
        products = emit.op("Mul", self[:, 0:2].floats().value, weights)
        low = emit.op("ReduceSum", products, emit.i64([-1]), keepdims=1)
        return Packed(emit, emit.op("Mul", power, emit.op("Add", start, emit.op("Mul", unit, low))))


def decode_blocks(emit: Emitter, kind: BlockFormat, raw: ModelValue) -> Any:
    """Write the weights of packed blocks, u8 of any shape, as f32 `(blocks, elements)`."""
    return kind.decode(Packed(emit, raw).reshape(-1, kind.bytes)).value


def _tables() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the part of the number in the top byte of an f16, and in the two top bytes of an f32."""
    byte = np.arange(256)
    exponent, sign = (byte >> 2) & 31, np.where(byte & 128, -1.0, 1.0)
    power = sign * 2.0 ** (np.maximum(exponent, 1) - 25.0)
    power[exponent == 31] *= np.inf
    start = np.where(exponent > 0, 1024.0, 0.0) + (byte & 3) * 256.0
    coarse = sign * 2.0 ** (2.0 * (byte & 127) - 127.0)
    coarse[(byte & 127) == 0] = 0.0
    unit = 1.0 + (byte >> 7)
    single = (coarse, (1.0 + (byte & 127) / 128.0) * unit, unit)
    return (power.astype(np.float32), start.astype(np.float32)), tuple(table.astype(np.float32) for table in single)


_HALF_TABLES, _SINGLE_TABLES = _tables()
