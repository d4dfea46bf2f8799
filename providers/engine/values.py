"""Types and values of ONNX Runtime: its type strings as types of the IR, and elements that numpy does not know.

bf16, 8-bit floats and 4-bit types go in and come out as OrtValues; everything else stays numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.onnx_types import dtype_of, elem_type, type_proto_text
from rlx_ort.device import Device
from rlx_ort.errors import EngineError, InputError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, UnknownType, ValueType, elements
from rlx_ort.providers.engine.binding import DeviceTensor
from rlx_ort.providers.engine.runtime import onnxruntime

_FOREIGN = frozenset(dtype for dtype in DType if dtype.numpy.isbuiltin == 2)  # 2: registered, by ml_dtypes
_TENSORS = {type_proto_text(TensorType(dtype)): dtype for dtype in DType}

_DLPACK_CPU = 1
DLPACK_DEVICE = {"cpu": _DLPACK_CPU, "cuda": 2}
"""ONNX Runtime's name of a memory -> DLPack's number of the device type."""


class Place:
    """A memory that outputs may be left in."""

    def __init__(self, engine: Any, memory: str, index: int) -> None:
        self.names = (memory, index)
        inner = getattr(engine.OrtDevice.make(memory, index), "_get_c_device", None)
        self.inner = None if inner is None else inner()


def value_type(text: str, dims: Sequence[object] | None = None) -> ValueType:
    """Return the type of a type string; `dims` is the shape of the innermost tensor, if known.

    Types that have no counterpart here, such as sparse tensors, are `UnknownType`.
    """
    text = text.strip()
    head, _, rest = text.partition("(")
    inner = rest[:-1] if rest.endswith(")") else ""
    match head:
        case "tensor" if text in _TENSORS:
            # Where shape inference divides by a size of 0, ONNX Runtime shows a negative one.
            known = [dim if isinstance(dim, str) or (isinstance(dim, int) and dim >= 0) else None for dim in dims or ()]
            return TensorType(_TENSORS[text], None if dims is None else Shape(known))
        case "seq":
            return SequenceType(value_type(inner))
        case "optional":
            return OptionalType(value_type(inner, dims))
        case "map":
            key, _, value = inner.partition(",")
            if (key := f"tensor({key.strip()})") in _TENSORS:
                return MapType(_TENSORS[key], value_type(value))
    return UnknownType()


def refined(inferred: ValueType, declared: ValueType | None) -> ValueType:
    """Return a session's type of a value, with the declared shape for a scalar: ONNX Runtime shows unknown ranks so."""
    if isinstance(inferred, TensorType) and isinstance(declared, TensorType) and not inferred.shape:
        return TensorType(inferred.dtype, declared.shape)
    if declared is not None and type(inferred) is type(declared) and not isinstance(inferred, TensorType):
        return declared
    return inferred


def element_dtypes(texts: Iterable[Any]) -> frozenset[DType]:
    """Return the element types that type strings mention, at any depth."""
    return frozenset[DType]().union(*(elements(value_type(str(text))) for text in texts))


def has_foreign_dtype(kind: ValueType) -> bool:
    """Return whether a value of the type has elements that numpy alone cannot hold."""
    return kind.dtype in _FOREIGN if isinstance(kind, TensorType) else not _FOREIGN.isdisjoint(elements(kind))


def is_tensor_like(kind: ValueType) -> bool:
    """Return whether an OrtValue of the type can be made from, or read into, one array that is no string."""
    inner = kind.element if isinstance(kind, OptionalType) else kind
    return isinstance(inner, TensorType) and inner.dtype is not DType.STRING


def to_ort_value(engine: Any, name: str, array: npt.NDArray[Any], kind: ValueType) -> tuple[Any, Any]:
    """Return an OrtValue over an array of the input's element type, and the memory it borrows and needs."""
    inner = kind.element if isinstance(kind, OptionalType) else kind
    if not isinstance(inner, TensorType) or not isinstance(array, np.ndarray):
        raise InputError(f"input {name!r} takes {kind}, got {type(array).__name__}")
    if inner.dtype not in _FOREIGN:
        array = np.ascontiguousarray(array).reshape(array.shape)
        return engine.OrtValue.ortvalue_from_numpy(array), array
    if array.dtype != inner.dtype.numpy:
        raise InputError(f"input {name!r} takes {inner.dtype.value}, got {array.dtype}")
    if inner.dtype.is_packed:
        data = TensorData.from_array(array, inner.dtype)
        # ONNX Runtime reads packed elements from the start of a buffer of the unpacked shape.
        memory = np.zeros(array.shape, np.uint8)
        memory.reshape(-1)[: data.nbytes] = data.buffer
    else:
        memory = np.ascontiguousarray(array).reshape(array.shape)
    make = engine.OrtValue.ortvalue_from_numpy_with_onnx_type
    return make(memory, elem_type(inner.dtype)), memory


def from_ort_value(value: Any, name: str) -> Any:
    """Return a tensor as an array with its own memory, or None for an absent optional."""
    if not value.has_value():
        return None
    if not value.is_tensor():
        raise EngineError(f"output {name!r} is a {value.data_type()}, which cannot be read; cast its elements to f32")
    dtype = dtype_of(value.element_type())
    if dtype not in _FOREIGN:
        return value.numpy()
    shape = tuple(value.shape())
    raw = np.empty(dtype.nbytes(math.prod(shape)), np.uint8)
    if raw.nbytes:
        ctypes.memmove(raw.ctypes.data, value.data_ptr(), raw.nbytes)
    return TensorData(dtype, shape, raw).numpy().copy()


