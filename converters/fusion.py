"""Puts attention that exporters wrote in basic operators into ONNX Runtime's fused MultiHeadAttention.

The exporters of PyTorch write `Softmax(q k^T * scale + mask) v` between the nodes that part and join the heads. ONNX
Runtime finds a few such forms itself when it opens a model, those of older exporters. Whatever a pattern leaves open
stays as it is. Weights of one element, and of bools, count as constants: they are scales and masks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.dispatch import KernelSet
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.elementwise import Cast
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, Shape, TensorType

_FUSED = ("com.microsoft", "MultiHeadAttention")
_OLDEST = 18
"""The first opset that has the form in which the nodes around a fused one are written."""
_HEADS = (0, 2, 1, 3)  # (B, S, H, D) to (B, H, S, D), and back
_MOVES = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})
_LOWEST = {DType.F16: -65504.0, DType.BF16: -3.3895314e38, DType.F32: -3.4028235e38}

_Size: TypeAlias = "int | str | tuple[Ref, int] | None"
"""A size, the name of one, or the value and the axis that have one without a name."""


class _Operand(NamedTuple):
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


class _Match(NamedTuple):
    """Attention that ends in a product by v; `guarded` if rows that see no key are zero, where a softmax gives NaN."""

    q: _Operand
    k: _Operand
    v: _Operand
    heads: int
    scale: float
    added: tuple[Ref, ...]
    guarded: bool


def fuse(graph: Graph, kernels: KernelSet | None, weights: Mapping[str, TensorData]) -> tuple[Graph, Mapping[int, int]]:
    """Return the graph with fused attention, and new id -> old id; the same graph where nothing fits.

    Names stay. A pattern is left alone if `kernels` has no kernel for it, and so are all without `kernels`.

    Args:
        graph: the graph, in the precision that it runs in; imported nodes are looked at, and no bodies.
        kernels: the kernels of the provider that the model is for.
        weights: the data of parameters, where it is known.
    """
    if kernels is None:
        return graph, {}
    found = _Matcher(graph, weights)
    matches = {node.id: match for node in graph.nodes if (match := found.attention(node)) is not None}
    matches = {at: match for at, match in matches.items() if _has_kernel(kernels, match)}
    return _Rewrite(graph, found, matches).run() if matches else (graph, {})


def _has_kernel(kernels: KernelSet, match: _Match) -> bool:
    kinds = [TensorType(each.kind.dtype) for each in (match.q, match.k, match.v)]
    mask = [None, None, kinds[0]] if match.added else []
    return kernels.takes(*_FUSED, 1, [*kinds, *mask], kinds[:1])


@dataclass(slots=True)
class _Matcher:
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

    def attention(self, node: Node) -> _Match | None:
        """Return the attention whose last product is a node, None if it is none."""
        if _name(node) != "MatMul" or not isinstance(node.op, OnnxNode) or node.op.version < _OLDEST:
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
        return _Match(query, key, value, count, scale, added, guarded and bool(added))

    def _softmax(self, node: Node) -> tuple[Ref | None, bool]:
        """Return what the softmax reads whose result a product takes, and whether NaN in that result become zero."""
        ref = self._bare(node.inputs[0])
        maker = self._maker(ref)
        guarded = _name(maker) == "Where"
        passed = [ref]
        if guarded:
            assert maker is not None  # noqa: S101  # it has a name
            tested, zero, kept = (*maker.inputs, None, None)[:3]
            test = self._maker(tested)
            if _name(test) != "IsNaN" or test is None or self._number(zero) != 0:
                return None, False
            ref = self._bare(kept)
            if self._bare(test.inputs[0]) != ref:
                return None, False
            passed = [*passed, ref]
            maker = self._maker(ref)
        kind = self.kind(ref)
        if _name(maker) != "Softmax" or maker is None or kind is None or kind.shape is None or len(kind.shape) != 4:
            return None, False
        if _integer(maker, "axis", -1) not in (-1, 3) or not all(self._is_inner(each) for each in passed):
            return None, False
        return maker.inputs[0], guarded

    def _is_inner(self, ref: Ref | None) -> bool:
        """Return whether only attention reads its weights: a model that also returns them has to compute them."""
        if ref is None or any(value.ref == ref for value in self.graph.outputs):
            return False
        return {_name(user) for user in self.users[ref]} <= {"Cast", "IsNaN", "MatMul", "Shape", "Where"}

    def _scores(self, ref: Ref | None) -> _Scores | None:
        ref = self._bare(ref)
        node, kind = self._maker(ref), self.kind(ref)
        if node is None or kind is None or kind.shape is None or len(kind.shape) != 4:
            return None
        if _name(node) == "MatMul":
            return _Scores(node, 1.0)
        if _name(node) == "Add":
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
        if node is not None and _name(node) in ("Mul", "Div"):
            number = self._number(node.inputs[1])
            if number is not None and (number or _name(node) == "Mul"):
                return node.inputs[0], number if _name(node) == "Mul" else 1 / number
            number = self._number(node.inputs[0])
            if number is not None and _name(node) == "Mul":
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

    def _key(self, ref: Ref | None) -> tuple[_Operand | None, float]:
        """Return the keys of transposed ones, `(B, H, D, T)`, and the number that they are multiplied by."""
        node = self._maker(ref)
        if _name(node) == "Transpose" and node is not None:
            if _perm(node) == (0, 2, 3, 1):
                return self._parted(node.inputs[0]), 1.0
            if _perm(node) == (0, 1, 3, 2):
                inner, scale = self._scaled(node.inputs[0])
                return self._operand(inner), scale
        # The exporter of torch 2.5 and later joins batch and heads for the transposition.
        swap = self._maker(node.inputs[0]) if _name(node) == "Reshape" and node is not None else None
        joined = self._maker(swap.inputs[0]) if _name(swap) == "Transpose" and swap is not None else None
        if node is None or swap is None or joined is None or _name(joined) != "Reshape" or _perm(swap) != (0, 2, 1):
            return None, 1.0
        whole = joined.inputs[0]
        flat, parted = self._sizes(joined.inputs[1]), self._sizes(node.inputs[1])
        places = [self._place(whole, axis) for axis in range(4)]
        if whole is None or flat != [-1, *places[2:]] or parted != [*places[:2], places[3], places[2]]:
            return None, 1.0
        inner, scale = self._scaled(whole)
        return self._operand(inner), scale

    def _operand(self, ref: Ref | None) -> _Operand | None:
        """Return q, k or v of a value `(B, H, S, D)`."""
        node = self._maker(ref)
        if _name(node) == "Transpose" and node is not None and _perm(node) == _HEADS:
            return self._parted(node.inputs[0])
        kind = self.kind(ref)
        if ref is None or kind is None or kind.shape is None or len(kind.shape) != 4:
            return None
        batch, heads, length, size = kind.shape
        return _Operand(ref, kind, batch, length, heads, size, swapped=True)

    def _parted(self, ref: Ref | None) -> _Operand | None:
        """Return q, k or v of a value `(B, S, H, D)`."""
        kind = self.kind(ref)
        if ref is None or kind is None or kind.shape is None or len(kind.shape) != 4:
            return None
        batch, length, heads, size = kind.shape
        node = self._maker(ref)
        source = node.inputs[0] if node is not None and _name(node) == "Reshape" else None
        before = self.kind(source)
        if source is not None and before is not None and len(self.shape(source)) == 3 and isinstance(size, int):
            *lead, width = self.shape(source)
            if lead == [batch, length] and None not in lead and isinstance(width, int):
                return _Operand(source, before, batch, length, width // size, size)
        return _Operand(ref, kind, batch, length, heads, size)

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
        while ref is not None and node is not None and _name(node) == "Cast":
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
        if node is None or _name(node) != "Where":
            return ref
        numbers = tuple(self._number(each) for each in node.inputs[1:])
        return ref if None in numbers else (node.inputs[0], numbers, self.kind(ref))

    def _is_zero(self, ref: Ref | None) -> bool:
        """Return whether a mask adds zeros only, whatever the inputs are."""
        node = self._maker(self._bare(ref))
        if _name(node) == "Where" and node is not None:
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
        if _name(node) in _MOVES:
            kind = self.kind(node.inputs[0])
            return kind is not None and kind.dtype is DType.BOOL and self._is_true(node.inputs[0])
        if _name(node) == "And":
            return all(map(self._is_true, node.inputs))
        if _name(node) == "GreaterOrEqual":
            least = self._data(node.inputs[1])
            return least is not None and bool((least <= 0).all()) and self._is_count(node.inputs[0])
        filling = node.op.attributes.get("value")
        return _name(node) == "ConstantOfShape" and isinstance(filling, TensorData) and bool(filling.numpy().all())

    def _is_count(self, ref: Ref | None) -> bool:
        """Return whether integers are places in a sequence, none of them below zero."""
        node, data = self._maker(ref), self._data(ref)
        if data is not None:
            return data.dtype.kind in "iu" and bool((data >= 0).all())
        if node is not None and _name(node) == "Range":
            start, step = self._number(node.inputs[0]), self._number(node.inputs[2])
            return start is not None and step is not None and start >= 0 and step > 0
        if node is not None and _name(node) in _MOVES - {"Cast"}:
            return self._is_count(node.inputs[0])
        return node is not None and _name(node) == "Add" and all(map(self._is_count, node.inputs))

    def _place(self, ref: Ref | None, axis: int) -> _Size:
        shape = self.shape(ref)
        if ref is None or not shape:
            return None
        return (ref, axis) if shape[axis] is None else shape[axis]

    def gives(self, node: Node, wanted: Sequence[Collection[_Size]]) -> bool:
        """Return whether a node is a Reshape to a shape, of which each size is one of some."""
        sizes = self._sizes(node.inputs[1]) if _name(node) == "Reshape" else None
        if sizes is None or len(sizes) != len(wanted) or sizes.count(-1) > 1:
            return False
        return all(size == -1 or size in known for size, known in zip(sizes, wanted, strict=True))

    def _sizes(self, ref: Ref | None) -> list[_Size] | None:
        """Return the integers of a vector that is put together of constants and of sizes of values."""
        node, data = self._maker(ref), self._data(ref)
        if node is None or data is not None:
            return None if data is None or data.dtype.kind != "i" else data.reshape(-1).tolist()
        if _name(node) == "Shape":
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
        if _name(node) == "Concat":
            return [size for part in known for size in part]
        if _name(node) == "Slice" and len(known) < 5 and all(len(part) == 1 for part in known[1:3]):
            return first[slice(known[1][0], known[2][0])] if len(known) == 3 or known[3] == [0] else None
        if _name(node) == "Gather":
            return [first[at] for at in known[1]] if all(-len(first) <= at < len(first) for at in known[1]) else None
        return first if _name(node) in ("Unsqueeze", "Squeeze", "Identity") else None


@dataclass(slots=True)
class _Rewrite:
    """Writes a graph again, with fused nodes in place of the last products of what was matched."""

    old: Graph
    found: _Matcher
    matches: Mapping[int, _Match]
    new: Graph = field(init=False)
    values: dict[Ref, Value] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    masks: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    at: Node = field(init=False)

    def run(self) -> tuple[Graph, Mapping[int, int]]:
        self.new = Graph(self.old.name, metadata=dict(self.old.metadata), doc=self.old.doc)
        self.new.weights.update(self.old.weights)
        for node in self.old.nodes:
            start, self.at = len(self.new.nodes), node
            match = self.matches.get(node.id)
            if match is not None:
                self._fused(node, match)
            elif Ref(node.id) not in self.values:  # a fused node gives it already
                inputs = [None if ref is None else self.values[ref] for ref in node.inputs]
                made = self.new.add_node(
                    node.op, inputs, name=node.name, types=node.types, output_names=node.output_names
                )
                self.values.update((Ref(node.id, place), value) for place, value in enumerate(made))
            self.origins.update(dict.fromkeys(range(start, len(self.new.nodes)), node.id))
        self.new.set_outputs([self.values[value.ref] for value in self.old.outputs], self.old.output_names)
        return self.new, self.origins

    def _fused(self, node: Node, match: _Match) -> None:
        q, k, v = (self._joined(each, match.heads) for each in (match.q, match.k, match.v))
        dtype, heads = match.q.kind.dtype, match.heads
        size = match.v.size
        assert isinstance(size, int)  # noqa: S101  # asked before it matched
        mask = self._mask(match, q, k) if match.added else None
        width = TensorType(dtype, Shape((match.q.batch, match.q.length, heads * size)))
        op = OnnxNode(
            _FUSED[1],
            _FUSED[0],
            1,
            attributes={"num_heads": heads, "scale": match.scale},
            formal_inputs=3 if mask is None else 6,
        )
        inputs = [q, k, v] if mask is None else [q, k, v, None, None, mask]
        (joined,) = self.new.add_node(op, inputs, name=node.name, types=[width])
        parted = self._op("Reshape", joined, self._ints(0, 0, heads, size), shape=(*width.shape[:2], heads, size))
        if match.guarded and mask is not None:
            sees = self._sees(mask, dtype)
            zero = self.new.constant(np.zeros((), np.float32), dtype)
            parted = self._op("Where", sees, parted, zero, shape=parted.shape)
        turned = self._op("Transpose", parted, shape=tuple(parted.shape[at] for at in _HEADS), perm=_HEADS)
        self._give(node, match, parted, turned, None if match.guarded else joined)

    def _give(self, node: Node, match: _Match, parted: Value, turned: Value, joined: Value | None) -> None:
        """Give the results to those that read the product, without nodes that only undo each other."""
        (batch, length), size = match.q[2:4], match.v.size
        own = [{size} for size in self.found.shape(Ref(node.id))]
        whole = [known | {size} for known, size in zip(own, (batch, match.heads, length, size), strict=True)]
        self.values[Ref(node.id)] = turned
        readers = list(self.found.users.get(Ref(node.id), ()))
        for each in readers:
            if self.found.gives(each, whole):  # a Reshape to the shape that it has, as in traced models
                self.values[Ref(each.id)] = turned
                readers += self.found.users.get(Ref(each.id), ())
            elif _name(each) == "Transpose" and _perm(each) == _HEADS:
                self.values[Ref(each.id)] = parted
                for last in self.found.users.get(Ref(each.id), ()):
                    if joined is not None and self.found.gives(last, [{batch}, {length}, {joined.shape[2]}]):
                        self.values[Ref(last.id)] = joined

    def _joined(self, operand: _Operand, heads: int) -> Value:
        """Return q, k or v as `(B, S, H * D)`."""
        value, kind = self.values[operand.ref], operand.kind
        if kind.shape is not None and len(kind.shape) == 3:
            return value
        assert isinstance(operand.size, int)  # noqa: S101  # asked before it matched
        if operand.swapped:
            shape = (operand.batch, operand.length, heads, operand.size)
            value = self._op("Transpose", value, shape=shape, perm=_HEADS)
        width = heads * operand.size
        return self._op("Reshape", value, self._ints(0, 0, width), shape=(operand.batch, operand.length, width))

    def _mask(self, match: _Match, q: Value, k: Value) -> Value:
        """Return what is added to the scores as `(1 or B, 1 or H, S, T)`, once for all layers that share it."""
        lengths = (match.q.length, match.k.length)
        places = lengths if None not in lengths else (*lengths, q.ref, k.ref)
        key = (tuple(map(self.found.form, match.added)), places, match.q.kind.dtype, match.guarded)
        if key not in self.masks:
            self.masks[key] = self._new_mask(match, q, k)
        return self.masks[key]

    def _new_mask(self, match: _Match, q: Value, k: Value) -> Value:
        dtype, lengths = match.q.kind.dtype, (match.q.length, match.k.length)
        mask = self._cast(self.values[match.added[0]], dtype)
        for ref in match.added[1:]:
            other = self._cast(self.values[ref], dtype)
            mask = self._op("Add", mask, other, shape=None)
        shape = mask.type.shape if isinstance(mask.type, TensorType) else None
        if match.guarded:  # not minus infinity, from which kernels make NaN
            lowest = self.new.constant(np.array(_LOWEST[dtype], np.float32), dtype)
            mask = self._op("Max", mask, lowest, shape=shape)
        fits = shape is not None and len(shape) == 4 and tuple(shape[2:]) == lengths and None not in lengths
        if not fits:
            sizes = [
                self._ints(length)
                if isinstance(length, int)
                else self._op("Shape", value, shape=(1,), dtype=DType.I64, start=1, end=2)
                for length, value in zip(lengths, (q, k), strict=True)
            ]
            target = self._op("Concat", self._ints(1, 1), *sizes, shape=(4,), axis=0)
            lead = tuple(shape[:2]) if shape is not None and len(shape) == 4 else (None, None)
            mask = self._op("Expand", mask, target, shape=(*lead, *lengths))
        return mask

    def _sees(self, mask: Value, dtype: DType) -> Value:
        """Return which queries see a key, `(1 or B, S, 1 or H, 1)`."""
        key = (mask.ref, "sees")
        if key not in self.masks:
            batch, heads, length, _ = mask.shape
            best = self._op("ReduceMax", mask, self._ints(3), shape=(batch, heads, length, 1), keepdims=1)
            best = self._op("Transpose", best, shape=(batch, length, heads, 1), perm=_HEADS)
            lowest = self.new.constant(np.array(_LOWEST[dtype], np.float32), dtype)
            self.masks[key] = self._op("Greater", best, lowest, shape=best.shape, dtype=DType.BOOL)
        return self.masks[key]

    def _cast(self, value: Value, dtype: DType) -> Value:
        if value.dtype is dtype:
            return value
        kind = value.type
        assert isinstance(kind, TensorType)  # noqa: S101  # the matcher asked
        return self.new.add_node(Cast(dtype), [value], types=[TensorType(dtype, kind.shape)])[0]

    def _ints(self, *numbers: int) -> Value:
        return self.new.constant(np.array(numbers, np.int64))

    def _op(
        self,
        op_type: str,
        *inputs: Value,
        shape: Sequence[Dim] | None,
        dtype: DType | None = None,
        **attributes: Any,
    ) -> Value:
        """Add a node of the opset of the one that is fused; without a dtype it gives that of its first input."""
        assert isinstance(self.at.op, OnnxNode)  # noqa: S101  # only such nodes match
        dtype = dtype or inputs[1 if op_type == "Where" else 0].dtype
        kind = TensorType(dtype, None if shape is None else Shape(shape))
        op = OnnxNode(op_type, "", self.at.op.version, attributes=attributes, formal_inputs=len(inputs))
        (value,) = self.new.add_node(op, inputs, name=f"{self.at.name}/{op_type}", types=[kind])
        return value


def _name(node: Node | None) -> str:
    """Return the operator of an imported node, `Cast` for a cast of a precision too, and nothing for other nodes."""
    if node is None:
        return ""
    if isinstance(node.op, OnnxNode):
        return node.op.op_type if node.op.domain == "" and not node.op.overload else ""
    return "Cast" if isinstance(node.op, Cast) else ""


def _integer(node: Node, name: str, default: int) -> int:
    return node.op.integer(name, default) if isinstance(node.op, OnnxNode) else default


def _perm(node: Node) -> tuple[Any, ...]:
    given = node.op.attributes.get("perm", ()) if isinstance(node.op, OnnxNode) else ()
    return given if isinstance(given, tuple) else ()
