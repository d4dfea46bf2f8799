"""`InputPlan`: checks and converts the inputs of runs, by a plan made once for a graph.

A run makes one pass over the inputs; shapes that equal those of the last run are not checked again. ONNX Runtime
would accept big-endian, masked and byte-string arrays and read garbage, and it does not compare named dims.

Values are converted without silent loss. The exact dtype passes as it is. A conversion that keeps every value of the
source dtype is done (`numpy.can_cast(..., "safe")`). Python numbers, lists and numpy scalars are judged by value.
Everything else is refused with the cast that would convert it. Raw bytes are little-endian, in C order, with packed
types as ONNX packs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError, near_names
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, ValueType
from rlx_ort.providers.engine.binding import Binder, DeviceTensor

TypedBytes: TypeAlias = "tuple[bytes | bytearray | memoryview, DType | str]"

Kind: TypeAlias = "Callable[[Any], bool]"
"""Whether the inputs of a run are a dict of arrays with the names, dtypes and shapes of earlier inputs."""

_LITERALS = (bool, int, float, complex, list, tuple, range, np.generic)

_OBJECT, _TEXT = np.dtype(object), frozenset({str})  # of string arrays, and of their elements
_DLPACK_CPU = 1


class Adopter(Protocol):
    """An engine, which takes tensors of other libraries that are on its device."""

    @property
    def binder(self) -> Binder:
        """Its memory side."""


class ResidentFeeds(dict[str, Any]):
    """Checked inputs with device tensors among them."""


class InputPlan:
    """Checks the inputs of runs of one graph by their declared types; may be used from several threads."""

    def __init__(
        self, types: Mapping[str, ValueType], on_sizes: Callable[[Mapping[str, int], bool], None] | None = None
    ) -> None:
        """Create a plan; `on_sizes` gets new sizes of named dims, and whether an input is empty; it may raise."""
        self._types = dict(types)
        self.on_sizes = on_sizes or (lambda sizes, empty: None)
        tensors = {name: kind for name, kind in types.items() if isinstance(kind, TensorType)}
        self._rows = tuple((name, kind.dtype.numpy, kind) for name, kind in tensors.items())
        self._others = tuple((name, kind) for name, kind in types.items() if name not in tensors)
        self._bulk = not self._others
        self._texts = [name for name, dtype, _ in self._rows if dtype is _OBJECT]
        # Matches the like of the last inputs that needed no conversion: that is four times as fast as checking each
        # input, and loops feed the same kind of arrays again and again.
        self._known: Kind = lambda _: False
        self._accepted: list[tuple[int, ...]] | None = None

    def feeds(self, inputs: Mapping[str, Any], adopter: Adopter | None = None) -> Mapping[str, Any]:
        """Return the inputs as the engine takes them; arrays that are right already are passed on without a copy.

        Objects with `__dlpack__` are shared without a copy: those in host memory as arrays, those of another library
        on the device by the adopter. With device tensors among them, the inputs come as `ResidentFeeds`.

        Raises:
            InputError: one is missing, unknown, or of another rank, size or dtype than declared, or two inputs
                disagree about a named dim; the message names it, the wanted and the given size.
        """
        return inputs if self.kind_of(inputs) is not None else self.checked(inputs, adopter)

    def kind_of(self, inputs: Mapping[str, Any]) -> Kind | None:
        """Return the kind of inputs that need no check, else None; inputs of one kind get the same object.

        Only the last inputs that needed no conversion are remembered; others go through `checked`.
        """
        known = self._known
        return known if known(inputs) else None

    def ordered(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs of a positional call by name, unchecked.

        Raises:
            InputError: there are more or fewer than the graph has inputs.
        """
        if len(arrays) != len(self._types):
            raise InputError(f"the graph has {len(self._types)} inputs ({', '.join(self._types)}), got {len(arrays)}")
        return dict(zip(self._types, arrays, strict=True))

    def checked(self, inputs: Mapping[str, Any], adopter: Adopter | None = None) -> dict[str, Any]:
        """Return the inputs as `feeds` does, after a check of each."""
        shapes: list[tuple[int, ...]] = []
        array_type = np.ndarray
        unchanged, resident = self._bulk, False
        try:
            feeds = dict(inputs)
            for name, dtype, kind in self._rows:
                value = feeds[name]
                if (
                    value.__class__ is not array_type
                    or value.dtype is not dtype
                    or not value.flags.c_contiguous
                    or (dtype is _OBJECT and not _all_text(value))
                ):
                    feeds[name] = value = coerced(f"input {name!r}", value, kind, adopter)
                    unchanged = False
                    resident = resident or isinstance(value, DeviceTensor)
                shapes.append(value.shape)
            for name, other in self._others:
                given = feeds.get(name) if isinstance(other, OptionalType) else feeds[name]
                feeds[name] = value = _other(name, given, other)
                resident = resident or isinstance(value, DeviceTensor)
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
            arrays = feeds.values()
            known = _kind(list(feeds), [array.dtype for array in arrays], [array.shape for array in arrays])
            self._known = _with_texts(known, self._texts) if self._texts else known
        elif resident:
            return ResidentFeeds(feeds)
        return feeds

    def _check_names(self, inputs: Mapping[str, Any], cause: Exception | None) -> None:
        """Raise an InputError if an input is unknown or missing."""
        if not isinstance(inputs, Mapping):
            raise InputError(f"a run takes a dict of input name -> array, got {type(inputs).__name__}") from cause
        unknown = [name for name in inputs if name not in self._types]
        if unknown:
            hint = near_names(str(unknown[0]), self._types)
            raise InputError(f"the graph has no input {unknown[0]!r}; {hint}") from cause
        missing = [
            name for name, kind in self._types.items() if name not in inputs and not isinstance(kind, OptionalType)
        ]
        if missing:
            wanted = ", ".join(f"{name!r} ({self._types[name]})" for name in missing)
            raise InputError(f"nothing was fed to input {wanted}") from cause

    def _check_shapes(self, feeds: Mapping[str, Any]) -> None:
        sizes: dict[str, tuple[int, str]] = {}  # named dim -> its size in this run and the input that set it
        for name, _, kind in self._rows:
            if kind.shape is None:
                continue
            wanted, got = kind.shape, feeds[name].shape
            if len(got) != len(wanted):
                raise InputError(f"input {name!r} is {kind} of rank {len(wanted)}; got shape {got} of rank {len(got)}")
            for axis, (dim, size) in enumerate(zip(wanted, got, strict=True)):
                if isinstance(dim, int) and dim != size:
                    raise InputError(
                        f"input {name!r} is {kind}; got shape {got}, whose dim {axis} is {size}, not {dim}"
                    )
                if isinstance(dim, str):
                    known, source = sizes.setdefault(dim, (size, name))
                    if known != size:
                        where = "an earlier dim" if source == name else f"input {source!r}"
                        raise InputError(
                            f"input {name!r} is {kind}; got shape {got}, which makes {dim!r} {size}, "
                            f"but {where} makes it {known}"
                        )
        empty = any(0 in feeds[name].shape for name, _, _ in self._rows)
        self.on_sizes({dim: size for dim, (size, _) in sizes.items()}, empty)


