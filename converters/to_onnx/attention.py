"""ONNX forms of attention and rotary embedding, in basic ops.

ONNX's own Attention and RotaryEmbedding are of opset 23, where providers have fewer kernels, and ONNX Runtime aligns
the causal mask of its Attention at the top left, which is wrong as soon as there are more keys than queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.dispatch import NoNativeForm, lowers_native
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.shape import reshape, slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.attention import Attention, HeadLayout, Rope
from rlx_ort.ir.types import Dim, Shape, TensorType

_CONTRIB = "com.microsoft"
_MASKED = -1e9
_MASKED_F16 = -65504.0  # f16 cannot hold -1e9


@lowers(Attention)
def _attention(emit: Emitter, op: Attention, inputs: Sequence[Any]) -> Any:
    types = [emit.input_type(index) for index in range(3)]
    layouts = op.layouts(types)
    q, k, v = (
        _heads(emit, op, inputs[i], known_shape(op, types[i], "qkv"[i]), layouts[i], swap=i == 1) for i in range(3)
    )
    dtype = types[0].dtype
    scale = 1 / math.sqrt(op.head_dim) if op.scale is None else op.scale
    scores = emit.op("Mul", emit.op("MatMul", q, k), emit.constant(scale, dtype))
    if op.softcap is not None:
        cap = emit.constant(op.softcap, dtype)
        scores = emit.op("Mul", emit.op("Tanh", emit.op("Div", scores, cap)), cap)
    scores = _masked(emit, op, scores, inputs[3:], layouts)
    mixed = emit.op("MatMul", emit.op("Softmax", scores, axis=-1), v)
    if layouts[0].heads_first:
        return mixed
    shape = known_shape(op, types[0], "q")
    lead = shape.rank - 2 if shape.rank < 4 else 1
    result = emit.op("Transpose", mixed, perm=[*range(lead), lead + 1, lead, lead + 2])
    return result if shape.rank == 4 else reshape(emit, result, Shape((*shape[:-1], op.num_heads, op.head_dim)), shape)


@lowers_native(Attention)
def _native_attention(emit: Emitter, op: Attention, inputs: Sequence[Any]) -> Any:
    """MultiHeadAttention, in the cases in which it is known to agree with the common form."""
    kinds = [emit.input_type(index) for index in range(3)]
    layouts = op.layouts(kinds)
    queries, keys = layouts[0].length, layouts[1].length
    if op.mask_kind not in {"none", "causal"}:
        raise NoNativeForm(f"the kernel's masks differ from mask kind {op.mask_kind!r}")
    # With more keys than queries the kernel aligns its mask neither at the top left nor at the bottom right.
    if op.mask_kind == "causal" and (not isinstance(queries, int) or queries != keys):
        raise NoNativeForm(f"a causal mask needs as many queries as keys, known beforehand; got {queries} and {keys}")
    if op.softcap is not None:
        raise NoNativeForm("the kernel has no softcap")
    if any(layout.heads_first for layout in layouts):
        raise NoNativeForm("the kernel takes heads last, as (B, S, H * D)")
    shapes = [known_shape(op, kind, name) for kind, name in zip(kinds, "qkv", strict=True)]
    flat = [Shape((layout.batch, layout.length, op.num_heads * op.head_dim)) for layout in layouts]
    types = [TensorType(kinds[0].dtype, shape) for shape in flat]
    emit.require_kernel("MultiHeadAttention", *types, domain=_CONTRIB)
    result = emit.op(
        "MultiHeadAttention",
        *(_as_shape(emit, *ends) for ends in zip(inputs, shapes, flat, strict=True)),
        domain=_CONTRIB,
        types=types[:1],
        num_heads=op.num_heads,
        unidirectional=int(op.mask_kind == "causal"),
        scale=1 / math.sqrt(op.head_dim) if op.scale is None else op.scale,
    )
    return _as_shape(emit, result, flat[0], shapes[0])


def _as_shape(emit: Emitter, value: Any, source: Shape, target: Shape) -> Any:
    return value if source == target else reshape(emit, value, source, target)


def _heads(emit: Emitter, op: Attention, x: Any, shape: Shape, layout: HeadLayout, *, swap: bool) -> Any:
    """Bring q, k or v to `([B,] H, S, D)`; `swap` to `([B,] H, D, S)`, as the keys are multiplied."""
    lead = shape.rank - 2 if shape.rank < 4 else 1
    if shape.rank < 4:
        x = reshape(emit, x, shape, (*shape[:-1], op.num_heads, op.head_dim))
    heads, length = (lead, lead + 1) if layout.heads_first else (lead + 1, lead)
    perm = [*range(lead), heads, *((lead + 2, length) if swap else (length, lead + 2))]
    return x if perm == sorted(perm) else emit.op("Transpose", x, perm=perm)


def _masked(emit: Emitter, op: Attention, scores: Any, mask: Sequence[Any], layouts: Sequence[HeadLayout]) -> Any:
    """Apply the mask: a masked score is replaced, not lowered, so a fully masked row stays uniform."""
    kind = emit.input_type(0)
    if op.mask_kind == "none":
        return scores
    if op.mask_kind == "bias":
        flat = emit.input_type(3).shape
        # Rank-2 q, k and v have no batch axis, so a bias that has one of size 1 loses it.
        drop = flat is not None and flat.rank == 4 and known_shape(op, kind, "q").rank == 2
        return emit.op("Add", scores, emit.op("Squeeze", mask[0], emit.i64([0])) if drop else mask[0])
    if op.mask_kind == "custom":
        dtype = emit.input_dtype(3)
        if dtype is DType.BOOL:
            hidden = emit.op("Not", mask[0])
        else:
            hidden = emit.op("Less", mask[0], emit.constant(1 if dtype.is_integer else 0.5, dtype))
        if known_shape(op, kind, "q").rank > 2:  # (B, K), broadcast over heads and queries
            hidden = emit.op("Unsqueeze", hidden, emit.i64([1, 2]))
    else:
        hidden = _hidden_by_place(emit, op, layouts[0].length, layouts[1].length)
        if hidden is None:
            return scores
    masked = _MASKED_F16 if kind.dtype is DType.F16 else _MASKED
    return emit.op("Where", hidden, emit.constant(masked, kind.dtype), scores)


def _hidden_by_place(emit: Emitter, op: Attention, queries: Dim, keys: Dim) -> Any:
    """Return where a causal or sliding mask hides a key, `(Q, K)`; None where it hides nothing."""
    if isinstance(queries, int) and isinstance(keys, int):
        place = np.arange(queries)[:, None] + max(keys - queries, 0)
        key = np.arange(keys)[None, :]
        hidden = key > place
        if op.window is not None:
            hidden |= key < place - op.window
        return emit.constant(hidden, DType.BOOL) if hidden.any() else None
    place, key = _places(emit, queries), _places(emit, keys)
    if queries != keys or queries is None:
        offset = emit.op("Sub", _length(emit, keys), _length(emit, queries))
        place = emit.op("Add", place, emit.op("Max", offset, emit.constant(0, DType.I32)))
    place = emit.op("Unsqueeze", place, emit.i64([1]))
    if op.window is None:
        return emit.op("Greater", key, place)
    # 0 <= d <= w is d (w - d) >= 0: one comparison, and WebGPU has no Or. In f32, where the product cannot overflow.
    distance = emit.cast(emit.op("Sub", place, key), DType.F32)
    rest = emit.op("Sub", emit.constant(op.window, DType.F32), distance)
    return emit.op("Less", emit.op("Mul", distance, rest), emit.constant(0, DType.F32))


def _places(emit: Emitter, length: Dim) -> Any:
    """Return 0, 1, ... of a length as i32, which accelerators compare; they lack i64."""
    if isinstance(length, int):
        return emit.constant(range(length), DType.I32)
    zero, one = emit.constant(0, DType.I32), emit.constant(1, DType.I32)
    return emit.op("Range", zero, _length(emit, length), one, types=[TensorType(DType.I32, Shape([length]))])


def _length(emit: Emitter, length: Dim) -> Any:
    """Return a length as an i32 scalar.

    It becomes a scalar before it is cast: ONNX Runtime infers the sizes of a Range through Cast and Squeeze in that
    order as i64, and then refuses the i32 Range once the length is known.
    """
    if isinstance(length, int):
        return emit.constant(length, DType.I32)
    scalar = emit.op("Squeeze", emit.dims([length]), types=[TensorType(DType.I64, Shape())])
    return emit.op("Cast", scalar, to=DType.I32, types=[TensorType(DType.I32, Shape())])


@lowers(Rope)
def _rope(emit: Emitter, op: Rope, inputs: Sequence[Any]) -> Any:
    shape = known_shape(op, emit.input_type(0), "x")
    width = shape[-1]
    heads = width // op.head_dim if isinstance(width, int) else -1
    split = Shape((*shape[:-1], heads, op.head_dim))
    x = reshape(emit, inputs[0], shape, split)
    cos, sin = (_table(emit, op, inputs[index], index, shape[-2]) for index in (1, 2))
    half = op.rotated // 2
    if op.interleaved:
        first, second = (slice_axis(emit, x, -1, start, op.rotated, step=2) for start in (0, 1))
    else:
        first, second = slice_axis(emit, x, -1, 0, half), slice_axis(emit, x, -1, half, op.rotated)
    turned = [
        emit.op("Sub", emit.op("Mul", first, cos), emit.op("Mul", second, sin)),
        emit.op("Add", emit.op("Mul", second, cos), emit.op("Mul", first, sin)),
    ]
    if op.interleaved:
        pairs = emit.op("Concat", *(emit.op("Unsqueeze", part, emit.i64([-1])) for part in turned), axis=-1)
        turned = [reshape(emit, pairs, Shape((*split[:-1], half, 2)), (*split[:-1], op.rotated))]
    if op.rotated < op.head_dim:
        turned.append(slice_axis(emit, x, -1, op.rotated, None))
    joined = turned[0] if len(turned) == 1 else emit.op("Concat", *turned, axis=-1)
    return reshape(emit, joined, split, shape)


def _table(emit: Emitter, op: Rope, table: Any, index: int, length: Dim) -> Any:
    """Return the rows and columns of a table that are used, with an axis for the heads."""
    shape = known_shape(op, emit.input_type(index), "table")
    if shape[-2] != length or length is None:
        starts, ends = emit.i64([0]), emit.dims([length])
        table = emit.op("Slice", table, starts, ends, emit.i64([shape.rank - 2]))
    if op.rotated < op.head_dim:
        table = slice_axis(emit, table, -1, 0, op.rotated // 2)
    if shape[-2] != length and not (isinstance(shape[-2], int) and isinstance(length, int)):
        # A table with too few rows fails here; one row alone would be used for every place.
        kept = [0] * (shape.rank - 2)
        return emit.op("Reshape", table, emit.dims([*kept, length, 1, op.rotated // 2]))
    return emit.op("Unsqueeze", table, emit.i64([-2]))


@lowers_native(Rope)
def _native_rope(emit: Emitter, op: Rope, inputs: Sequence[Any]) -> Any:
    kinds = emit.input_types
    shape = known_shape(op, kinds[0], "x")
    tables = [known_shape(op, kind, "table") for kind in kinds[1:]]
    if any(table.rank != 2 for table in tables):
        raise NoNativeForm("the kernel takes one table for all sequences")
    if any(not isinstance(dim, int) for table in tables for dim in table) or tables[0] != tables[1]:
        raise NoNativeForm("the kernel takes tables of one known size")
    place = TensorType(DType.I64, Shape([1]))
    emit.require_kernel("RotaryEmbedding", kinds[0], place, *kinds[1:], domain=_CONTRIB)
    cos, sin = inputs[1:]
    if op.rotated < op.head_dim:
        cos, sin = (slice_axis(emit, table, -1, 0, op.rotated // 2) for table in (cos, sin))
    x = emit.op("Unsqueeze", inputs[0], emit.i64([0])) if shape.rank == 2 else inputs[0]
    width = shape[-1]
    result = emit.op(
        "RotaryEmbedding",
        *(x, emit.i64([0]), cos, sin),  # one position: that of the first place, 0
        domain=_CONTRIB,
        interleaved=int(op.interleaved),
        num_heads=width // op.head_dim if isinstance(width, int) else 0,
        rotary_embedding_dim=op.rotated if op.rotated < op.head_dim else 0,
    )
    return emit.op("Squeeze", result, emit.i64([0])) if shape.rank == 2 else result
