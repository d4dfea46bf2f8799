"""Recognises attention: `Softmax(q k^T * scale + mask) v` in basic operators, and ONNX's own `Attention`.

Between q, k and v and the products stand the nodes that part, transpose and join the heads. Weights of one element, and
those of bools, count as constants: they are scales and masks. What a graph leaves open does not match.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.elementwise import Cast
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, TensorType

HEADS = (0, 2, 1, 3)  # (B, S, H, D) to (B, H, S, D), and back
OLDEST = 18
"""The first opset that has the form in which the nodes around a fused one are written."""
_NEUTRAL = {"softcap": 0.0, "left_window_size": -1, "right_window_size": -1}
"""Attributes of `Attention` that MultiHeadAttention lacks -> the value with which they change nothing."""
_READ = frozenset({"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softmax_precision"})
_MOVES = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})

_Size: TypeAlias = "int | str | tuple[Ref, int] | None"
"""A size, the name of one, or the value and the axis that have one without a name."""


class Operand(NamedTuple):
    """q, k or v: a value whose axes are `(B, S, H * D)`, `(B, S, H, D)` or, if `swapped`, `(B, H, S, D)`."""

    ref: Ref
    kind: TensorType
    batch: Dim
    length: Dim
    heads: Dim
    size: Dim
    swapped: bool = False


class _Scores(NamedTuple):
    """Scores before the softmax: the product, its factor, and the term that is added afterwards."""

    product: Node
    scale: float
    added: tuple[Ref, ...] = ()


class Match(NamedTuple):
    """Attention; `guarded` if rows that see no key are zero, where a softmax gives NaN.

    `added` has the masks added to the scores; one of bools, which only `Attention` has, hides where it is false.
    If `causal`, a query sees no later key; then there are as many keys as queries, and no other mask.
    """

    q: Operand
    k: Operand
    v: Operand
    heads: int
    scale: float
    added: tuple[Ref, ...]
    guarded: bool
    causal: bool = False


@dataclass(slots=True)
class Matcher:
    """Recognises attention in a graph."""

    graph: Graph
    weights: Mapping[str, TensorData]
    users: dict[Ref, list[Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.users = {}
        for node in self.graph.nodes:
            for ref in node.inputs:
                if ref is not None:
                    self.users.setdefault(ref, []).append(node)

    def attention(self, node: Node) -> Match | None:
        """Return the attention that a node is or whose last product it is, None if it is neither."""
        if not isinstance(node.op, OnnxNode) or node.op.version < OLDEST:
            return None
        if operator_of(node) != "MatMul":
            return self._standard(node, node.op) if operator_of(node) == "Attention" else None
        weights, guarded = self._softmax(node)
        scores = self._scores(weights)
        if scores is None:
            return None
        q, left = self._scaled(scores.product.inputs[0])
        k, right = self._scaled(scores.product.inputs[1])
        query, value = self.operand(q), self.operand(node.inputs[1])
        key, inner = self._key(k)
        if query is None or key is None or value is None:
            return None
        heads = {each.heads for each in (query, key, value)}
        sizes = {query.size, key.size}
        batches = {each.batch for each in (query, key, value)}
        dtypes = {each.kind.dtype for each in (query, key, value)}
        count = query.heads
        if None in heads | sizes | batches or max(map(len, (heads, sizes, batches))) > 1 or len(dtypes) > 1:
            return None
        if not isinstance(count, int) or not isinstance(value.size, int):
            return None
        added = tuple(ref for ref in scores.added if not self._is_zero(ref))
        scale = scores.scale * left * right * inner
        return Match(query, key, value, count, scale, added, guarded and bool(added))

    def _standard(self, node: Node, op: OnnxNode) -> Match | None:
        """Return the attention of an `Attention` node, None where MultiHeadAttention may compute something else.

        Fewer heads of keys than of queries do not match: to repeat keys and values would copy both in each layer.
        """
        *given, mask = (*node.inputs, None)[:4]
        if any(value != _NEUTRAL.get(name) for name, value in op.attributes.items() if name not in _READ):
            return None
        if any(ref is not None for ref in node.inputs[4:]) or op.output_count > 1:
            return None
        if op.integer("softmax_precision", 1) != 1:  # f32, which the kernels have at least
            return None
        counts = [op.integer(name, 0) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
        query, key, value = (self._heads_of(ref, count) for ref, count in zip(given, counts, strict=True))
        if query is None or key is None or value is None:
            return None
        if not isinstance(query.size, int) or not isinstance(query.heads, int):
            return None
        ranks = {len(self.shape(ref)) for ref in (*given, Ref(node.id))}
        dtypes = {each.kind.dtype for each in (query, key, value)}
        heads = {each.heads for each in (query, key, value)}
        scale = op.attributes.get("scale", 1 / math.sqrt(query.size))
        if query.size != key.size or max(len(heads), len(ranks), len(dtypes)) > 1:
            return None
        if not dtypes <= {DType.F16, DType.BF16, DType.F32} or not isinstance(scale, float) or scale <= 0:
            return None
        if mask is not None and not self._covers(mask, query, key, op.version):
            return None
        added = () if mask is None or self._hides_nothing(mask) else (mask,)
        causal = op.integer("is_causal", 0) != 0
        if causal and (added or query.length is None or query.length != key.length):
            return None
        return Match(query, key, value, query.heads, scale, added, bool(added), causal)

    def _heads_of(self, ref: Ref | None, heads: int) -> Operand | None:
        """Return q, k or v of a value `(B, H, S, D)`, or `(B, S, H * D)` with a number of heads."""
        kind, shape = self.kind(ref), self.shape(ref)
        operand = self.operand(ref)
        if ref is not None and kind is not None and len(shape) == 3 and heads > 0:
            batch, length, width = shape
            if isinstance(width, int) and width % heads == 0:
                operand = Operand(ref, kind, batch, length, heads, width // heads)
        known = operand is not None and all(
            isinstance(each, int) and each > 0 for each in (operand.heads, operand.size)
        )
        return operand if known else None

    def _covers(self, mask: Ref, query: Operand, key: Operand, version: int) -> bool:
        """Return whether a mask has a place for each key, by broadcasting too: from opset 24 on the rest is hidden."""
        kind, shape = self.kind(mask), self.shape(mask)
        if kind is None or kind.dtype not in (DType.BOOL, query.kind.dtype) or not 2 <= len(shape) <= 4:
            return False
        return version < 24 or (key.length is not None and shape[-1] == key.length)

    def _hides_nothing(self, mask: Ref) -> bool:
        kind = self.kind(mask)
        return self._is_true(mask) if kind is not None and kind.dtype is DType.BOOL else self._is_zero(mask)

    def _softmax(self, node: Node) -> tuple[Ref | None, bool]:
        """Return what the softmax reads whose result a product takes, and whether NaN in that result become zero."""
        ref = self.bare(node.inputs[0])
        passed = [ref]
        guard = self.made(ref, "Where")
        if guard is not None:
            tested, zero, kept = (*guard.inputs, None, None)[:3]
            ref, test = self.bare(kept), self.made(tested, "IsNaN")
            if test is None or self.number(zero) != 0 or self.bare(test.inputs[0]) != ref:
                return None, False
            passed.append(ref)
        softmax = self.made(ref, "Softmax")
        if softmax is None or len(self.shape(ref)) != 4 or integer_of(softmax, "axis", -1) not in (-1, 3):
            return None, False
        return (softmax.inputs[0], guard is not None) if all(map(self._is_inner, passed)) else (None, False)

    def _is_inner(self, ref: Ref | None) -> bool:
        """Return whether only attention reads its weights: a model that also returns them has to compute them."""
        if ref is None or any(value.ref == ref for value in self.graph.outputs):
            return False
        return {operator_of(user) for user in self.users[ref]} <= {"Cast", "IsNaN", "MatMul", "Shape", "Where"}

    def _scores(self, ref: Ref | None) -> _Scores | None:
        ref = self.bare(ref)
        node = self.maker(ref)
        if node is None or len(self.shape(ref)) != 4:
            return None
        if operator_of(node) == "MatMul":
            return _Scores(node, 1.0)
        for one, other in operands(node, "Add"):
            scores, added = self._scores(one), self.kind(other)
            if scores is not None and added is not None and added.shape is not None:
                return scores._replace(added=(*scores.added, other)) if len(added.shape) <= 4 else None
        rest, factor = self._factor(node)
        scores = self._scores(rest)
        return None if scores is None or scores.added else scores._replace(scale=scores.scale * factor)

    def _factor(self, node: Node | None) -> tuple[Ref | None, float]:
        """Return the value that a node multiplies by a number, and the number; None if the node does something else."""
        for rest, other in operands(node, "Mul"):
            if (number := self.number(other)) is not None:
                return rest, number
        if node is not None and operator_of(node) == "Div" and (divisor := self.number(node.inputs[1])):
            return node.inputs[0], 1 / divisor
        return None, 1.0

    def _scaled(self, ref: Ref | None) -> tuple[Ref | None, float]:
        """Return a value without the numbers it is multiplied by, and their product."""
        rest, scale = ref, 1.0
        while rest is not None:
            ref = self.bare(rest)
            rest, factor = self._factor(self.maker(ref))
            scale *= factor
        return ref, scale

    def _key(self, ref: Ref | None) -> tuple[Operand | None, float]:
        """Return the keys of transposed ones, `(B, H, D, T)`, and the number that they are multiplied by."""
        if (parted := self._turned(ref, (0, 2, 3, 1))) is not None:
            return self._parted(parted), 1.0
        inner, scale = self._scaled(self._turned(ref, (0, 1, 3, 2)))
        return self.operand(inner), scale

    def swapped(self, node: Node) -> Ref | None:
        """Return the value whose last two axes a Reshape swaps, with all others joined for the transposition.

        PyTorch's exporter of 2.5 and later writes the keys of attention so.
        """
        swapped = self._turned(node.inputs[0], (0, 2, 1)) if operator_of(node) == "Reshape" else None
        joined = self.made(swapped, "Reshape")
        if joined is None:
            return None
        whole = joined.inputs[0]
        places = [self.place(whole, axis) for axis in range(len(self.shape(whole)))]
        if len(places) < 3 or self.sizes(joined.inputs[1]) != [-1, *places[-2:]]:
            return None
        return whole if self.sizes(node.inputs[1]) == [*places[:-2], places[-1], places[-2]] else None

    def operand(self, ref: Ref | None) -> Operand | None:
        """Return q, k or v of a value `(B, H, S, D)`."""
        if (parted := self._turned(ref, HEADS)) is not None:
            return self._parted(parted)
        kind = self.kind(ref)
        if ref is None or kind is None or kind.shape is None or len(kind.shape) != 4:
            return None
        batch, heads, length, size = kind.shape
        return Operand(ref, kind, batch, length, heads, size, swapped=True)

    def _parted(self, ref: Ref | None) -> Operand | None:
        """Return q, k or v of a value `(B, S, H, D)`."""
        kind = self.kind(ref)
        if ref is None or kind is None or kind.shape is None or len(kind.shape) != 4:
            return None
        batch, length, heads, size = kind.shape
        source = self.under(ref, "Reshape")
        before = self.kind(source)
        if source is not None and before is not None and len(self.shape(source)) == 3 and isinstance(size, int):
            *lead, width = self.shape(source)
            if lead == [batch, length] and None not in lead and isinstance(width, int):
                return Operand(source, before, batch, length, width // size, size)
        return Operand(ref, kind, batch, length, heads, size)

    def kind(self, ref: Ref | None) -> TensorType | None:
        """Return the type of a tensor."""
        kind = None if ref is None else self.graph.nodes[ref.node].types[ref.output]
        return kind if isinstance(kind, TensorType) else None

    def shape(self, ref: Ref | None) -> Sequence[Dim]:
        """Return the shape of a tensor, nothing if its rank is unknown."""
        kind = self.kind(ref)
        return () if kind is None or kind.shape is None else kind.shape

    def maker(self, ref: Ref | None) -> Node | None:
        """Return the node that gives a value."""
        return None if ref is None else self.graph.nodes[ref.node]

    def made(self, ref: Ref | None, *operators: str) -> Node | None:
        """Return the node that gives a value, None if it is of no operator of these."""
        node = self.maker(ref)
        return node if operator_of(node) in operators else None

    def under(self, ref: Ref | None, *operators: str) -> Ref | None:
        """Return the first input of the node that gives a value, None if it is of no operator of these."""
        node = self.made(ref, *operators)
        return None if node is None else node.inputs[0]

    def _turned(self, ref: Ref | None, perm: tuple[int, ...]) -> Ref | None:
        """Return the value that a Transpose in an order of axes makes this one of."""
        node = self.made(ref, "Transpose")
        return node.inputs[0] if node is not None and perm_of(node) == perm else None

    def bare(self, ref: Ref | None, *passed: str) -> Ref | None:
        """Return a value before its casts from one float type to another, and before nodes of operators `passed`."""
        while self._is_float(ref) and self._is_float(below := self.under(ref, "Cast", *passed)):
            ref = below
        return ref

    def _is_float(self, ref: Ref | None) -> bool:
        kind = self.kind(ref)
        return kind is not None and kind.dtype.is_float

    def _data(self, ref: Ref | None) -> npt.NDArray[Any] | None:
        """Return the data of a constant, or of a weight that is one number or holds bools."""
        node = self.maker(self.bare(ref))
        if node is None:
            return None
        if isinstance(node.op, Constant):
            return node.op.data.numpy()
        data = self.weights.get(node.op.name) if isinstance(node.op, Param) else None
        if data is None or not (data.dtype is DType.BOOL or data.num_elements == 1):
            return None
        return data.numpy()

    def number(self, ref: Ref | None) -> float | None:
        """Return a constant of one element, also one that traced models compute from the size of a head."""
        data, node, kind = self._data(ref), self.maker(self.bare(ref)), self.kind(ref)
        if data is not None:
            return float(data.reshape(-1)[0]) if data.size == 1 else None
        if node is None or kind is None or not kind.dtype.is_float or kind.shape is None or {*kind.shape} - {1}:
            return None
        if operator_of(node) == "Cast":
            sizes = self.sizes(node.inputs[0]) or [None]
            return float(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], int) else None
        if operator_of(node) not in ("Div", "Sqrt"):
            return None
        first, last = self.number(node.inputs[0]), self.number(node.inputs[-1])
        if first is None or last is None or last <= 0:
            return None
        return first / last if operator_of(node) == "Div" else math.sqrt(first)

    def form(self, ref: Ref) -> object:
        """Return the common part of the masks of all layers where each layer makes its own of the same bools."""
        node = self.maker(ref)
        if node is None or operator_of(node) != "Where":
            return ref
        numbers = tuple(self.number(each) for each in node.inputs[1:])
        return ref if None in numbers else (node.inputs[0], numbers, self.kind(ref))

    def _is_zero(self, ref: Ref | None) -> bool:
        """Return whether a mask adds zeros only, whatever the inputs are."""
        if (node := self.made(self.bare(ref), "Where")) is not None:
            return self._is_true(node.inputs[0]) and self._is_zero(node.inputs[1])
        data = self._data(ref)
        return data is not None and not data.any()

    def _is_true(self, ref: Ref | None) -> bool:
        """Return whether bools are true, whatever the inputs are."""
        node, data = self.maker(ref), self._data(ref)
        if data is not None and data.dtype == np.bool_:
            return bool(data.all())
        if node is None or not isinstance(node.op, OnnxNode):
            return False
        if operator_of(node) in _MOVES:
            kind = self.kind(node.inputs[0])
            return kind is not None and kind.dtype is DType.BOOL and self._is_true(node.inputs[0])
        if operator_of(node) == "And":
            return all(map(self._is_true, node.inputs))
        if operator_of(node) == "GreaterOrEqual":
            least = self._data(node.inputs[1])
            return least is not None and bool((least <= 0).all()) and self._is_count(node.inputs[0])
        value = node.op.attributes.get("value") if operator_of(node) == "ConstantOfShape" else None
        return isinstance(value, TensorData) and value.dtype is DType.BOOL and bool(value.numpy().all())

    def _is_count(self, ref: Ref | None) -> bool:
        """Return whether integers are places in a sequence, none of them below zero."""
        node, data = self.maker(ref), self._data(ref)
        if data is not None:
            return data.dtype.kind in "iu" and bool((data >= 0).all())
        if node is not None and operator_of(node) == "Range":
            start, step = self.number(node.inputs[0]), self.number(node.inputs[2])
            return start is not None and step is not None and start >= 0 and step > 0
        if node is not None and operator_of(node) in _MOVES - {"Cast"}:
            return self._is_count(node.inputs[0])
        return node is not None and operator_of(node) == "Add" and all(map(self._is_count, node.inputs))

    def place(self, ref: Ref | None, axis: int) -> _Size:
        """Return the size of an axis of a value."""
        shape = self.shape(ref)
        if ref is None or not shape:
            return None
        return (ref, axis) if shape[axis] is None else shape[axis]

    def gives(self, node: Node, wanted: Sequence[Collection[_Size]]) -> bool:
        """Return whether a node is a Reshape to a shape, of which each size is one of some."""
        sizes = self.sizes(node.inputs[1]) if operator_of(node) == "Reshape" else None
        if sizes is None or len(sizes) != len(wanted) or sizes.count(-1) > 1:
            return False
        return all(size == -1 or size in known for size, known in zip(sizes, wanted, strict=True))

    def sizes(self, ref: Ref | None) -> list[_Size] | None:
        """Return the integers of a vector that is put together of constants and of sizes of values."""
        node, data = self.maker(ref), self._data(ref)
        if node is None or data is not None:
            return None if data is None or data.dtype.kind != "i" else data.reshape(-1).tolist()
        if operator_of(node) == "Shape":
            kind = self.kind(node.inputs[0])
            if kind is None or kind.shape is None:
                return None
            axes = range(len(kind.shape))[slice(integer_of(node, "start", 0), integer_of(node, "end", len(kind.shape)))]
            return [self.place(node.inputs[0], axis) for axis in axes]
        if operator_of(node) not in ("Cast", "Concat", "Div", "Slice", "Gather", "Unsqueeze", "Squeeze", "Identity"):
            return None
        parts = [self.sizes(each) for each in node.inputs]
        first = parts[0] if parts else None
        if first is None or None in parts:
            return None
        known: Any = parts
        if operator_of(node) == "Concat":
            return [size for part in known for size in part]
        if operator_of(node) == "Slice" and len(known) < 5 and all(len(part) == 1 for part in known[1:3]):
            return first[slice(known[1][0], known[2][0])] if len(known) == 3 or known[3] == [0] else None
        if operator_of(node) == "Div":  # of the size of a head in half
            whole = all(len(part) == 1 and isinstance(part[0], int) and part[0] > 0 for part in known)
            return [known[0][0] // known[1][0]] if whole else None
        if operator_of(node) == "Cast":
            kinds = (self.kind(ref), self.kind(node.inputs[0]))
            return first if all(kind is not None and kind.dtype.is_integer for kind in kinds) else None
        if operator_of(node) == "Gather":
            return [first[at] for at in known[1]] if all(-len(first) <= at < len(first) for at in known[1]) else None
        return first if operator_of(node) != "Slice" else None


def operator_of(node: Node | None) -> str:
    """Return the operator of an imported node, `Cast` for a cast of a precision too, and nothing for other nodes."""
    if node is None:
        return ""
    if isinstance(node.op, OnnxNode):
        return node.op.op_type if node.op.domain == "" and not node.op.overload else ""
    return "Cast" if isinstance(node.op, Cast) else ""


def operands(node: Node | None, op_type: str) -> Iterator[tuple[Ref, Ref]]:
    """Yield the two operands of a node in both orders, nothing if it is of another operator."""
    if node is not None and operator_of(node) == op_type:
        one, other = node.inputs
        if one is not None and other is not None:
            yield from ((one, other), (other, one))


def integer_of(node: Node, name: str, default: int) -> int:
    """Return an attribute of an imported node that is an integer."""
    return node.op.integer(name, default) if isinstance(node.op, OnnxNode) else default


def perm_of(node: Node) -> tuple[Any, ...]:
    """Return the order of axes of a Transpose; nothing where it has the default."""
    given = node.op.attributes.get("perm", ()) if isinstance(node.op, OnnxNode) else ()
    return given if isinstance(given, tuple) else ()
