"""Puts ONNX Runtime's fused MultiHeadAttention, RotaryEmbedding and GroupNorm in place of basic operators.

`attention_patterns`, `rope_patterns` and `norm_patterns` recognise them. ONNX Runtime itself fuses only the attention
of some older exporters when it opens a model. It fuses RMS norms that divide by the root of the mean; PyTorch's newer
exporter multiplies by its reciprocal, which becomes a division here. It fuses layer norms and activations by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx_ort.converters.attention_patterns import HEADS, Match, Matcher, Operand, operator_of, perm_of
from rlx_ort.converters.norm_patterns import GroupNorm, group_norm, over_root
from rlx_ort.converters.rope_patterns import Rotation, Rotations
from rlx_ort.converters.to_onnx.dispatch import KernelSet
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.elementwise import Cast
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType

_FUSED = ("com.microsoft", "MultiHeadAttention")
_NORM = ("com.microsoft", "GroupNorm")
_NHWC, _NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
_ROTARY = ("com.microsoft", "RotaryEmbedding")
_LOWEST = {DType.F16: -65504.0, DType.BF16: -3.3895314e38, DType.F32: -3.4028235e38}


def fuse(graph: Graph, kernels: KernelSet | None, weights: Mapping[str, TensorData]) -> tuple[Graph, Mapping[int, int]]:
    """Return the graph with fused nodes, and new id -> old id; the same graph where nothing fits.

    Names stay. A pattern is left alone if `kernels` has no kernel for it, and so are all without `kernels`.

    Args:
        graph: the graph, in the precision that it runs in; imported nodes are looked at, and no bodies.
        kernels: the kernels of the provider that the model is for.
        weights: the data of parameters, where it is known.
    """
    if kernels is None:
        return graph, {}
    matcher, origins = Matcher(graph, weights), dict[int, int]()
    find = Rotations(matcher).rotation
    rotations = {node.id: turn for node in graph.nodes if (turn := find(node)) and _can_rotate(kernels, turn)}
    if rotations:
        graph, origins = _Rewrite(graph, matcher, rotations, {}, {}).run()
        matcher = Matcher(graph, weights)
    attend = matcher.attention
    matches = {node.id: match for node in graph.nodes if (match := attend(node)) and _has_kernel(kernels, match)}
    norms = {norm.last.id: norm for node in graph.nodes if (norm := group_norm(matcher, node)) is not None}
    norms = {at: norm for at, norm in norms.items() if _has_norm(kernels, matcher.kind(norm.x))}
    quotients = {node.id: pair for node in graph.nodes if (pair := over_root(matcher, node)) is not None}
    if not matches and not norms and not quotients:
        return graph, origins
    made, sources = _Rewrite(graph, matcher, matches, norms, quotients).run()
    return made, {new: origins.get(old, old) for new, old in sources.items()}


def _has_kernel(kernels: KernelSet, match: Match) -> bool:
    kind = TensorType(match.q.kind.dtype)
    mask = [None, None, kind] if match.added else []
    return kernels.takes(*_FUSED, 1, [kind, kind, kind, *mask], [kind])


def _has_norm(kernels: KernelSet, kind: TensorType | None) -> bool:
    weight = TensorType(DType.F32)
    return kind is not None and kernels.takes(*_NORM, 1, [TensorType(kind.dtype), weight, weight], [kind])


def _can_rotate(kernels: KernelSet, match: Rotation) -> bool:
    kind = TensorType(match.x.kind.dtype)
    return kernels.takes(*_ROTARY, 1, [kind, TensorType(DType.I64), kind, kind], [kind])


@dataclass(slots=True)
class _Rewrite:
    """Writes a graph again, with fused nodes in place of the last nodes of each match."""

    old: Graph
    matcher: Matcher
    matches: Mapping[int, Match | Rotation]
    norms: Mapping[int, GroupNorm]
    quotients: Mapping[int, tuple[Ref, Ref]]
    new: Graph = field(init=False)
    values: dict[Ref, Value] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    masks: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    tables: dict[object, Value] = field(default_factory=dict)
    at: Node = field(init=False)

    def run(self) -> tuple[Graph, dict[int, int]]:
        self.new = Graph(self.old.name, metadata=dict(self.old.metadata), doc=self.old.doc)
        self.new.weights.update(self.old.weights)
        for node in self.old.nodes:
            start, self.at = len(self.new.nodes), node
            match = self.matches.get(node.id)
            if isinstance(match, Rotation):
                self.values[Ref(node.id)] = self._rotated(node, match)
            elif match is not None:
                self._fused(node, match)
            elif node.id in self.norms:
                self._norm(self.norms[node.id])
            elif Ref(node.id) not in self.values:  # a fused node gives it already
                op, refs = node.op, node.inputs
                if node.id in self.quotients and isinstance(op, OnnxNode):
                    op, refs = replace(op, op_type="Div"), self.quotients[node.id]
                inputs = [None if ref is None else self.values[ref] for ref in refs]
                made = self.new.add_node(op, inputs, name=node.name, types=node.types, output_names=node.output_names)
                self.values.update((Ref(node.id, place), value) for place, value in enumerate(made))
            self.origins.update(dict.fromkeys(range(start, len(self.new.nodes)), node.id))
        self.new.set_outputs([self.values[value.ref] for value in self.old.outputs], self.old.output_names)
        return self.new, self.origins

    def _fused(self, node: Node, match: Match) -> None:
        q, k, v = (self._joined(each, match.heads) for each in (match.q, match.k, match.v))
        dtype, heads = match.q.kind.dtype, match.heads
        size = match.v.size
        assert isinstance(size, int)  # noqa: S101  # asked before it matched
        mask = self._mask(match, q, k) if match.added else None
        batch, length = match.q.batch, match.q.length
        width = TensorType(dtype, Shape((batch, length, heads * size)))
        inputs = [q, k, v] if mask is None else [q, k, v, None, None, mask]
        causal = {"unidirectional": 1} if match.causal else {}
        joined = self._fuse(_FUSED, inputs, node.name, width, num_heads=heads, scale=match.scale, **causal)
        parted = self._op("Reshape", joined, self._ints(0, 0, heads, size), shape=(batch, length, heads, size))
        if match.guarded and mask is not None:
            sees = self.masks[mask.ref, "sees"]
            zero = self.new.constant(np.zeros((), np.float32), dtype)
            parted = self._op("Where", sees, parted, zero, shape=parted.shape)
        if len(self.matcher.shape(Ref(node.id))) == 3:  # Attention of (B, S, H * D)
            if match.guarded:
                joined = self._op("Reshape", parted, self._ints(0, 0, heads * size), shape=joined.shape)
            self.values[Ref(node.id)] = joined
            return
        turned = self._op("Transpose", parted, shape=tuple(parted.shape[at] for at in HEADS), perm=HEADS)
        self._give(node, match, parted, turned, None if match.guarded else joined)

    def _norm(self, norm: GroupNorm) -> None:
        """Write a norm in NHWC, between transpositions, which ONNX Runtime cancels against those of convolutions."""
        self.at = norm.node
        batch, channels, height, width = self.matcher.shape(norm.x)
        assert isinstance(channels, int)  # noqa: S101  # asked before it matched
        shape = (batch, height, width, channels)
        x = self._op("Transpose", self.values[norm.x], shape=shape, perm=_NHWC)
        gamma, beta = (self._by_channel(ref, channels, norm.groups) for ref in (norm.gamma, norm.beta))
        settings = {"channels_last": 1, "epsilon": norm.epsilon, "groups": norm.groups}
        activation = int(norm.last is not norm.node)
        y = self._fuse(_NORM, [x, gamma, beta], norm.last.name, x.type, activation=activation, **settings)
        result = Ref(norm.last.id)
        self.values[result] = self._op("Transpose", y, shape=self.matcher.shape(result) or None, perm=_NCHW)

    def _by_channel(self, ref: Ref, channels: int, groups: int) -> Value:
        """Return gamma or beta as `(C,)` of f32, the only dtype of CUDA's kernel; ONNX Runtime folds added nodes."""
        value, size = self._cast(self.values[ref], DType.F32), channels // groups
        shape = tuple(self.matcher.shape(ref))
        if shape == (channels,):
            return value
        if shape == (groups,):  # of opset 18
            value = self._op("Reshape", value, self._ints(groups, 1), shape=(groups, 1))
            value = self._op("Expand", value, self._ints(groups, size), shape=(groups, size))
        return self._op("Reshape", value, self._ints(channels), shape=(channels,))

    def _give(self, node: Node, match: Match, parted: Value, turned: Value, joined: Value | None) -> None:
        """Give the results to those that read the product, without nodes that only undo each other."""
        (batch, length), size = match.q[2:4], match.v.size
        own = [{size} for size in self.matcher.shape(Ref(node.id))]
        whole = [known | {size} for known, size in zip(own, (batch, match.heads, length, size), strict=True)]
        self.values[Ref(node.id)] = turned
        readers = list(self.matcher.users.get(Ref(node.id), ()))
        for each in readers:
            if self.matcher.gives(each, whole):  # a Reshape to the shape that it has, as in traced models
                self.values[Ref(each.id)] = turned
                readers += self.matcher.users.get(Ref(each.id), ())
            elif operator_of(each) == "Transpose" and perm_of(each) == HEADS:
                self.values[Ref(each.id)] = parted
                for last in self.matcher.users.get(Ref(each.id), ()):
                    if joined is not None and self.matcher.gives(last, [{batch}, {length}, {joined.shape[2]}]):
                        self.values[Ref(last.id)] = joined

    def _joined(self, operand: Operand, heads: int) -> Value:
        """Return q, k or v as `(B, S, H * D)`."""
        value, kind = self.values[operand.ref], operand.kind
        if kind.shape is not None and len(kind.shape) == 3:
            return value
        assert isinstance(operand.size, int)  # noqa: S101  # asked before it matched
        if operand.swapped:
            shape = (operand.batch, operand.length, heads, operand.size)
            value = self._op("Transpose", value, shape=shape, perm=HEADS)
        width = heads * operand.size
        return self._op("Reshape", value, self._ints(0, 0, width), shape=(operand.batch, operand.length, width))

    def _rotated(self, node: Node, match: Rotation) -> Value:
        """Return a rotated x as `(B, H, S, D)`; the heads stay joined until then where they were."""
        x, size = match.x, 2 * match.half
        heads = x.heads if isinstance(x.heads, int) and not x.swapped else 0
        value = self._joined(x, heads) if heads else self.values[match.whole]
        assert isinstance(value.type, TensorType)  # noqa: S101  # the matcher asked
        cos, sin = (self._table(ref, match) for ref in (match.cos, match.sin))
        inputs = [value, self._places(match), cos, sin]
        turned = self._fuse(_ROTARY, inputs, node.name, value.type, **({"num_heads": heads} if heads else {}))
        if not heads:
            return turned
        parted = self._op("Reshape", turned, self._ints(0, 0, heads, size), shape=(x.batch, x.length, heads, size))
        return self._op("Transpose", parted, shape=(x.batch, heads, x.length, size), perm=HEADS)

    def _table(self, ref: Ref, match: Rotation) -> Value:
        """Return half of the columns of cos or sin as `(S, D / 2)`, or `(B * S, D / 2)`, once for all layers."""
        dtype = match.x.kind.dtype
        if (ref, dtype) not in self.tables:
            shape = self.matcher.shape(ref)
            bounds = [self._ints(each) for each in (0, match.half, len(shape) - 1)]
            part = self._op("Slice", self.values[ref], *bounds, shape=(*shape[:-1], match.half))
            rows = (None if match.by_row else match.x.length, match.half)
            joined = self._op("Reshape", part, self._ints(-1, match.half), shape=rows)
            self.tables[ref, dtype] = self._cast(joined, dtype)
        return self.tables[ref, dtype]

    def _places(self, match: Rotation) -> Value:
        """Return the row of the tables for the first place of all sequences, or for each place of each."""
        key = match.cos if match.by_row else None
        if key not in self.tables:
            self.tables[key] = self._new_places(match) if match.by_row else self._ints(0)
        return self.tables[key]

    def _new_places(self, match: Rotation) -> Value:
        cos, rank = self.values[match.cos], len(self.matcher.shape(match.cos))
        batch, length = (
            self._op("Shape", cos, shape=(1,), dtype=DType.I64, start=at, end=at + 1) for at in (0, rank - 2)
        )
        zero, one = (self.new.constant(np.array(number, np.int64)) for number in (0, 1))
        count = self._op("Squeeze", self._op("Mul", batch, length, shape=(1,)), shape=())
        places = self._op("Range", zero, count, one, shape=(None,))
        sizes = self._op("Concat", batch, length, shape=(2,), axis=0)
        return self._op("Reshape", places, sizes, shape=(match.x.batch, match.x.length), allowzero=1)

    def _mask(self, match: Match, q: Value, k: Value) -> Value:
        """Return the term added to the scores as `(1 or B, 1 or H, S, T)`, once for all layers that share it."""
        lengths = (match.q.length, match.k.length)
        places = lengths if None not in lengths else (*lengths, q.ref, k.ref)
        key = (tuple(map(self.matcher.form, match.added)), places, match.q.kind.dtype, match.guarded)
        if key not in self.masks:
            self.masks[key] = self._new_mask(match, q, k)
        return self.masks[key]

    def _new_mask(self, match: Match, q: Value, k: Value) -> Value:
        dtype, lengths = match.q.kind.dtype, (match.q.length, match.k.length)
        mask = self.values[match.added[0]]
        if mask.dtype is DType.BOOL:
            seen, hidden = (self.new.constant(np.array(number, np.float32), dtype) for number in (0, -np.inf))
            mask = self._op("Where", mask, seen, hidden, shape=self.matcher.shape(match.added[0]))
        mask = self._cast(mask, dtype)
        for ref in match.added[1:]:
            other = self._cast(self.values[ref], dtype)
            mask = self._op("Add", mask, other, shape=None)
        raw, shape = mask, mask.type.shape if isinstance(mask.type, TensorType) else None
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
            lead = (None, None) if shape is None else (*(1,) * 4, *shape)[-4:-2]
            mask = self._op("Expand", mask, target, shape=(*lead, *lengths))
        if match.guarded:
            self.masks[mask.ref, "sees"] = self._sees(raw, shape)
        return mask

    def _sees(self, mask: Value, shape: Shape | None) -> Value:
        """Return which queries see a key, `(1 or B, 1 or S, 1 or H, 1)`; only minus infinity hides one."""
        if shape is None or len(shape) < 4:
            shape = Shape((None,) * 4 if shape is None else ((1,) * (4 - len(shape)) + tuple(shape)))
            mask = self._op("Expand", mask, self._ints(1, 1, 1, 1), shape=shape)
        batch, heads, length, _ = shape
        wide = self._cast(mask, DType.F32)  # CUDA compares no bf16
        never = self.new.constant(np.array(-np.inf, np.float32))
        seen = self._cast(self._op("Greater", wide, never, shape=shape, dtype=DType.BOOL), DType.F32)
        best = self._op("ReduceMax", seen, self._ints(3), shape=(batch, heads, length, 1), keepdims=1)
        return self._cast(self._op("Transpose", best, shape=(batch, length, heads, 1), perm=HEADS), DType.BOOL)

    def _cast(self, value: Value, dtype: DType) -> Value:
        if value.dtype is dtype:
            return value
        kind = value.type
        assert isinstance(kind, TensorType)  # noqa: S101  # the matcher asked
        return self.new.add_node(Cast(dtype), [value], types=[TensorType(dtype, kind.shape)])[0]

    def _ints(self, *numbers: int) -> Value:
        return self.new.constant(np.array(numbers, np.int64))

    def _fuse(
        self, fused: tuple[str, str], inputs: Sequence[Value | None], name: str, kind: ValueType, **attributes: Any
    ) -> Value:
        """Add a node of a domain and operator that stands for the last node of a match, whose name it gets."""
        domain, op_type = fused
        op = OnnxNode(op_type, domain, 1, attributes=attributes, formal_inputs=len(inputs))
        return self.new.add_node(op, inputs, name=name, types=[kind])[0]

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
