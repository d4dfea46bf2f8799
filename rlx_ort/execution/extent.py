"""The active extent: a hint that only the first rows of padded inputs matter, honoured by running only those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx_ort.errors import InputError
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.binding import DeviceTensor

__all__ = ["at_extent", "check_extent"]


def check_extent(extent: tuple[int, int]) -> tuple[int, int]:
    """Return an (actual, upper) pair that makes sense.

    Raises:
        InputError: it does not.
    """
    actual, upper = extent
    if not 0 < actual <= upper:
        raise InputError(f"an active extent is (actual, upper) with 0 < actual <= upper, got {extent}")
    return actual, upper


def at_extent(types: Mapping[str, ValueType], inputs: Mapping[str, Any], extent: tuple[int, int]) -> Mapping[str, Any]:
    """Return the inputs with their rows beyond `actual` cut off, where the graph takes any number of rows.

    Rows are the leading dims of one name whose size is `upper`. The inputs come back as they are when a dim of that
    name is also somewhere else than in front, since cutting rows would change more than their number there, and when
    one of them is on a device, where it cannot be cut.
    """
    if not isinstance(inputs, Mapping):
        return inputs
    actual, upper = extent
    leading: dict[str, str] = {}
    elsewhere: set[str] = set()
    for name, kind in types.items():
        if isinstance(kind, TensorType) and kind.shape:
            first = kind.shape[0]
            if isinstance(first, str) and _rows(inputs.get(name)) == upper:
                leading[name] = first
            elsewhere.update(dim for dim in kind.shape[1:] if isinstance(dim, str))
    rows = set(leading.values()) - elsewhere
    cut = {name for name, dim in leading.items() if dim in rows}
    if len(rows) != 1 or any(isinstance(inputs[name], DeviceTensor) for name in cut):
        return inputs
    return {name: value[:actual] if name in cut else value for name, value in inputs.items()}


def _rows(value: object) -> int | None:
    """Return how many rows an array, or a list of rows, has."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, (list, tuple, range)) else None
