"""Raw bytes in and out of a run: the dtype is said, the shape is found from the declared one.

Bytes are little-endian, C order, packed types as ONNX packs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError
from rlx_ort.execution.coerce import saturating_cast
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["TypedBytes", "arrays_from_typed", "typed_from_arrays"]

TypedBytes: TypeAlias = "tuple[bytes | bytearray | memoryview, DType | str]"


def arrays_from_typed(types: Mapping[str, ValueType], inputs: Mapping[str, TypedBytes]) -> dict[str, npt.NDArray[Any]]:
    """Return each input as an array of the given dtype and the declared shape; unknown names pass through flat.

    Named dims are found from the number of elements, where that leaves one answer.

    Raises:
        InputError: a dtype is unknown, the bytes do not fill the shape, or a named dim cannot be told.
    """
    given: dict[str, tuple[DType, npt.NDArray[np.uint8], int]] = {}
    for name, (data, dtype) in inputs.items():
        try:
            kind = DType.parse(dtype)
        except ValueError as err:
            raise InputError(f"input {name!r}: {err}") from err
        if kind is DType.STRING:
            raise InputError(f"input {name!r}: strings have no raw bytes; use run")
        raw = np.frombuffer(data, np.uint8)
        if (raw.size * 8) % kind.bits:
            raise InputError(f"input {name!r}: {raw.size} bytes are no whole number of {kind.value} elements")
        given[name] = (kind, raw, raw.size * 8 // kind.bits)
    shapes = _solved({name: types.get(name) for name in given}, {name: entry[2] for name, entry in given.items()})
    arrays = {}
    for name, (kind, raw, _) in given.items():
        try:
            arrays[name] = TensorData(kind, shapes[name], raw).numpy()
        except ValueError as err:
            raise InputError(f"input {name!r} is {types[name]}: {err}") from err
    return arrays


def typed_from_arrays(arrays: Sequence[Any], dtypes: Sequence[DType]) -> list[tuple[bytes, DType]]:
    """Return each array as raw bytes of a dtype, converted by `saturating_cast` where it is another one.

    Raises:
        InputError: an output is no tensor of numbers, so it has no bytes.
    """
    result: list[tuple[bytes, DType]] = []
    for index, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
        if not isinstance(array, np.ndarray) or array.dtype.kind in "OSU" or dtype is DType.STRING:
            raise InputError(f"output {index} is no tensor of numbers and has no raw bytes; use run")
        result.append((TensorData.from_array(saturating_cast(array, dtype)).buffer.tobytes(), dtype))
    return result


def _solved(types: Mapping[str, ValueType | None], counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input, solving one named dim at a time from an element count."""
    shapes = {name: _shape(kind, counts[name]) for name, kind in types.items()}
    progress = True
    while progress:
        progress = False
        for name, shape in shapes.items():
            open_dims = [dim for dim in shape if not isinstance(dim, int)]
            if len(open_dims) != 1:
                continue
            rest = math.prod(dim for dim in shape if isinstance(dim, int))
            if rest == 0 or counts[name] % rest:
                raise InputError(f"input {name!r} is {types[name]}: {counts[name]} elements do not fill whole rows")
            size = counts[name] // rest
            symbol = open_dims[0]
            if symbol is None:
                shapes[name] = Shape(size if dim is None else dim for dim in shape)
            else:
                shapes = {other: known.bind({symbol: size}) for other, known in shapes.items()}
            progress = True
            break
    stuck = [name for name, shape in shapes.items() if not shape.is_static]
    if stuck:
        raise InputError(
            f"the bytes of input {stuck[0]!r} do not tell the dims of {types[stuck[0]]}; bind them or use run"
        )
    return {name: shape.static() for name, shape in shapes.items()}


def _shape(kind: ValueType | None, count: int) -> Shape:
    known = isinstance(kind, TensorType) and kind.shape is not None
    return kind.shape if known else Shape([count])  # type: ignore[union-attr,return-value]  # `known` narrows both
