"""`OrtTensor`: an OrtValue as a device tensor, with the objects that must outlive it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.onnx_types import dtype_of
from rlx_ort.errors import EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.engine.binding import DeviceTensor
from rlx_ort.providers.engine.values import from_ort_value, has_foreign_dtype

if TYPE_CHECKING:
    from rlx_ort.providers.engine.session import OrtEngineSession, SessionCore

__all__ = ["DLPACK_DEVICE", "OrtTensor"]

_DLPACK_CPU = 1
DLPACK_DEVICE = {"cpu": _DLPACK_CPU, "cuda": 2}
"""ONNX Runtime's name of a memory -> DLPack's number of the device type."""


class OrtTensor(DeviceTensor):
    """An OrtValue with the host memory and the session it needs.

    Args:
        session: the session it was made for.
        value: the OrtValue, or the engine's inner object that an OrtValue wraps.
        core: the open session whose allocator owns the memory, None for memory that belongs to no session.
        memory: host memory that the value borrows.
        plain: whether it is known to be in host memory, with elements that numpy has.

    Attributes:
        inner: the engine's inner object, or the OrtValue where the engine shows none.
        core: as given.
    """

    __slots__ = ("__weakref__", "_known_type", "_memory", "_plain", "_session", "_shape", "core", "inner")

    def __init__(
        self, session: OrtEngineSession, value: Any, core: SessionCore | None, memory: Any = None, plain: bool = False
    ) -> None:
        self.inner = getattr(value, "_ortvalue", value)
        self.core = core
        self._session = session
        self._memory = memory
        self._plain = plain
        # Read when needed: a loop makes many tensors that are never inspected.
        self._shape: tuple[int, ...] | None = None
        self._known_type: DType | None = None

    @property
    def value(self) -> Any:
        """An OrtValue, made anew each time; it needs no reference to its session, which is held here."""
        wrapper = self._session.engine.OrtValue
        return self.inner if isinstance(self.inner, wrapper) else wrapper(self.inner)

    @classmethod
    def empty(cls, session: OrtEngineSession, like: npt.NDArray[Any]) -> OrtTensor:
        """Return a tensor like an array, not filled, in memory of the session's device that belongs to no session."""
        make = session.engine.OrtValue.ortvalue_from_shape_and_type
        found = cls(session, make(list(like.shape), like.dtype, *session.recipe.memory), None)
        found._shape = like.shape
        return found

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
        if self._known_type is None:
            self._known_type = dtype_of(self.inner.element_type())
        return self._known_type

    def value_for(self, core: SessionCore) -> tuple[Any, Any]:
        """Return the OrtValue for a run of a session, and what must live until it ends; the device's lock is held.

        WebGPU crashes when memory of one session is freed that another session has read. So it is copied, once and on
        the device, to memory that belongs to none; that also lets the other session go.
        """
        value, before = self.value, (self.inner, self.core)
        if self.core is not None and self.core is not core and not self.on_host:
            dtype = self.inner.element_type() if has_foreign_dtype(TensorType(self._element_type)) else self.dtype
            make = self._session.engine.OrtValue.ortvalue_from_shape_and_type
            copy = make(list(self.shape), dtype, *self._session.recipe.memory)
            copy.update_inplace(value)
            value, self.inner, self.core = copy, getattr(copy, "_ortvalue", copy), None
        return value, before

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements on the host, as a copy; see `DeviceTensor.numpy`."""
        if self._plain or self.on_host:
            found: npt.NDArray[Any] = self.inner.numpy() if self._plain else from_ort_value(self.inner, "device tensor")
            return found if found.flags.owndata else found.copy()
        with self._session.guarded():
            return self._read()

    def _read(self) -> npt.NDArray[Any]:
        if not has_foreign_dtype(TensorType(self._element_type)):
            own: npt.NDArray[Any] = self.inner.numpy()
            return own
        engine = self._session.engine
        copy = getattr(engine, "copy_tensors", None)
        if copy is None:
            raise EngineError(f"this ONNX Runtime cannot read {self.dtype} from a device; cast the output to f32")
        make = engine.OrtValue.ortvalue_from_shape_and_type
        host = make(list(self.shape), self.inner.element_type(), "cpu", 0)
        copy([self.value], [host])
        return OrtTensor(self._session, host, None).numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Return a DLPack capsule over the memory where it is; see `DeviceTensor.__dlpack__`."""
        kind, _ = self.__dlpack_device__()
        if kind == _DLPACK_CPU:
            return from_ort_value(self.inner, "device tensor").__dlpack__(**kwargs)
        with self._session.guarded():
            return self.value.__dlpack__(stream=kwargs.get("stream"))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of the device type, and the device's index; see `DeviceTensor.__dlpack_device__`."""
        name = self._memory_name
        if name not in DLPACK_DEVICE:
            raise BufferError(f"memory of {self._session.device.display} cannot be shared through DLPack; use numpy()")
        if has_foreign_dtype(TensorType(self._element_type)):
            name = self._element_type.value
            raise BufferError(f"{name} cannot be shared through DLPack by ONNX Runtime; use numpy()")
        return DLPACK_DEVICE[name], 0 if name == "cpu" else self._session.device.index
