"""`InputPlan`: checks and converts the inputs of runs, by a plan made once for a graph.

A run makes one pass over the inputs; shapes that equal those of the last run are not checked again. ONNX Runtime
would accept big-endian, masked and byte-string arrays and read garbage, and it does not compare named dims.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError
from rlx_ort.execution.coerce import as_array
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, ValueType
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.execution.engine import Engine

__all__ = ["InputPlan", "ResidentFeeds", "at_extent", "coerced"]

_DLPACK_CPU = 1

# Together with the type, all that the checks read: of two inputs with equal facts, both pass or neither does.
_facts = attrgetter("dtype", "shape")


class ResidentFeeds(dict[str, Any]):
    """Checked inputs with device tensors among them."""


class InputPlan:
    """Checks the inputs of runs of one graph; may be used from several threads.

    Args:
        types: input name -> declared type, in order.
    """

    def __init__(self, types: Mapping[str, ValueType]) -> None:
        self._types = dict(types)
        tensors = {name: kind for name, kind in types.items() if isinstance(kind, TensorType)}
        # None never is an array's dtype, so string arrays, whose elements may be anything, are checked in every run.
        self._rows = tuple(
            (name, None if kind.dtype is DType.STRING else kind.dtype.numpy, kind) for name, kind in tensors.items()
        )
        self._others = tuple((name, kind) for name, kind in types.items() if name not in tensors)
        self._bulk = not self._others and all(dtype is not None for _, dtype, _ in self._rows)
        # Names and facts of the last inputs that needed no conversion: comparing two lists is three times as fast as
        # checking each input, and loops feed the same kind of arrays again and again.
        self._known: tuple[list[str] | None, list[Any]] = (None, [])
        self._arrays = [np.ndarray] * len(self._rows)
        self._accepted: list[tuple[int, ...]] | None = None

    def feeds(self, inputs: Mapping[str, Any], adopter: Engine | None = None) -> Mapping[str, Any]:
        """Return the inputs as the engine takes them; arrays that are right already are passed on without a copy.

        Objects with `__dlpack__` are shared without a copy: those in host memory as arrays, those of another library
        on the device by the adopter. With device tensors among them, the inputs come as `ResidentFeeds`.

        Raises:
            InputError: one is missing, unknown, or of another rank, size or dtype than declared, or two inputs
                disagree about a named dim; the message names it, what was wanted and what came.
        """
        return inputs if self.kind_of(inputs) is not None else self.checked(inputs, adopter)

    def kind_of(self, inputs: Mapping[str, Any]) -> object | None:
        """Return an object that identifies the names, dtypes and shapes of the inputs if they need no check, else None.

        Only the last inputs that needed no conversion are remembered; others go through `checked`.
        """
        known = self._known
        if (
            inputs.__class__ is dict
            and list(inputs) == known[0]
            and list(map(type, inputs.values())) == self._arrays
            and list(map(_facts, inputs.values())) == known[1]
        ):
            return known
        return None

    def ordered(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs of a positional call by name, unchecked.

        Raises:
            InputError: there are more or fewer than the graph has inputs.
        """
        if len(arrays) != len(self._types):
            raise InputError(f"the graph has {len(self._types)} inputs ({', '.join(self._types)}), got {len(arrays)}")
        return dict(zip(self._types, arrays, strict=True))

    def checked(self, inputs: Mapping[str, Any], adopter: Engine | None = None) -> dict[str, Any]:
        """Return the inputs as `feeds` does, after a check of each."""
        shapes: list[tuple[int, ...]] = []
        array_type = np.ndarray
        unchanged = self._bulk
        try:
            feeds = dict(inputs)
            for name, dtype, kind in self._rows:
                value = feeds[name]
                if value.__class__ is not array_type or value.dtype is not dtype or not value.flags.c_contiguous:
                    feeds[name] = value = coerced(f"input {name!r}", value, kind, adopter)
                    unchanged = False
                shapes.append(value.shape)
            for name, other in self._others:
                given = feeds.get(name) if isinstance(other, OptionalType) else feeds[name]
                feeds[name] = _other(name, given, other)
        except (KeyError, TypeError, ValueError) as err:
            if not isinstance(err, InputError):
                self._check_names(inputs, err)
            raise
        if len(feeds) != len(self._types):
            self._check_names(inputs, None)
        if shapes != self._accepted:
            self._check_shapes(feeds)
            self._accepted = shapes
        if unchanged:
            self._known = (list(feeds), list(map(_facts, feeds.values())))
        elif any(isinstance(value, DeviceTensor) for value in feeds.values()):
            return ResidentFeeds(feeds)
        return feeds

    def _check_names(self, inputs: Mapping[str, Any], cause: Exception | None) -> None:
        """Raise an InputError if an input is unknown or missing."""
        if not isinstance(inputs, Mapping):
            raise InputError(f"a run takes a dict of input name -> array, got {type(inputs).__name__}") from cause
        unknown = [name for name in inputs if name not in self._types]
        if unknown:
            close = difflib.get_close_matches(str(unknown[0]), self._types, n=1)
            known = ", ".join(repr(name) for name in self._types) or "none"
            hint = f"did you mean {close[0]!r}?" if close else f"the inputs are: {known}"
            raise InputError(f"the graph has no input {unknown[0]!r}; {hint}") from cause
        missing = [
            name for name, kind in self._types.items() if name not in inputs and not isinstance(kind, OptionalType)
        ]
        if missing:
            wanted = ", ".join(f"{name!r} ({self._types[name]})" for name in missing)
            raise InputError(f"nothing was fed to input {wanted}") from cause

    def _check_shapes(self, feeds: Mapping[str, Any]) -> None:
        sizes: dict[str, tuple[int, str]] = {}
        for name, _, kind in self._rows:
            if kind.shape is not None:
                _check_shape(name, kind, kind.shape, feeds[name].shape, sizes)


