"""Made-up inputs that most models accept: sizes for their dims, and values that make sense as indices and masks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError, InputError, near_names
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Dim, TensorType, ValueType

Array: TypeAlias = npt.NDArray[Any]

SEED = 0
"""Random inputs are the same in every run unless another seed is given."""
SIZE_CHOICES = ((2, 8, 64), (1, 8, 224), (1, 1, 1))
"""Default sizes to try as (first axis, other axes, image sides), best first.

Larger sizes reveal more errors; every model with consistent dims accepts ones.
"""

# Dims of a decoder with a cache that are sums of others, by the names that exporters use.
_TOTALS = {
    "total_sequence_length": ("past_sequence_length", "sequence_length"),
    "total_seq_len": ("past_seq_len", "seq_len"),
}
# Inputs of a decoder with a cache, by the names that exporters give them; an encoder has lengths of its own.
_CACHE, _TOKENS = re.compile(r"past|cache"), re.compile(r"input_ids|inputs_embeds|^tokens?$")
_ENCODER = re.compile(r"(^|[._])encoder")
_ONES, _COUNTING = re.compile("mask", re.IGNORECASE), re.compile("position", re.IGNORECASE)
_GOLDEN_RATIO = 0.6180339887498949  # its multiples have evenly spread fractions


class MadeInputs(NamedTuple):
    """Generated inputs: input name -> array, and named dim -> the default size that it got."""

    arrays: dict[str, Array]
    assumed: Mapping[str, int]


def random_inputs(
    types: Mapping[str, ValueType],
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = SEED,
    assume: tuple[int, int, int] = SIZE_CHOICES[0],
    bounds: Mapping[str, int] | None = None,
) -> MadeInputs:
    """Return random inputs of these types.

    Floats are normally distributed. Integers stay below the bound of their input; without one they are 0 or 1, because
    they are often indices or lengths, and those with "position" in their name count up. Bools, and inputs with "mask"
    in their name, are ones. A dim that is a sum of named dims (`past + seq`) gets the sum, and so does the mask of a
    decoder with a cache, whatever its dim is called. `sizes` maps named dims to sizes; the others get those of
    `assume`, see `SIZE_CHOICES`.

    Raises:
        InputError: an input is no tensor, or its rank is unknown.
        GraphVerifyError: no input has a dim that `sizes` names.
    """
    dims, source, known = InputSizes(types, sizes, assume), np.random.default_rng(seed), bounds or {}
    arrays = {name: _random(name, kind, dims, known.get(name), source) for name, kind in types.items()}
    return MadeInputs(arrays, dims.assumed)


def shaped_inputs(
    types: Mapping[str, ValueType], sizes: Mapping[str, int], assume: tuple[int, int, int] = SIZE_CHOICES[0]
) -> MadeInputs:
    """Return arrays of the shapes of `random_inputs` that take no memory; none for inputs without a shape."""
    dims = InputSizes(types, sizes, assume)
    shapes = {name: dims.of(name, kind) for name, kind in types.items() if isinstance(kind, TensorType) and kind.shape}
    return MadeInputs({name: np.broadcast_to(np.zeros(()), shape) for name, shape in shapes.items()}, dims.assumed)


def even_inputs(types: Mapping[str, ValueType], rows: int) -> dict[str, Array]:
    """Return inputs of so many rows, each of them different: floats spread evenly from 0 to 1, all else zeros.

    Open dims count as 8. Importing `numpy.random` takes 10 ms, which this does without.

    Raises:
        InputError: an input is no tensor, or its rank is unknown.
    """
    dims, arrays = InputSizes(types, assume=(rows, 8, 8)), {}
    for name, kind in types.items():
        tensor = _tensor(name, kind)
        shape, dtype = dims.of(name, tensor), tensor.dtype
        if dtype is DType.STRING:
            arrays[name] = np.full(shape, "a", object)
        elif dtype.is_float:
            arrays[name] = spread(shape).astype(dtype.numpy)
        else:
            arrays[name] = np.zeros(shape, dtype.numpy)
    return arrays


def spread(shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return numbers from 0 to 1, all different and evenly spread, in an order without a pattern."""
    return np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape) * _GOLDEN_RATIO % 1


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
        self._given = dict(given or {})
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
        self._masks: dict[str, str] = {}
        self._fit_decoder({name: tuple(shape) for name, shape in shapes.items() if not _ENCODER.search(name)})

    def _fit_decoder(self, shapes: Mapping[str, tuple[Dim, ...]]) -> None:
        """Let the mask of a decoder be as long as its cache and its tokens together."""
        caches = [shape for name, shape in shapes.items() if len(shape) > 2 and _CACHE.search(name)]
        tokens = [shape for name, shape in shapes.items() if len(shape) > 1 and _TOKENS.search(name)]
        if not caches or not tokens:
            return
        usual = len(caches[0]) - 2  # the axis of the tokens: the first open one after the batch, if there is one
        past = next((dim for dim in caches[0][1:] if not isinstance(dim, int)), caches[0][usual])
        new = tokens[0][1]
        parts = str(past or self._length), str(new or self._length)
        taken = {dim for name, shape in shapes.items() if not _ONES.search(name) for dim in shape}
        for name, shape in shapes.items():
            dim = shape[-1] if shape and _ONES.search(name) else 0
            if dim is None:
                self._masks[name] = " + ".join(parts)
            elif isinstance(dim, str) and dim.replace(" ", "") == f"{past}+1" and isinstance(new, str):
                self._given.setdefault(new, 1)  # exported for one token at a time
            elif isinstance(dim, str) and "+" not in dim and dim not in taken | self._given.keys():
                self._totals.setdefault(dim, parts)

    def of(self, name: str, kind: TensorType) -> tuple[int, ...]:
        """Return the shape of an input."""
        shape = kind.shape or ()
        image = len(shape) == 4 and kind.dtype.is_float and not _CACHE.search(name)
        dims = [*shape[:-1], self._masks.get(name, shape[-1])] if shape else []
        sizes = (self._size(dim, axis, image and axis > 1) for axis, dim in enumerate(dims))
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


def _tensor(name: str, kind: ValueType) -> TensorType:
    if isinstance(kind, TensorType) and kind.shape is not None:
        return kind
    raise InputError(f"input {name!r} has type {kind}, for which no data can be generated; give inputs in an npz file")


def _random(name: str, kind: ValueType, sizes: InputSizes, bound: int | None, source: np.random.Generator) -> Array:
    tensor = _tensor(name, kind)
    shape, dtype = sizes.of(name, tensor), tensor.dtype
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
