"""Arrays in and out of a run: npz files read without pickle and written whole or not at all."""

from __future__ import annotations

import itertools
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.cli.show import replacing
from rlx_ort.errors import InputError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType

Array: TypeAlias = npt.NDArray[Any]

_REGISTERED = 2
"""`dtype.isbuiltin` of a type that numpy does not define itself, such as bfloat16: npz cannot hold it."""

_SHOWN = 5
"""How many values of an output are shown."""

_SMALL_BYTES = 64 << 20
_MOST_UNPACKED = 200
"""How many times its own size an archive may unpack to, above `_SMALL_BYTES`: a made-up one can fill the memory."""


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an npz file. Nothing in the file is executed.

    Raises:
        InputError: the file is no npz archive, is damaged, or holds pickled objects.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file; write one with numpy.savez(path, name=array, ...)")
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is not an npz file; write one with numpy.savez(path, name=array, ...)")
    arrays: dict[str, Array] = {}
    try:
        _refuse_bomb(path)
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                member = archive[name]
                if not isinstance(member, np.ndarray):
                    raise InputError(f"{path} holds {name!r}, which is not an array; write the file with numpy.savez")
                arrays[name] = member
    except InputError:
        raise
    except (ValueError, OSError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as err:
        raise InputError(
            f"{path} cannot be read as an npz file: {err}\n"
            "  it may be damaged, or hold Python objects, which are never loaded; write plain arrays with numpy.savez"
        ) from err
    return arrays


def _refuse_bomb(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > max(_SMALL_BYTES, _MOST_UNPACKED * path.stat().st_size):
        raise InputError(
            f"{path} has {path.stat().st_size} bytes and would unpack to {unpacked}; if you trust it, write it with "
            "numpy.savez, uncompressed"
        )


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an npz file that numpy reads without pickle; the file appears complete or not at all."""
    with replacing(path) as stream, zipfile.ZipFile(stream, "w") as archive:
        # not numpy.savez: its own parameter names would forbid an output called "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, storable(array), allow_pickle=False)


def flattened(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays by which an npz file holds outputs; `NAME` is that of the output.

    A tensor is `NAME`. The items of a sequence are `NAME[0]`, `NAME[1]` and so on, and `NAME[]` is an empty one. A map
    is two arrays of one length, `NAME.keys` and `NAME.values`. So is a sequence of maps that all have the same keys, as
    classifiers give one for each row: its values are (rows, keys). An optional without a value is `NAME.none`.

    Raises:
        InputError: two outputs would have the same name in the file.
    """
    arrays: dict[str, Array] = {}
    for output, result in outputs.items():
        for name, array in _parts(output, result):
            if name in arrays:
                raise InputError(f"two outputs would both be {name!r} in an npz file; rename one of them in the model")
            arrays[name] = array
    return arrays


def _parts(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    if value is None:
        yield f"{name}.none", np.empty(0)
    elif isinstance(value, Mapping):
        yield f"{name}.keys", np.array([*value])
        yield f"{name}.values", np.array([*value.values()])
    elif not isinstance(value, list | tuple):
        yield name, np.asarray(value)
    elif value and all(isinstance(item, Mapping) and [*item] == [*value[0]] for item in value):
        yield f"{name}.keys", np.array([*value[0]])
        yield f"{name}.values", np.array([[*item.values()] for item in value])
    else:
        if not value:
            yield f"{name}[]", np.empty(0)
        for index, item in enumerate(value):
            yield from _parts(f"{name}[{index}]", item)


def first_values(value: Any) -> list[Any]:
    """Return the first values of an output for people: numbers and texts, those of a map with their keys."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [
            f"{key}: {item:.5g}" if isinstance(item, float) else f"{key}: {item}" for key, item in _head(value.items())
        ]
    if isinstance(value, list | tuple):
        return [item for part in _head(value) for item in first_values(part)][:_SHOWN]
    return [_plain(item) for item in _head(np.asarray(value).flat)]


def _head(items: Iterable[Any]) -> list[Any]:
    return [*itertools.islice(items, _SHOWN)]


def _plain(item: Any) -> Any:
    if isinstance(item, str | bool | np.bool_):
        return item if isinstance(item, str) else bool(item)
    if np.iscomplexobj(item):
        return str(item)
    number = float(item)
    if not math.isfinite(number):
        return str(number)  # JSON has no such number
    return int(item) if number.is_integer() and "int" in type(item).__name__ else float(f"{number:.5g}")


def storable(array: Array) -> Array:
    """Return an array in a type that npz can hold: narrow floats as float32, 4-bit integers as int8, text as unicode.

    Each of these holds every value of the type it replaces.
    """
    if array.dtype == object:
        return array.astype(np.str_)
    if array.dtype.isbuiltin != _REGISTERED:
        return array
    return array.astype(np.int8 if "int" in array.dtype.name else np.float32)


def to_declared_types(arrays: Mapping[str, Array], wanted: Mapping[str, ValueType]) -> dict[str, Array]:
    """Return arrays in the declared types where npz has no such type; others stay as they are."""
    result = dict(arrays)
    for name, array in arrays.items():
        kind = wanted.get(name)
        if not isinstance(kind, TensorType):
            continue
        if array.dtype.kind == "U" and kind.dtype is DType.STRING:
            result[name] = array.astype(object)
        elif kind.dtype.numpy.isbuiltin == _REGISTERED and array.dtype in (np.float32, np.int8):
            result[name] = array.astype(kind.dtype.numpy)
    return result
