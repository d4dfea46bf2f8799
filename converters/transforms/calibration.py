"""Calibration data: what the user gives, as one feed a sample."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.sources.npz import read_npz
from rlx_ort.converters.transforms.scope import near_names
from rlx_ort.errors import ConversionError
from rlx_ort.ir.types import TensorType

__all__ = ["Samples", "calibration_samples", "read_samples"]

Samples: TypeAlias = "Mapping[str, npt.NDArray[Any] | Sequence[npt.NDArray[Any]]]"


def read_samples(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz file, by name.

    Raises:
        ConversionError: it cannot be read, is damaged, holds pickled objects or unpacks to too much.
    """
    return {name: data.numpy() for name, data in read_npz(Path(path)).items()}


def calibration_samples(bundle: ModelBundle, given: Samples) -> list[dict[str, npt.NDArray[Any]]]:
    """Return one feed a sample, each value of the dtype and shape that the model declares.

    An array with one axis more than the input is cut along that first axis. One of the input's rank is cut along the
    batch axis, into pieces of the size that the model declares there, or of one. Items of a list are fed as they are.

    Raises:
        ConversionError: an input has no data, data belongs to no input, shapes do not fit, or the inputs have
            different numbers of samples.
    """
    declared = bundle.input_types()
    for name in given:
        if name not in declared:
            hint = near_names(name, declared)
            raise ConversionError(f"calibration data {name!r} is no input of {bundle.origin}; {hint}")
    lacking = [name for name in declared if name not in given]
    if lacking:
        raise ConversionError(f"calibration data lacks the input {' and '.join(map(repr, lacking))}")
    cut = {name: _cut(name, kind, given[name]) for name, kind in declared.items()}
    counts = {name: len(items) for name, items in cut.items()}
    if len({*counts.values()}) > 1 or not min(counts.values(), default=0):
        listed = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise ConversionError(f"calibration needs the same number of samples of each input, one at least; got {listed}")
    return [dict(zip(cut, items, strict=True)) for items in zip(*cut.values(), strict=True)]


def _cut(name: str, kind: Any, given: npt.NDArray[Any] | Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    if not isinstance(kind, TensorType) or kind.shape is None:
        raise ConversionError(f"calibration cannot feed input {name!r}, which is {kind}; its rank must be known")
    dims = tuple(kind.shape)
    if isinstance(given, np.ndarray):
        if given.dtype.hasobject:
            raise ConversionError(f"calibration data {name!r} holds Python objects; save plain arrays")
        if given.ndim == len(dims) + 1:
            items = [*given]
        elif dims and given.ndim == len(dims):
            size = dims[0] if isinstance(dims[0], int) else 1
            if size < 1 or len(given) % size:
                raise ConversionError(f"calibration data {name!r} has {len(given)} rows, no multiple of {size}")
            items = [given[start : start + size] for start in range(0, len(given), size)]
        else:
            expected = f"{len(dims)} axes, or {len(dims) + 1} with the samples first"
            raise ConversionError(f"calibration data {name!r} has shape {list(given.shape)}; it needs {expected}")
    else:
        items = [np.asarray(item) for item in given]
    for item in items:
        fits = item.ndim == len(dims) and all(
            not isinstance(dim, int) or dim == size for dim, size in zip(dims, item.shape, strict=True)
        )
        if not fits:
            wanted = "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"
            raise ConversionError(f"a calibration sample of {name!r} has shape {list(item.shape)}, it takes {wanted}")
        if not np.can_cast(item.dtype, kind.dtype.numpy, "same_kind"):
            raise ConversionError(f"calibration data {name!r} is {item.dtype}, the input is {kind.dtype.value}")
    return [np.ascontiguousarray(item, dtype=kind.dtype.numpy) for item in items]
