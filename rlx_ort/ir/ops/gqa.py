"""Attention in which several query heads share a head of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.infer import expect_rank
from rlx_ort.ir.op import tensor_input
from rlx_ort.ir.ops.attention import Attention, head_layout
from rlx_ort.ir.ops.composite import Composite
from rlx_ort.ir.shape import Dim
from rlx_ort.ir.types import TensorType

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["GroupedQueryAttention"]


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention(Composite):
    """Attention in which `num_heads / num_kv_heads` query heads share a head of k and v.

    Layouts and masks are those of `Attention`, with `num_kv_heads` heads in k and v. Without a mask, with a `custom`
    one, and for one query under `causal`, query heads that share keys are folded into the query length, so k and v
    are not copied; else they are repeated.

    Attributes:
        num_heads: heads of q.
        num_kv_heads: heads of k and v, a divisor of `num_heads`.
        head_dim: size of a head.
        mask_kind: as in `Attention`.
        window: as in `Attention`.
        scale: as in `Attention`.
        softcap: as in `Attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask_kind: str = "none"
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    arity = (3, 4)

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise GraphVerifyError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} heads of k and v")
        object.__setattr__(self, "mask_kind", self._attention(self.num_heads).mask_kind)

    def _attention(self, heads: int, mask_kind: str | None = None) -> Attention:
        kind = self.mask_kind if mask_kind is None else mask_kind
        return Attention(heads, self.head_dim, kind, self.window, self.scale, self.softcap)

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write one attention over folded queries, or over repeated keys and values."""
        q, k, v, *mask = values
        layouts = [
            head_layout(self, expect_rank(self, self._tensor(value), (2, 3, 4), name), heads, self.head_dim, name)
            for value, heads, name in zip(
                (q, k, v), (self.num_heads, self.num_kv_heads, self.num_kv_heads), "qkv", strict=True
            )
        ]
        if self.num_heads == self.num_kv_heads:
            return graph.append(self._attention(self.num_heads), q, k, v, *mask)
        split = [
            self._heads_first(graph, value, layout.heads_first)
            for value, layout in zip((q, k, v), layouts, strict=True)
        ]
        length = layouts[0].length
        single = length == 1 and self.mask_kind == "causal"
        if single or self.mask_kind in {"none", "custom"}:
            result = self._folded(graph, split, mask, length, "none" if single else self.mask_kind)
        else:
            keys, vals = (self._repeated(graph, value) for value in split[1:])
            # (B, H, S, D) is read with the heads first, whatever S is: its second dimension is the number of heads.
            result = graph.append(self._attention(self.num_heads), split[0], keys, vals, *mask)
        return self._like(graph, result, q, layouts[0].heads_first)

    def _tensor(self, value: Value) -> TensorType:
        return tensor_input(self, (value.type,), 0, value.name)

    def _heads_first(self, graph: Graph, value: Value, is_first: bool) -> Value:
        """Return `(B, H, S, D)`, with batch 1 for rank 2."""
        if is_first:
            return value
        shape = value.shape
        if shape.rank < 4:
            width = shape[-1]
            heads = width // self.head_dim if isinstance(width, int) else -1
            lead: tuple[Dim, ...] = (shape[0],) if shape.rank == 3 else (1,)
            value = graph.reshape(value, (*lead, shape[-2], heads, self.head_dim))
        return graph.transpose(value, (0, 2, 1, 3))

    def _folded(self, graph: Graph, split: Sequence[Value], mask: Sequence[Value], length: Dim, kind: str) -> Value:
        q, k, v = split
        share = self.num_heads // self.num_kv_heads
        rows = share * length if isinstance(length, int) else -1
        batch = q.shape[0]
        folded = graph.reshape(q, (batch, self.num_kv_heads, rows, self.head_dim))
        mixed = graph.append(self._attention(self.num_kv_heads, kind), folded, k, v, *mask)
        return graph.reshape(mixed, (batch, self.num_heads, length if isinstance(length, int) else -1, self.head_dim))

    def _repeated(self, graph: Graph, value: Value) -> Value:
        share = self.num_heads // self.num_kv_heads
        batch, heads, length, size = value.shape
        apart = graph.reshape(value, (batch, heads, 1, length, size))
        return graph.reshape(graph.expand(apart, (-1, -1, share, -1, -1)), (batch, self.num_heads, length, size))

    def _like(self, graph: Graph, result: Value, q: Value, is_first: bool) -> Value:
        """Bring `(B, H, S, D)` to the layout of q."""
        if is_first:
            return result
        result = graph.transpose(result, (0, 2, 1, 3))
        return result if q.rank == 4 else graph.reshape(result, q.shape)
