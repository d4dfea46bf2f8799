"""Attention and rotary position embedding.

Layouts of q, k and v: `(S, H*D)`, `(B, S, H*D)`, or rank 4, which is `(B, H, S, D)` when its second dimension is the
number of heads and `(B, S, H, D)` otherwise. If both fit, the first one applies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes, join_dims, named, tensor_input
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.shape import Gather
from rlx_ort.ir.types import Dim, Shape, TensorType

MASK_KINDS = ("none", "causal", "sliding", "custom", "bias")
"""Names of the mask kinds; `sliding:N` is `sliding` with a window of N."""


class HeadLayout(NamedTuple):
    """Layout of one of q, k and v; `batch` is 1 for rank 2."""

    batch: Dim
    length: Dim
    heads_first: bool


def head_layout(op: Op, shape: Shape, num_heads: int, head_dim: int, name: str) -> HeadLayout:
    """Return the layout of a q, k or v of that shape."""
    if shape.rank == 4:
        heads_first = shape[1] == num_heads
        batch, length = (shape[0], shape[2]) if heads_first else (shape[0], shape[1])
        op.expect_dim(shape[1] if heads_first else shape[2], num_heads, f"the heads of {name} {shape}")
        op.expect_dim(shape[3], head_dim, f"the last dimension of {name} {shape}")
        return HeadLayout(batch, length, heads_first)
    op.expect_dim(shape[-1], num_heads * head_dim, f"the last dimension of {name} {shape}")
    return HeadLayout(shape[0] if shape.rank == 3 else 1, shape[-2], heads_first=False)


def _parsed_mask(text: str) -> tuple[str, int | None]:
    """Return (kind, window) of a mask kind with its window, `sliding:N` for a sliding one."""
    kind, colon, number = text.strip().partition(":")
    window = int(number) if number.strip().isdecimal() else None
    if bool(colon) != (kind.strip().lower() == "sliding") or (colon and window is None):
        raise GraphVerifyError(f"mask kind {text!r} is not none, causal, sliding:N, custom or bias")
    return kind, window


class Attention(
    Op,
    operands="q:float k v mask:own?",
    builder="attention q k v mask! num_heads head_dim * scale softcap mask_kind=custom; "
    "attention_kind q k v num_heads head_dim mask_kind! * scale softcap; "
    "attention_bias q k v bias:cast! num_heads head_dim * scale softcap mask_kind=bias",
):
    """softmax(q k^T * scale) v for each head; inputs q, k, v and, for `custom` and `bias`, a mask.

    Query i stands at position `i + max(K - Q, 0)` of the K keys. A masked score is replaced by the most negative
    number that is safe in the dtype, so a fully masked row averages all of v.

    Attributes:
        mask_kind: `none`; `causal`, keys up to the query; `sliding`, of those the last `window + 1`; `custom`, a
            `(B, K)` mask in which below 0.5 is masked; `bias`, added to the scaled scores, broadcast to `(B, H, Q, K)`.
        window: how many keys before its own position a query attends to under `sliding`.
        scale: factor of the scores, None for 1 / sqrt(head_dim).
        softcap: c of c * tanh(score / c), applied to the scaled scores before any mask; None for none.
    """

    num_heads: int
    head_dim: int
    mask_kind: str = named("mask kind", MASK_KINDS, default="none")
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.window is None:
            for name, value in zip(("mask_kind", "window"), _parsed_mask(self.mask_kind), strict=True):
                object.__setattr__(self, name, value)
        Op.__post_init__(self)
        if self.num_heads < 1 or self.head_dim < 1:
            raise GraphVerifyError(f"Attention needs heads and a head size, got {self.num_heads} and {self.head_dim}")
        if (self.mask_kind == "sliding") != (self.window is not None) or (self.window or 0) < 0:
            raise GraphVerifyError(f"mask kind {self.mask_kind!r} with window {self.window}; only sliding has one")
        if self.softcap is not None and not self.softcap > 0:
            raise GraphVerifyError(f"Attention needs a softcap above 0, got {self.softcap}; leave it out for none")

    def layouts(self, inputs: OpTypes) -> tuple[HeadLayout, HeadLayout, HeadLayout]:
        """Return the layouts of q, k and v."""
        shapes = (self.expect_rank(tensor_input(self, inputs, i, "qkv"[i]), (2, 3, 4), "qkv"[i]) for i in range(3))
        q, k, v = (head_layout(self, shape, self.num_heads, self.head_dim, "qkv"[i]) for i, shape in enumerate(shapes))
        return q, k, v

    def _result(self, query: TensorType, key: TensorType, value: TensorType, *mask: TensorType) -> None:
        q, k, v = self.layouts((query, key, value))
        self.same_dtype(query, key, value)
        self.expect_dim(k.batch, q.batch, "the batch of k")
        self.expect_dim(v.batch, q.batch, "the batch of v")
        self.expect_dim(v.length, k.length, "the length of v")
        wants_mask = self.mask_kind in {"custom", "bias"}
        if wants_mask != bool(mask):
            wanted = "q, k, v and a mask" if wants_mask else "q, k and v only"
            raise GraphVerifyError(f"mask kind {self.mask_kind!r} takes {wanted}; got {3 + len(mask)} inputs")
        if mask:
            self._check_mask(mask[0], query, q, k)

    def _check_mask(self, mask: TensorType, query: TensorType, q: HeadLayout, k: HeadLayout) -> None:
        if self.mask_kind == "custom":
            batch, keys = self.expect_rank(mask, (2,), "mask")
            if batch != 1:
                self.expect_dim(batch, q.batch, "the batch of the mask")
            self.expect_dim(keys, k.length, "the keys of the mask")
            return
        if mask.dtype is not query.dtype:
            raise GraphVerifyError(f"Attention needs a bias of the dtype of q, got {mask}; cast it first")
        scores = Shape((q.batch, self.num_heads, q.length, k.length))
        shape = self.expect_rank(mask, (2, 3, 4), "mask")
        for dim, wanted in zip(self.broadcast((shape, scores)) or (), scores, strict=True):
            self.expect_dim(dim, wanted, f"the bias {shape} to fit the scores {scores}: a dimension")


class Rope(
    Op,
    operands="x:float cos:cast sin:cast",
    builder="rope x cos sin head_dim * interleaved; rope_n x cos sin head_dim n_rot! * interleaved",
):
    """Rotary position embedding of each head of x by cos and sin tables of head_dim / 2 columns.

    x is `(S, H*D)` or `(B, S, H*D)`; row s of the tables belongs to position s of the sequence; tables of rank 3 `(B,
    S, D/2)` are per sequence. Only the first `n_rot` elements of each head are rotated, by the first `n_rot / 2`
    columns; the number is even, and None rotates all. If `interleaved`, the pairs are neighbours `(2i, 2i + 1)` instead
    of halves `(i, i + n_rot / 2)`.
    """

    head_dim: int
    n_rot: int | None = None
    interleaved: bool = False

    @property
    def rotated(self) -> int:
        """How many elements of each head are rotated."""
        return self.head_dim if self.n_rot is None else self.n_rot

    def _result(self, x: TensorType, cos: TensorType, sin: TensorType) -> None:
        self.same_dtype(x, cos, sin)
        shape = self.expect_rank(x, (2, 3), "x")
        if self.head_dim < 2 or self.head_dim % 2 or self.rotated % 2 or not 0 < self.rotated <= self.head_dim:
            raise GraphVerifyError(
                f"Rope needs an even head_dim and an even n_rot up to it, got {self.head_dim} and {self.n_rot}"
            )
        if not isinstance(shape[-1], int) or shape[-1] % self.head_dim:
            raise GraphVerifyError(f"Rope cannot divide the last dimension of {shape} into heads of {self.head_dim}")
        for kind, name in ((cos, "cos"), (sin, "sin")):
            table = self.expect_rank(kind, (2, shape.rank), name)
            self.expect_dim(table[-1], self.head_dim // 2, f"the columns of {name}")
            rows, length = table[-2], shape[-2]
            if isinstance(rows, int) and isinstance(length, int) and rows < length:
                raise GraphVerifyError(f"Rope of {length} places needs as many rows in {name}, got {rows}")
            if table.rank == 3:
                self.expect_dim(rows, length, f"the rows of {name}")
                self.expect_dim(join_dims((table[0], shape[0])), table[0], f"the batch of {name}")


@builder
def cached_attention(  # noqa: D417  # the graph goes without saying
    graph: Graph,
    q: Operand,
    k: Operand,
    v: Operand,
    past: tuple[Value, Value],
    past_length: Operand,
    num_heads: int,
    *,
    rotation: tuple[Operand, Operand] | None = None,
    scale: float | None = None,
    name: str | None = None,
) -> tuple[Value, Value, Value]:
    """Attend causally to new tokens and those of a cache of a fixed length; return the result, new keys and values.

    The new keys and values are the past ones with those of the new tokens behind them. Given to a graph as inputs
    and outputs, they may be the same memory, which `DecodeLoop` makes use of. The operator is ONNX Runtime's
    GroupQueryAttention; devices without a kernel of it refuse the graph.

    Args:
        q: `(B, S, num_heads * D)`.
        k: `(B, S, H * D)`, where H heads are shared by `num_heads / H` heads of q each.
        v: `(B, S, H * D)`.
        past: keys and values `(B, H, longest, D)`, of which the first `past_length` tokens count.
        past_length: the number of tokens before, i32 `(B,)`, the same for every sequence.
        num_heads: the heads of q.
        rotation: tables `(longest, D / 2)` of cosines and sines, which rotate q and k by their positions.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        name: the name of the node.

    Raises:
        GraphVerifyError: the cache has another rank, or heads that are no multiple of 8, with a rotation of 16.
    """
    query, length = graph._as_value(q), graph._as_value(past_length)
    kind = past[0].type
    dims = list(kind.shape or ()) if isinstance(kind, TensorType) else []
    if len(dims) != 4 or not isinstance(dims[1], int):
        raise GraphVerifyError(f"cached_attention: past keys are (batch, heads, longest, head size), got {kind}")
    multiple = 8 if rotation is None else 16  # ONNX Runtime 1.31 checks this in a run only
    if isinstance(dims[3], int) and dims[3] % multiple:
        with_it = "" if rotation is None else " with a rotation"
        raise GraphVerifyError(
            f"cached_attention{with_it}: a head has a multiple of {multiple} elements, not {dims[3]}"
        )
    bounds = {"start": 1, "end": 2}
    (count,) = graph.add_node(
        OnnxNode("Shape", attributes=bounds, formal_inputs=1), [query], types=[TensorType(DType.I64, Shape([1]))]
    )
    new = count.cast("i32")
    last = length.cast("i32") + new - np.array([1], np.int32)
    total = graph._add(Gather(0), last + np.array([1], np.int32), np.array(0, np.int32))
    attributes = {"num_heads": num_heads, "kv_num_heads": dims[1], "do_rotary": int(rotation is not None)}
    op = OnnxNode(
        "GroupQueryAttention",
        "com.microsoft",
        1,
        attributes=attributes if scale is None else {**attributes, "scale": float(scale)},
        formal_inputs=7 if rotation is None else 9,
        output_count=3,
    )
    inputs = [query, *(graph._as_value(item, query) for item in (k, v)), *past, last, total]
    inputs += [graph._as_value(table, query) for table in rotation or ()]
    results = graph.add_node(
        op, inputs, name=name or "cached_attention", types=[query.type, past[0].type, past[1].type]
    )
    return results[0], results[1], results[2]
