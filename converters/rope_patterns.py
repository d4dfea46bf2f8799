"""Recognises rotary embeddings in basic operators: `x * cos + Concat(-x[..., D/2:], x[..., :D/2]) * sin`.

So write PyTorch's exporters what transformers has for the family of Llama. The fused operator takes one half of the
columns of cos and sin, so that both halves have to be the same computation. What a graph leaves open does not match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlx_ort.converters.attention_patterns import OLDEST, Matcher, Operand, integer_of, operands, operator_of
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.types import Dim

_KEEPING = frozenset({"Cos", "Sin", "Cast", "Identity", "Neg", "Squeeze", "Unsqueeze"})
"""Operators that do the same to both halves of the last axis, or would change its size."""


class Rotation(NamedTuple):
    """A rotary embedding of `whole`, `(B, H, S, 2 * half)`, which is `x` before its heads were parted.

    `cos` and `sin` are `(..., S, 2 * half)` in any float type, for each sequence of x if `by_row` and for all if not.
    """

    whole: Ref
    x: Operand
    cos: Ref
    sin: Ref
    half: int
    by_row: bool


@dataclass(slots=True)
class Rotations:
    """Recognises rotary embeddings in the graph of a matcher."""

    matcher: Matcher
    names: dict[str, Dim] = field(init=False)

    def __post_init__(self) -> None:
        """Find sizes that traced models name twice: that of `Range(0, n)`, where n is a size of a value."""
        self.names = {}
        for node in self.matcher.graph.nodes:
            (name, *more) = (*self.matcher.shape(Ref(node.id)), None)[:2]
            if operator_of(node) != "Range" or not isinstance(name, str) or any(more):
                continue
            start, limit, step = node.inputs
            sizes = self.matcher.sizes(limit)
            if self.matcher.number(start) == 0 and self.matcher.number(step) == 1 and sizes and len(sizes) == 1:
                self.names[name] = sizes[0] if isinstance(sizes[0], (int, str)) else name

    def rotation(self, node: Node) -> Rotation | None:
        """Return the rotary embedding whose sum a node is, None if it is none."""
        if not isinstance(node.op, OnnxNode) or node.op.version < OLDEST:
            return None
        for one, other in operands(node, "Add"):
            for turned, sin in operands(self.matcher.maker(other), "Mul"):
                x = self._unturned(turned)
                for straight, cos in operands(self.matcher.maker(one), "Mul"):
                    if x is not None and self._plain(straight) == x and (match := self._match(x, cos, sin)) is not None:
                        return match
        return None

    def _match(self, x: Ref, cos: Ref, sin: Ref) -> Rotation | None:
        """Return the rotation of `(B, H, S, D)` by cos and sin `(1 or B, 1, S, D)`."""
        kind, operand, shape = self.matcher.kind(x), self.matcher.operand(x), self._shape(x)
        if kind is None or kind.dtype not in (DType.F16, DType.BF16, DType.F32) or operand is None or len(shape) != 4:
            return None
        batch, _, length, size = shape
        table, other = ((1,) * (4 - len(each)) + tuple(each) for each in (self._shape(cos), self._shape(sin)))
        if not isinstance(size, int) or size % 2 or None in (batch, length):
            return None
        if table != other or table not in ((1, 1, length, size), (batch, 1, length, size)):
            return None
        if not self._is_doubled(cos, size) or not self._is_doubled(sin, size):
            return None
        cos, sin = (self.matcher.bare(each, "Identity", "Unsqueeze") or each for each in (cos, sin))
        return Rotation(x, operand, cos, sin, size // 2, by_row=table[0] != 1)

    def _shape(self, ref: Ref) -> Sequence[Dim]:
        return [self.names.get(size, size) if isinstance(size, str) else size for size in self.matcher.shape(ref)]

    def _unturned(self, ref: Ref) -> Ref | None:
        """Return x of `Concat(-x[..., D/2:], x[..., :D/2])`."""
        node = self.matcher.made(ref, "Concat")
        if node is None or len(node.inputs) != 2:
            return None
        negated, first = node.inputs
        low, high = self._part(first), self._part(self.matcher.under(negated, "Neg"))
        if low is None or high is None or low[0] != high[0]:
            return None
        x, size = self._plain(low[0]), self.matcher.shape(low[0])[-1]
        if not isinstance(size, int) or integer_of(node, "axis", 0) not in (-1, len(self.matcher.shape(x)) - 1):
            return None
        return x if (low[1:], high[1:]) == ((0, size // 2), (size // 2, size)) else None

    def _part(self, ref: Ref | None) -> tuple[Ref, int, int] | None:
        """Return a value, and the start and the end of a part of its last axis."""
        node = self.matcher.maker(ref)
        source = node.inputs[0] if node is not None and node.inputs else None
        shape = self.matcher.shape(source)
        if node is None or ref is None or source is None or not shape or not isinstance(shape[-1], int):
            return None
        last, size = (-1, len(shape) - 1), shape[-1]
        if operator_of(node) == "Split" and integer_of(node, "axis", 0) in last:
            widths = [self.matcher.shape(Ref(node.id, at))[-1:] for at in range(ref.output + 1)]
            known = [width[0] for width in widths if width and isinstance(width[0], int)]
            return (source, sum(known[:-1]), sum(known)) if len(known) == len(widths) else None
        if operator_of(node) != "Slice" or len(node.inputs) < 4:
            return None
        bounds = [self.matcher.sizes(each) for each in node.inputs[1:]]
        start, end, axis, step = [each[0] if each and len(each) == 1 else None for each in (*bounds, [1])[:4]]
        if axis not in last or step != 1 or not isinstance(start, int) or not isinstance(end, int):
            return None
        return source, *slice(start, end).indices(size)[:2]

    def _is_doubled(self, ref: Ref | None, size: int) -> bool:
        """Return whether the second half of the last axis, of a size, is the same computation as the first half."""
        node, shape = self.matcher.maker(ref), self.matcher.shape(ref)
        if node is None or not shape or shape[-1] != size:
            return False
        if operator_of(node) == "Concat":
            twice = len(node.inputs) == 2 and len({*node.inputs}) == 1
            return twice and integer_of(node, "axis", 0) in (-1, len(shape) - 1)
        if operator_of(node) in ("Mul", "Div"):
            first, second = node.inputs
            if self.matcher.number(second) is not None:
                return self._is_doubled(first, size)
            return self.matcher.number(first) is not None and self._is_doubled(second, size)
        return operator_of(node) in _KEEPING and self._is_doubled(node.inputs[0], size)

    def _plain(self, ref: Ref) -> Ref:
        """Return a value before casts that lose nothing and end in its own type."""
        own, inner = self.matcher.kind(ref), self.matcher.under(ref, "Cast")
        while inner is not None and own is not None:
            kind = self.matcher.kind(inner)
            if kind is None or kind.dtype not in (own.dtype, DType.F32):
                break
            ref = inner if kind.dtype is own.dtype else ref
            inner = self.matcher.under(inner, "Cast")
        return ref