def shared_array(source: Any) -> npt.NDArray[Any]:
    """Return an array over a tensor of another library in host memory, of a dtype that numpy lacks, without a copy.

    ONNX Runtime reads the DLPack capsule, and takes contiguous tensors only: others are copied by their own library.

    Raises:
        BufferError: neither numpy nor ONNX Runtime has the dtype.
        EngineError: ONNX Runtime cannot be used.
    """
    try:
        value = onnxruntime().OrtValue.from_dlpack(source.contiguous() if hasattr(source, "contiguous") else source)
    except (AttributeError, RuntimeError, ValueError) as err:
        raise BufferError(f"its dtype, {getattr(source, 'dtype', 'unknown')}, cannot be shared") from err
    dtype, shape = dtype_of(value.element_type()), tuple(value.shape())
    memory: Any = (ctypes.c_uint8 * dtype.nbytes(math.prod(shape))).from_address(value.data_ptr())
    memory.owner = value  # lives as long as the array
    return TensorData(dtype, shape, np.frombuffer(memory, np.uint8)).numpy()


class Home(Protocol):
    """The session of a tensor, as far as the tensor needs it."""

    engine: Any
    device: Device

    @property
    def memory(self) -> tuple[str, int]:
        """ONNX Runtime's name and index of the memory in which tensors stay between runs."""

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Hold the locks of the device, refuse a use that would crash, and translate the engine's errors."""


class OrtTensor(DeviceTensor):
    """An OrtValue with the host memory and the session it needs.

    `value` is an OrtValue, or the engine's inner object that it wraps, which is kept as `inner`. `core` is the open
    session whose allocator owns the memory, None for memory that belongs to no session. `memory` is host memory that
    the value borrows. `plain` means that it is known to be in host memory, with elements that numpy has.
    """

    __slots__ = ("__weakref__", "_memory", "_plain", "_session", "_shape", "core", "inner")

    def __init__(self, session: Home, value: Any, core: object | None, memory: Any = None, plain: bool = False) -> None:
        self.inner = getattr(value, "_ortvalue", value)
        self.core = core
        self._session = session
        self._memory = memory
        self._plain = plain
        self._shape: tuple[int, ...] | None = None  # read when needed: a loop makes many that are never inspected

    @property
    def value(self) -> Any:
        """An OrtValue, made anew each time; it needs no reference to its session, which is held here."""
        wrapper = self._session.engine.OrtValue
        return self.inner if isinstance(self.inner, wrapper) else wrapper(self.inner)

    @classmethod
    def empty(cls, session: Home, like: npt.NDArray[Any]) -> OrtTensor:
        """Return a tensor like an array, not filled, in memory of the session's device that belongs to no session."""
        make = session.engine.OrtValue.ortvalue_from_shape_and_type
        tensor = cls(session, make(list(like.shape), like.dtype, *session.memory), None)
        tensor._shape = like.shape
        return tensor

    @property
    def address(self) -> int:
        """Where it is."""
        return int(self.inner.data_ptr())

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory."""
        return self._memory_name == "cpu"

    @property
    def _memory_name(self) -> str:
        return str(self.inner.device_name()).lower()  # "Cpu" from the inner object, "cpu" from the public one

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        if self._shape is None:
            self._shape = tuple(self.inner.shape())
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type as numpy, or ml_dtypes, names it."""
        return self._element_type.numpy

    @property
    def _element_type(self) -> DType:
        return dtype_of(self.inner.element_type())

    @property
    def _is_foreign(self) -> bool:
        return self._element_type in _FOREIGN

    def value_for(self, core: object) -> tuple[Any, Any]:
        """Return the OrtValue for a run of a session, and objects to hold until it ends; the device's lock is held.

        WebGPU crashes when memory of one session is freed that another session has read. So it is copied, once and on
        the device, to memory that belongs to none; that also lets the other session go.
        """
        value, before = self.value, (self.inner, self.core)
        if self.core is not None and self.core is not core and not self.on_host:
            dtype = self.inner.element_type() if self._is_foreign else self.dtype
            make = self._session.engine.OrtValue.ortvalue_from_shape_and_type
            copy = make(list(self.shape), dtype, *self._session.memory)
            copy.update_inplace(value)
            value, self.inner, self.core = copy, getattr(copy, "_ortvalue", copy), None
        return value, before

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements on the host, as a copy; see `DeviceTensor.numpy`."""
        value: Any = self.inner
        if not self._plain and not self.on_host:
            with self._session.guarded():
                if not self._is_foreign:
                    own: npt.NDArray[Any] = value.numpy()
                    return own
                engine = self._session.engine
                make = engine.OrtValue.ortvalue_from_shape_and_type
                value = make(list(self.shape), value.element_type(), "cpu", 0)
                engine.copy_tensors([self.value], [value])
        array: npt.NDArray[Any] = value.numpy() if self._plain else from_ort_value(value, "device tensor")
        return array if array.flags.owndata else array.copy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        kind, _ = self.__dlpack_device__()
        if kind == _DLPACK_CPU and not self._is_foreign:
            return from_ort_value(self.inner, "device tensor").__dlpack__(**kwargs)
        try:
            with self._session.guarded():
                return self.value.__dlpack__(stream=kwargs.get("stream"))
        except RuntimeError as err:
            raise BufferError(f"ONNX Runtime does not share {self.dtype} through DLPack; use numpy()") from err

    def __dlpack_device__(self) -> tuple[int, int]:
        name = self._memory_name
        if name not in DLPACK_DEVICE:
            raise BufferError(f"memory of {self._session.device.display} cannot be shared through DLPack; use numpy()")
        if self._element_type.is_packed or (self._is_foreign and self._memory is not None):
            raise BufferError(f"this tensor of {self.dtype} cannot be shared through DLPack; use numpy()")
        return DLPACK_DEVICE[name], 0 if name == "cpu" else self._session.device.index