def _check_shape(
    name: str, kind: TensorType, wanted: Shape, got: tuple[int, ...], sizes: dict[str, tuple[int, str]]
) -> None:
    """Check a shape; `sizes` maps a named dim to its size in this run and the input that set it."""
    if len(got) != len(wanted):
        raise InputError(f"input {name!r} is {kind} of rank {len(wanted)}; got shape {got} of rank {len(got)}")
    for axis, (dim, size) in enumerate(zip(wanted, got, strict=True)):
        if isinstance(dim, int):
            if dim != size:
                raise InputError(f"input {name!r} is {kind}; got shape {got}, whose dim {axis} is {size}, not {dim}")
        elif dim is not None:
            known, source = sizes.setdefault(dim, (size, name))
            if known != size:
                where = "an earlier dim" if source == name else f"input {source!r}"
                raise InputError(
                    f"input {name!r} is {kind}; got shape {got}, which makes {dim!r} {size}, "
                    f"but {where} makes it {known}"
                )


def coerced(what: str, value: Any, kind: TensorType, adopter: Engine | None = None) -> npt.NDArray[Any] | DeviceTensor:
    """Return a value as an array of the declared dtype, or as a device tensor; `what` names it in messages.

    Tensors of other libraries that offer DLPack are shared without a copy, on a device by the adopter.

    Raises:
        InputError: it cannot be shared or converted, or is on another device than the adopter's.
    """
    if not isinstance(value, (np.ndarray, np.generic, DeviceTensor)) and hasattr(value, "__dlpack__"):
        value = _shared(what, value, kind, adopter)
    if isinstance(value, DeviceTensor):
        if value.dtype != kind.dtype.numpy:
            raise InputError(f"{what} is {kind}: the tensor on the device is {value.dtype.name}")
        return value
    try:
        return as_array(value, kind.dtype)
    except ValueError as err:
        raise InputError(f"{what} is {kind}: {err}") from err


def _shared(what: str, source: Any, kind: TensorType, adopter: Engine | None) -> npt.NDArray[Any] | DeviceTensor:
    try:
        device = int(source.__dlpack_device__()[0])
        if device == _DLPACK_CPU:
            return np.from_dlpack(source)
        adopted = None if adopter is None else adopter.binder.adopt(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as err:
        raise InputError(f"{what} is {kind}: {type(source).__name__} cannot be shared: {err}") from err
    if adopted is None:
        raise InputError(
            f"{what} is {kind}: the {type(source).__name__} is on a device (DLPack type {device}) that the "
            "graph does not run on; copy it to the host first"
        )
    return adopted


def _other(name: str, value: object, kind: ValueType) -> Any:
    """Return a sequence, map or optional value with the tensors in it converted; the engine checks their shapes."""
    if isinstance(kind, TensorType):
        return coerced(f"input {name!r}", value, kind)
    if isinstance(kind, OptionalType):
        return None if value is None else _other(name, value, kind.element)
    if isinstance(kind, SequenceType):
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise InputError(f"input {name!r} is {kind}; got {type(value).__name__}, give a list")
        return [_other(f"{name}[{index}]", item, kind.element) for index, item in enumerate(value)]
    if isinstance(kind, MapType) and not isinstance(value, Mapping):
        raise InputError(f"input {name!r} is {kind}; got {type(value).__name__}, give a dict")
    return value


def at_extent(types: Mapping[str, ValueType], inputs: Mapping[str, Any], extent: tuple[int, int]) -> Mapping[str, Any]:
    """Return the inputs without their rows beyond `actual`, for an extent of `(actual, upper)`.

    Rows are the leading dims of one name whose size is `upper`. The inputs are returned unchanged when that name is
    also a dim further back, where cutting would change the meaning of the data, and when an input is on a device.
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
    """Return how many rows an array or a list has; None for other values."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, (list, tuple, range)) else None