def _kind(names: list[str], dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> Kind:
    """Return the kind of inputs with these names, in this order; unrolled for one and two, to be fast."""
    if len(names) == 1:
        array_type = np.ndarray
        name, dtype, shape = names[0], dtypes[0], shapes[0]

        def one(inputs: Any) -> bool:
            if inputs.__class__ is not dict or len(inputs) != 1:
                return False
            array = inputs.get(name)
            return array.__class__ is array_type and array.dtype is dtype and array.shape == shape

        return one
    if len(names) == 2:
        array_type = np.ndarray
        (name_0, name_1), (dtype_0, dtype_1), (shape_0, shape_1) = names, dtypes, shapes

        def two(inputs: Any) -> bool:
            if inputs.__class__ is not dict or len(inputs) != 2:
                return False
            first, second = inputs.get(name_0), inputs.get(name_1)
            return (
                first.__class__ is array_type
                and second.__class__ is array_type
                and first.dtype is dtype_0
                and second.dtype is dtype_1
                and first.shape == shape_0
                and second.shape == shape_1
            )

        return two
    matches = matcher(dtypes, shapes)
    return lambda inputs: inputs.__class__ is dict and list(inputs) == names and matches(inputs.values())


def _with_texts(kind: Kind, names: Sequence[str]) -> Kind:
    """Return a kind of which some inputs are string arrays; their elements may be anything, so each run checks them."""

    def matches(inputs: Any) -> bool:
        if not kind(inputs):
            return False
        for name in names:
            array = inputs[name]
            if not (array.flags.c_contiguous and _all_text(array)):
                return False
        return True

    return matches


def matcher(dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> Callable[[Collection[Any]], bool]:
    """Return a check whether values are arrays of these dtypes and shapes; unrolled for one and two, to be fast.

    That is all that the checks of a run read: of values that match, all pass or none does.
    """
    array_type = np.ndarray
    if len(shapes) == 1:
        dtype, shape = dtypes[0], shapes[0]

        def one(arrays: Collection[Any]) -> bool:
            if len(arrays) != 1:
                return False
            (array,) = arrays
            return array.__class__ is array_type and array.dtype is dtype and array.shape == shape

        return one
    if len(shapes) == 2:
        (dtype_0, dtype_1), (shape_0, shape_1) = dtypes, shapes

        def two(arrays: Collection[Any]) -> bool:
            if len(arrays) != 2:
                return False
            first, second = arrays
            return (
                first.__class__ is array_type
                and second.__class__ is array_type
                and first.dtype is dtype_0
                and second.dtype is dtype_1
                and first.shape == shape_0
                and second.shape == shape_1
            )

        return two
    types, facts = [array_type] * len(shapes), list(zip(dtypes, shapes, strict=True))
    return lambda arrays: list(map(type, arrays)) == types and list(map(_facts, arrays)) == facts


_facts = attrgetter("dtype", "shape")


def coerced(what: str, value: Any, kind: TensorType, adopter: Adopter | None = None) -> npt.NDArray[Any] | DeviceTensor:
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


def _shared(what: str, source: Any, kind: TensorType, adopter: Adopter | None) -> npt.NDArray[Any] | DeviceTensor:
    try:
        device = int(source.__dlpack_device__()[0])
        if hasattr(source, "resolve_neg"):  # torch exports the memory of a lazily negated view without its sign
            source = source.resolve_neg()
        if device == _DLPACK_CPU:
            try:
                return np.from_dlpack(source)
            except (BufferError, RuntimeError) as err:
                if isinstance(err, BufferError) and "dtype" not in str(err):  # numpy 2.5 says so that it lacks one
                    raise
                from rlx_ort.providers.engine.values import shared_array

                return shared_array(source)
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


def sizes_of(types: Mapping[str, ValueType], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the sizes of the named dims of inputs of these shapes; inputs that are left out give none."""
    tensors = {name: kind.shape for name, kind in types.items() if isinstance(kind, TensorType) and kind.shape}
    places = (zip(dims, shapes.get(name, ()), strict=False) for name, dims in tensors.items())
    return {dim: int(size) for place in places for dim, size in place if isinstance(dim, str)}


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


def as_array(value: object, dtype: DType) -> npt.NDArray[Any]:
    """Return the value as a C-contiguous array of the dtype in the machine's byte order.

    An array of that kind is returned itself, not a copy.

    Raises:
        ValueError: the value is no array, or its conversion would lose something; the message names the remedy.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError("it is a masked array, whose mask would be lost; feed `.filled(value)`")
    if value is None:
        raise ValueError("it is None")
    try:
        array = value.view(np.ndarray) if isinstance(value, np.ndarray) else np.asarray(value)
    except (ValueError, TypeError) as err:  # ragged lists, objects whose conversion refuses
        raise ValueError(f"{type(value).__name__} is not an array: {err}") from err
    if dtype is DType.STRING:
        return array.astype(object) if not array.size and is_literal(value) else _strings(array)
    if array.dtype.kind in "OSUmM":
        raise ValueError(f"{_described(value, array)} holds no numbers")
    target = dtype.numpy
    if array.dtype == target:
        return array if array.flags.c_contiguous else array.copy(order="C")
    if is_literal(value):
        return _by_value(array, dtype)
    if not np.can_cast(array.dtype, target, "safe"):
        raise ValueError(f"{_described(value, array)} would lose values as {dtype.value}; cast it: {cast_hint(dtype)}")
    return array.astype(target, order="C")


def saturating_cast(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return the array as another dtype; the array itself if it has that dtype.

    Floats become integers by truncation towards zero. Values out of range become the nearest limit, and NaN becomes 0.
    Everything but 0 is True as a bool.
    """
    target = dtype.numpy
    if array.dtype == target:
        return array
    if dtype is DType.BOOL:
        return np.asarray(array != np.zeros((), array.dtype))
    if not dtype.is_integer:
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(target)
    lowest, highest = _limits(dtype)
    source = DType.from_numpy(array.dtype)
    if source.is_float:
        whole = np.trunc(array.astype(np.float64))
        # The upper limit of 64-bit types is not a float64, the power of two above it is.
        high = whole >= float(highest + 1)
        low = whole < float(lowest)
        inside = np.where(high | low | np.isnan(whole), 0.0, whole).astype(target)
        return np.where(high, np.array(highest, target), np.where(low, np.array(lowest, target), inside))
    if source is DType.BOOL:
        return array.astype(target)
    wide = array.astype(np.int16) if source.is_packed else array
    least, most = _limits(source)
    return np.asarray(np.clip(wide, max(lowest, least), min(highest, most))).astype(target)


def is_literal(value: object) -> bool:
    """Return whether a value is Python numbers, lists of them or a numpy scalar, which are judged by value."""
    return isinstance(value, _LITERALS)


def cast_hint(dtype: DType) -> str:
    """Return the numpy expression that casts an array to the dtype, such as `.astype(numpy.float32)`."""
    module = "numpy" if dtype.numpy.type.__module__ == "numpy" else "ml_dtypes"
    name = "bool_" if dtype is DType.BOOL else dtype.numpy.name
    return f".astype({module}.{name})"


def _limits(dtype: DType) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer type."""
    if dtype.value[0] == "i":
        return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    return 0, (1 << dtype.bits) - 1


def _by_value(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Convert literals: floats may be rounded, but never to infinity; integers stay exact."""
    if not array.size:
        return array.astype(dtype.numpy, order="C")
    source = DType.from_numpy(array.dtype)
    if dtype.is_integer and (source.is_float or source.is_complex):
        raise ValueError(f"{source.value} numbers would lose their fraction as {dtype.value}; write whole numbers")
    if dtype is DType.BOOL and source is not DType.BOOL:
        raise ValueError(f"{source.value} numbers are not booleans; write True and False")
    if source.is_complex and not dtype.is_complex:
        raise ValueError(f"complex numbers would lose their imaginary part as {dtype.value}")
    if dtype.is_integer and source is not DType.BOOL:
        lowest, highest = _limits(dtype)
        if int(array.min()) < lowest or int(array.max()) > highest:
            raise ValueError(f"a number is outside {dtype.value}, which goes from {lowest} to {highest}")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype.numpy, order="C")
    if dtype.is_float and source.is_float and bool(np.any(np.isfinite(array) & ~np.isfinite(converted))):
        raise ValueError(f"a number is too large for {dtype.value}")
    return converted


def _strings(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "OSUT":
        raise ValueError(f"{array.dtype} array of shape {array.shape} holds no strings")
    if _all_text(array):
        return np.asarray(array, dtype=object, order="C")
    items = array.reshape(-1).tolist()
    texts = np.empty(array.size, dtype=object)
    for index, item in enumerate(items):
        if isinstance(item, bytes):
            try:
                item = item.decode("utf-8")
            except UnicodeDecodeError as err:
                raise ValueError(f"item {index} is not UTF-8 text: {err}") from err
        if not isinstance(item, str):
            raise ValueError(f"item {index} is {type(item).__name__}, not a string")
        texts[index] = item
    return texts.reshape(array.shape)


def _all_text(array: npt.NDArray[Any]) -> bool:
    if array.size == 1:  # a row of a table, where this would take a tenth of the run
        return array.item().__class__ is str
    return _TEXT.issuperset(map(type, array.flat))


def _described(value: object, array: npt.NDArray[Any]) -> str:
    what = "array" if isinstance(value, np.ndarray) else type(value).__name__
    return f"{array.dtype} {what} of shape {array.shape}"


def arrays_from_typed(types: Mapping[str, ValueType], inputs: Mapping[str, TypedBytes]) -> dict[str, npt.NDArray[Any]]:
    """Return each input as an array of the given dtype and the declared shape; unknown names come as flat arrays.

    Named dims are inferred from the number of elements, where that leaves one solution.

    Raises:
        InputError: a dtype is unknown, the bytes do not fill the shape, or a named dim cannot be inferred.
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
            raise InputError(f"input {name!r}: {raw.size} bytes are not a whole number of {kind.value} elements")
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
    """Return each array as raw bytes of a dtype, converted by `saturating_cast`.

    Raises:
        InputError: an output is no tensor of numbers.
    """
    result: list[tuple[bytes, DType]] = []
    for index, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
        if not isinstance(array, np.ndarray) or array.dtype.kind in "OSU" or dtype is DType.STRING:
            raise InputError(f"output {index} is not a tensor of numbers and has no raw bytes; use run")
        result.append((TensorData.from_array(saturating_cast(array, dtype)).buffer.tobytes(), dtype))
    return result


def _solved(types: Mapping[str, ValueType | None], counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input; infers one named dim at a time from an element count."""
    shapes = {}
    for name, kind in types.items():
        declared = kind.shape if isinstance(kind, TensorType) else None
        shapes[name] = Shape([counts[name]]) if declared is None else declared
    while ready := [name for name, shape in shapes.items() if sum(not isinstance(dim, int) for dim in shape) == 1]:
        name, shape = ready[0], shapes[ready[0]]
        rest = math.prod(dim for dim in shape if isinstance(dim, int))
        if rest == 0 or counts[name] % rest:
            raise InputError(f"input {name!r} is {types[name]}: {counts[name]} elements do not fill whole rows")
        size = counts[name] // rest
        symbol = next(dim for dim in shape if not isinstance(dim, int))
        if symbol is None:
            shapes[name] = Shape(size if dim is None else dim for dim in shape)
        else:
            shapes = {other: known.bind({symbol: size}) for other, known in shapes.items()}
    stuck = [name for name, shape in shapes.items() if not shape.is_static]
    if stuck:
        raise InputError(
            f"the bytes of input {stuck[0]!r} do not determine the dims of {types[stuck[0]]}; bind them or use run"
        )
    return {name: shape.static() for name, shape in shapes.items()}
