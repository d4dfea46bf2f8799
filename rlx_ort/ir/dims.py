"""Named dims and their sizes, as the inputs of a run determine them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.types import TensorType

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = [
    "BATCH",
    "PAST_SEQ",
    "ROWS",
    "SEQ",
    "DimBinding",
    "dynamic_symbols",
    "has_dynamic_dims",
    "infer_bindings_from_inputs",
]

BATCH, SEQ, ROWS, PAST_SEQ = "batch", "seq", "rows", "past_seq"
"""The symbols that `DimBinding.batch_seq` and `batch_past_seq` bind."""


class DimBinding(Mapping[str, int]):
    """Symbol -> size, as `Graph.bind` and `CompileOptions.dims` take it; equal bindings have one hash.

    Raises:
        ValueError: a size is negative.
    """

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Mapping[str, int] | None = None, **more: int) -> None:
        self._sizes = {name: int(size) for name, size in sorted({**(sizes or {}), **more}.items())}
        for name, size in self._sizes.items():
            if size < 0:
                raise ValueError(f"dim {name!r} cannot have the size {size}")

    @classmethod
    def batch_seq(cls, batch: int, seq: int) -> DimBinding:
        """Return a binding of `batch` and `seq`; with several sequences also of `rows`, all their tokens."""
        rows = {ROWS: batch * seq} if batch > 1 else {}
        return cls({BATCH: batch, SEQ: seq, **rows})

    @classmethod
    def batch_past_seq(cls, batch: int, past_seq: int) -> DimBinding:
        """Return a binding of `batch` and of `past_seq`, the tokens that a cache already holds."""
        return cls({BATCH: batch, PAST_SEQ: past_seq})

    def with_(self, sizes: Mapping[str, int]) -> DimBinding:
        """Return a binding with some sizes added or replaced."""
        return DimBinding({**self._sizes, **sizes})

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __eq__(self, other: object) -> bool:
        return self._sizes == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return f"DimBinding({self._sizes})"


def dynamic_symbols(graph: Graph) -> list[str]:
    """Return the named dims of a graph's values, in order of first appearance."""
    shapes = [kind.shape for node in graph.nodes for kind in node.types if isinstance(kind, TensorType)]
    return list(dict.fromkeys(symbol for shape in shapes if shape is not None for symbol in shape.symbols))


def has_dynamic_dims(graph: Graph) -> bool:
    """Return whether any value of a graph has a dim without a size, named or not."""
    kinds = [kind for node in graph.nodes for kind in node.types if isinstance(kind, TensorType)]
    return any(kind.shape is None or not kind.shape.is_static for kind in kinds)


def infer_bindings_from_inputs(graph: Graph, lengths: Mapping[str, int]) -> DimBinding:
    """Return the sizes of named dims that follow from the number of elements of each input.

    Inputs may be left out. An array's number of elements is `array.size`.

    Raises:
        GraphVerifyError: the graph has no such input, an input has several dims without a size, its length is no
            multiple of the others, or two inputs disagree about a dim; the message names the inputs.
    """
    kinds = {value.name: value.type for value in graph.inputs}
    found: dict[str, tuple[int, str]] = {}
    for name, length in lengths.items():
        kind = kinds.get(name)
        if not isinstance(kind, TensorType) or kind.shape is None:
            raise GraphVerifyError(f"graph {graph.name!r} has no tensor input {name!r} of known rank")
        open_dims = [dim for dim in kind.shape if not isinstance(dim, int)]
        known = math.prod(dim for dim in kind.shape if isinstance(dim, int))
        if len(open_dims) > 1:
            raise GraphVerifyError(f"input {name!r} is {kind}: a length alone does not determine {len(open_dims)} dims")
        if not open_dims:
            if length != known:
                raise GraphVerifyError(f"input {name!r} is {kind} of {known} elements, got {length}")
            continue
        if known == 0 or length % known:
            raise GraphVerifyError(f"input {name!r} is {kind}: {length} elements are no multiple of {known}")
        symbol, size = open_dims[0], length // known
        if symbol is None:
            continue
        before, source = found.setdefault(symbol, (size, name))
        if before != size:
            raise GraphVerifyError(f"input {name!r} makes {symbol!r} {size}, but input {source!r} makes it {before}")
    return DimBinding({symbol: size for symbol, (size, _) in found.items()})
