"""Recognises attention that exporters wrote in basic operators: `Softmax(q k^T * scale + mask) v`.

Between q, k and v and the products stand the nodes that part, transpose and join the heads. Weights of one element, and
those of bools, count as constants: they are scales and masks. What a graph leaves open does not match.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
_OLDEST = 18
"""The first opset that has the form in which the nodes around a fused one are written."""
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
    """Scores before the softmax: the product, the factor of it, and what is added afterwards."""

    product: Node
    scale: float
    added: tuple[Ref, ...] = ()


class Match(NamedTuple):
    """Attention that ends in a product by v; `guarded` if rows that see no key are zero, where a softmax gives NaN."""

    q: Operand
    k: Operand
    v: Operand
    heads: int
    scale: float
    added: tuple[Ref, ...]
    guarded: bool


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
        """Return the attention whose last product is a node, None if it is none."""
        if operator_of(node) != "MatMul" or not isinstance(node.op, OnnxNode) or node.op.version < _OLDEST:
            return None
        weights, guarded = self._softmax(node)
        scores = None if weights is None else self._scores(weights)
        if scores is None:
            return None
        q, left = self._scaled(scores.product.inputs[0])
        k, right = self._scaled(scores.product.inputs[1])
        query, value = self._operand(q), self._operand(node.inputs[1])
        key, inner = self._key(k)
        if query is None or key is None or value is None:
            return None
        heads = {each.heads for each in (query, key, value)}
        sizes = {query.size, key.size}
        batches = {each.batch for each in (query, key, value)}
        if None in heads | sizes | batches or max(map(len, (heads, sizes, batches))) > 1:
            return None
        dtypes = {each.kind.dtype for each in (query, key, value)}
        count = query.heads
        if not isinstance(count, int) or not isinstance(value.size, int) or len(dtypes) > 1:
            return None
        added = tuple(ref for ref in scores.added if not self._is_zero(ref))
        scale = scores.scale * left * right * inner
        return Match(query, key, value, count, scale, added, guarded and bool(added))

    def over_root(self, node: Node) -> tuple[Ref, Ref] | None:
        """Return x and a root for a product of x and the reciprocal of the root, as in RMS norms."""
        if operator_of(node) != "Mul":
            return None
        for x, other in (node.inputs, node.inputs[::-1]):
            inverse = self._maker(other)
            root = inverse.inputs[0] if inverse is not None and operator_of(inverse) == "Reciprocal" else None
            if x is not None and root is not None and operator_of(self._maker(root)) == "Sqrt":
                return x, root
        return None

    def _softmax(self, node: Node) -> tuple[Ref | None, bool]:
        """Return what the softmax reads whose result a product takes, and whether NaN in that result become zero."""
        ref = self._bare(node.inputs[0])
        maker = self._maker(ref)
        guarded = operator_of(maker) == "Where"
        passed = [ref]
        if guarded:
            assert maker is not None  # noqa: S101  # it has a name
            tested, zero, kept = (*maker.inputs, None, None)[:3]
            test = self._maker(tested)
            if operator_of(test) != "IsNaN" or test is None or self._number(zero) != 0:
                return None, False
            ref = self._bare(kept)
            if self._bare(test.inputs[0]) != ref:
                return None, False
            passed = [*passed, ref]
            maker = self._maker(ref)
        if maker is None or operator_of(maker) != "Softmax" or len(self.shape(ref)) != 4:
            return None, False
        if _integer(maker, "axis", -1) not in (-1, 3) or not all(self._is_inner(each) for each in passed):
            return None, False
        return maker.inputs[0], guarded

    def _is_inner(self, ref: Ref | None) -> bool:
        """Return whether only attention reads its weights: a model that also returns them has to compute them."""
        if ref is None or any(value.ref == ref for value in self.graph.outputs):
            return False
        return {operator_of(user) for user in self.users[ref]} <= {"Cast", "IsNaN", "MatMul", "Shape", "Where"}

    def _scores(self, ref: Ref | None) -> _Scores | None:
        ref = self._bare(ref)
        node, kind = self._maker(ref), self.kind(ref)
        if node is None or kind is None or kind.shape is None or len(kind.shape) != 4:
            return None
        if operator_of(node) == "MatMul":
            return _Scores(node, 1.0)
        if operator_of(node) == "Add":
            for one, other in (node.inputs, node.inputs[::-1]):
                found = self._scores(one)
                added = self.kind(other)
                if found is not None and other is not None and added is not None and added.shape is not None:
                    return found._replace(added=(*found.added, other)) if len(added.shape) <= 4 else None
            return None
        rest, factor = self._factor(node)
        found = None if rest is None else self._scores(rest)
        return None if found is None or found.added else found._replace(scale=found.scale * factor)

    def _factor(self, node: Node | None) -> tuple[Ref | None, float]:
        """Return the value that a node multiplies by a number, and the number; None if the node does something else."""
        if node is not None and operator_of(node) in ("Mul", "Div"):
            number = self._number(node.inputs[1])
            if number is not None and (number or operator_of(node) == "Mul"):
                return node.inputs[0], number if operator_of(node) == "Mul" else 1 / number
            number = self._number(node.inputs[0])
            if number is not None and operator_of(node) == "Mul":
                return node.inputs[1], number
        return None, 1.0

    def _scaled(self, ref: Ref | None) -> tuple[Ref | None, float]:
        """Return a value without the numbers it is multiplied by, and their product."""
        scale = 1.0
        ref = self._bare(ref)
        rest, factor = self._factor(self._maker(ref))
        while rest is not None:
            ref, scale = self._bare(rest), scale * factor
            rest, factor = self._factor(self._maker(ref))
        return ref, scale

    def _key(self, ref: Ref | None) -> tuple[Operand | None, float]:
        """Return the keys of transposed ones, `(B, H, D, T)`, and the number that they are multiplied by."""
        node = self._maker(ref)
        if operator_of(node) == "Transpose" and node is not None:
            if perm_of(node) == (0, 2, 3, 1):
                return self._parted(node.inputs[0]), 1.0
            if perm_of(node) == (0, 1, 3, 2):
                inner, scale = self._scaled(node.inputs[0])
                return self._operand(inner), scale
        # The exporter of torch 2.5 and later joins batch and heads for the transposition.
        swap = self._maker(node.inputs[0]) if operator_of(node) == "Reshape" and node is not None else None
        joined = self._maker(swap.inputs[0]) if operator_of(swap) == "Transpose" and swap is not None else None
        if node is None or swap is None or joined is None:
            return None, 1.0
        if operator_of(joined) != "Reshape" or perm_of(swap) != (0, 2, 1):
            return None, 1.0
        whole = joined.inputs[0]
        flat, parted = self._sizes(joined.inputs[1]), self._sizes(node.inputs[1])
        places = [self._place(whole, axis) for axis in range(4)]
        if whole is None or flat != [-1, *places[2:]] or parted != [*places[:2], places[3], places[2]]:
            return None, 1.0
        inner, scale = self._scaled(whole)
        return self._operand(inner), scale

    def _operand(self, ref: Ref | None) -> Operand | None:
        """Return q, k or v of a value `(B, H, S, D)`."""
        node = self._maker(ref)
        if operator_of(node) == "Transpose" and node is not None and perm_of(node) == HEADS:
            return self._parted(node.inputs[0])
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
        node = self._maker(ref)
        source = node.inputs[0] if node is not None and operator_of(node) == "Reshape" else None
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

    def _maker(self, ref: Ref | None) -> Node | None:
        return None if ref is None else self.graph.nodes[ref.node]

    def _bare(self, ref: Ref | None) -> Ref | None:
        """Return a value before its casts from one float type to another."""
        node = self._maker(ref)
        while ref is not None and node is not None and operator_of(node) == "Cast":
            kinds = (self.kind(node.inputs[0]), self.kind(ref))
            if not all(kind is not None and kind.dtype.is_float for kind in kinds):
                break
            ref = node.inputs[0]
            node = self._maker(ref)
        return ref

    def _data(self, ref: Ref | None) -> npt.NDArray[Any] | None:
        """Return the data of a constant, or of a weight that is one number or holds bools."""
        node = self._maker(self._bare(ref))
        if node is None:
            return None
        if isinstance(node.op, Constant):
            return node.op.data.numpy()
        data = self.weights.get(node.op.name) if isinstance(node.op, Param) else None
        if data is None or not (data.dtype is DType.BOOL or data.num_elements == 1):
            return None
        return data.numpy()

    def _number(self, ref: Ref | None) -> float | None:
        data = self._data(ref)
        return float(data.reshape(-1)[0]) if data is not None and data.size == 1 else None

    def form(self, ref: Ref) -> object:
        """Return what the masks of all layers have in common where each layer makes its own of the same bools."""
        node = self._maker(ref)
        if node is None or operator_of(node) != "Where":
            return ref
        numbers = tuple(self._number(each) for each in node.inputs[1:])
        return ref if None in numbers else (node.inputs[0], numbers, self.kind(ref))

    def _is_zero(self, ref: Ref | None) -> bool:
        """Return whether a mask adds zeros only, whatever the inputs are."""
        node = self._maker(self._bare(ref))
        if operator_of(node) == "Where" and node is not None:
            return self._is_true(node.inputs[0]) and self._is_zero(node.inputs[1])
        data = self._data(ref)
        return data is not None and not data.any()

    def _is_true(self, ref: Ref | None) -> bool:
        """Return whether bools are true, whatever the inputs are."""
        node, data = self._maker(ref), self._data(ref)
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
        node, data = self._maker(ref), self._data(ref)
        if data is not None:
            return data.dtype.kind in "iu" and bool((data >= 0).all())
        if node is not None and operator_of(node) == "Range":
            start, step = self._number(node.inputs[0]), self._number(node.inputs[2])
            return start is not None and step is not None and start >= 0 and step > 0
        if node is not None and operator_of(node) in _MOVES - {"Cast"}:
            return self._is_count(node.inputs[0])
        return node is not None and operator_of(node) == "Add" and all(map(self._is_count, node.inputs))

    def _place(self, ref: Ref | None, axis: int) -> _Size:
        shape = self.shape(ref)
        if ref is None or not shape:
            return None
        return (ref, axis) if shape[axis] is None else shape[axis]

    def gives(self, node: Node, wanted: Sequence[Collection[_Size]]) -> bool:
        """Return whether a node is a Reshape to a shape, of which each size is one of some."""
        sizes = self._sizes(node.inputs[1]) if operator_of(node) == "Reshape" else None
        if sizes is None or len(sizes) != len(wanted) or sizes.count(-1) > 1:
            return False
        return all(size == -1 or size in known for size, known in zip(sizes, wanted, strict=True))

    def _sizes(self, ref: Ref | None) -> list[_Size] | None:
        """Return the integers of a vector that is put together of constants and of sizes of values."""
        node, data = self._maker(ref), self._data(ref)
        if node is None or data is not None:
            return None if data is None or data.dtype.kind != "i" else data.reshape(-1).tolist()
        if operator_of(node) == "Shape":
            kind = self.kind(node.inputs[0])
            if kind is None or kind.shape is None:
                return None
            axes = range(len(kind.shape))[slice(_integer(node, "start", 0), _integer(node, "end", len(kind.shape)))]
            return [self._place(node.inputs[0], axis) for axis in axes]
        parts = [self._sizes(each) for each in node.inputs]
        first = parts[0] if parts else None
        if first is None or None in parts:
            return None
        known: Any = parts
        if operator_of(node) == "Concat":
            return [size for part in known for size in part]
        if operator_of(node) == "Slice" and len(known) < 5 and all(len(part) == 1 for part in known[1:3]):
            return first[slice(known[1][0], known[2][0])] if len(known) == 3 or known[3] == [0] else None
        if operator_of(node) == "Gather":
            return [first[at] for at in known[1]] if all(-len(first) <= at < len(first) for at in known[1]) else None
        return first if operator_of(node) in ("Unsqueeze", "Squeeze", "Identity") else None


def operator_of(node: Node | None) -> str:
    """Return the operator of an imported node, `Cast` for a cast of a precision too, and nothing for other nodes."""
    if node is None:
        return ""
    if isinstance(node.op, OnnxNode):
        return node.op.op_type if node.op.domain == "" and not node.op.overload else ""
    return "Cast" if isinstance(node.op, Cast) else ""


def _integer(node: Node, name: str, default: int) -> int:
    return node.op.integer(name, default) if isinstance(node.op, OnnxNode) else default


def perm_of(node: Node) -> tuple[Any, ...]:
    """Return the order of axes of a Transpose; nothing where it has the default."""
    given = node.op.attributes.get("perm", ()) if isinstance(node.op, OnnxNode) else ()
    return given if isinstance(given, tuple) else ()
