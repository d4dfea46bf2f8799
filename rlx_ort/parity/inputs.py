"""Random inputs that a model accepts: sizes for its dims, and integers within the tables that they index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.errors import GraphVerifyError, InputError, near_names
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.parity.metrics import Array

SEED = 0
"""Random inputs are the same in every run unless another seed is given."""
SIZE_CHOICES = ((2, 8, 64), (1, 8, 224), (1, 1, 1))
"""Default sizes to try as (first axis, other axes, image sides), best first.

Larger sizes reveal more errors; every model with consistent dims accepts ones.
"""

# Operators that pass the values of their first input on, so that an index stays an index.
_CARRIERS = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand", "Tile"}
# Dims of a decoder with a cache that are sums of others, by the names that exporters use.
_TOTALS = {
    "total_sequence_length": ("past_sequence_length", "sequence_length"),
    "total_seq_len": ("past_seq_len", "seq_len"),
}
_ONES, _COUNTING = re.compile("mask", re.IGNORECASE), re.compile("position", re.IGNORECASE)
# (operator, input with the indices) -> input with the table; EmbedLayerNormalization has token and segment ids.
_TABLES = {
    ("Gather", 1): 0, ("GatherElements", 1): 0, ("GatherBlockQuantized", 1): 0,
    ("EmbedLayerNormalization", 0): 2, ("EmbedLayerNormalization", 1): 4,
}  # fmt: skip


class MadeInputs(NamedTuple):
    """Generated inputs: input name -> array, and named dim -> the default size that it got."""

    arrays: Mapping[str, Array]
    assumed: Mapping[str, int]


def random_inputs(
    model: ModelBundle,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = SEED,
    assume: tuple[int, int, int] = SIZE_CHOICES[0],
) -> MadeInputs:
    """Return random inputs for a model.

    Floats are normally distributed. Integers that index a table stay below its length, those with "position" in their
    name count up, and others are 0 or 1. Bools, and inputs with "mask" in their name, are ones. A dim that is a sum of
    named dims (`past + seq`) gets the sum. `sizes` maps named dims to sizes; the others get those of `assume`, see
    `SIZE_CHOICES`.

    Raises:
        InputError: an input is no tensor, or its rank is unknown.
        GraphVerifyError: no input has a dim that `sizes` names.
    """
    types = model.input_types()
    dims = InputSizes(types, sizes, assume)
    bounds = _index_bounds(model.proto.graph, types)
    source = np.random.default_rng(seed)
    arrays = {name: _array(name, kind, dims, bounds.get(name), source) for name, kind in types.items()}
    return MadeInputs(arrays, dims.assumed)


class InputSizes:
    """Sizes of the dims of inputs: given ones, sums of others, and defaults by their position in the input.

    `assumed` has the named dims that got a default size so far, with that size.

    Raises:
        GraphVerifyError: a size is given for a dim that no input has.
    """

    def __init__(
        self,
        types: Mapping[str, ValueType],
        given: Mapping[str, int] | None = None,
        assume: tuple[int, int, int] = SIZE_CHOICES[0],
    ) -> None:
        self._given = given or {}
        self._batch, self._length, self._pixels = assume
        self.assumed: dict[str, int] = {}
        shapes = {name: kind.shape or () for name, kind in types.items() if isinstance(kind, TensorType)}
        symbols = {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)}
        self._totals = {name: parts for name, parts in _TOTALS.items() if set(parts) <= symbols}
        places = {f"{name}[{axis}]" for name, shape in shapes.items() for axis in range(len(shape))}
        parts = {part.strip() for symbol in symbols for part in symbol.split("+")}
        for name in self._given:
            if name not in symbols | places | parts:
                raise GraphVerifyError(f"no input has the dim {name!r}; {near_names(name, symbols or places)}")

    def of(self, name: str, kind: TensorType) -> tuple[int, ...]:
        """Return the shape of an input."""
        shape = kind.shape or ()
        image = len(shape) == 4 and kind.dtype.is_float
        sizes = (self._size(dim, axis, image and axis > 1) for axis, dim in enumerate(shape))
        return tuple(self._given.get(f"{name}[{axis}]", size) for axis, size in enumerate(sizes))

    def _size(self, dim: int | str | None, axis: int, pixels: bool) -> int:
        if isinstance(dim, int):
            return dim
        name = "" if dim is None else str(dim)
        if name in self._given:
            return self._given[name]
        default = self._batch if axis == 0 else self._pixels if pixels else self._length
        parts = self._totals.get(name) or [part.strip() for part in name.split("+")]
        if len(parts) > 1:
            return sum(int(part) if part.isdigit() else self._size(part, 1, False) for part in parts)
        return self.assumed.setdefault(name, default) if name else default


def _array(name: str, kind: ValueType, sizes: InputSizes, bound: int | None, source: np.random.Generator) -> Array:
    if not isinstance(kind, TensorType) or kind.shape is None:
        raise InputError(
            f"input {name!r} has type {kind}, for which no data can be generated; give inputs in an npz file"
        )
    shape, dtype = sizes.of(name, kind), kind.dtype
    if dtype is DType.STRING:
        return np.full(shape, "text", dtype=object)
    if dtype is DType.BOOL or _ONES.search(name):
        return np.ones(shape, dtype.numpy)
    if dtype.is_complex:
        return (source.standard_normal(shape) + 1j * source.standard_normal(shape)).astype(dtype.numpy)
    if dtype.is_float:
        return source.standard_normal(shape).astype(dtype.numpy)
    if _COUNTING.search(name) and shape:
        row = np.arange(shape[-1]) % (bound or shape[-1] or 1)
        return np.broadcast_to(row, shape).astype(dtype.numpy)
    return source.integers(0, max(1, 2 if bound is None else bound), shape).astype(dtype.numpy)


def _index_bounds(graph: onnx.GraphProto, inputs: Iterable[str]) -> dict[str, int]:
    """Return input -> length of the shortest table that its values index, for inputs that index one."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    carried = {name: {name} for name in inputs}  # value -> the inputs whose values it has
    bounds: dict[str, int] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            starts = carried.get(name, set())
            if starts and (rows := _table_rows(node, index, shapes)) is not None:
                bounds.update({start: min(rows, bounds.get(start, rows)) for start in starts})
            if starts and ((node.op_type in _CARRIERS and index == 0) or node.op_type == "Concat"):
                carried.setdefault(node.output[0], set()).update(starts)
    return bounds


def _table_rows(node: onnx.NodeProto, index: int, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the length of the table that input `index` of a node indexes, None without a table."""
    place = _TABLES.get((node.op_type, index))
    shape = shapes.get(node.input[place]) if place is not None and place < len(node.input) else None
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    return shape[axis] if shape and -len(shape) <= axis < len(shape) else None
