"""`DeviceTensor`: a tensor that stays in a device's memory between runs."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DeviceTensor", "HostTensor"]


class DeviceTensor(abc.ABC):
    """A tensor in the memory of a device, made by an upload or by a run; its elements never change.

    It keeps the session that made it alive, and is taken by every session on the same device.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The sizes."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The element type as numpy, or ml_dtypes, names it."""

    @abc.abstractmethod
    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements on the host, as a copy that belongs to the caller; waits for the device.

        Raises:
            EngineError: the device did not hand them over.
        """

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Return a DLPack capsule over the memory where it is, without a copy.

        Raises:
            BufferError: the device's memory, or the element type, cannot be shared this way.
        """
        raise BufferError(f"{type(self).__name__} cannot be exported through DLPack; read it with numpy()")

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of the device type, and the device's index.

        Raises:
            BufferError: the memory cannot be shared through DLPack.
        """
        raise BufferError(f"{type(self).__name__} cannot be exported through DLPack; read it with numpy()")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dtype.name}{list(self.shape)}>"


class HostTensor(DeviceTensor):
    """A tensor in host memory, for engines that have no memory of their own.

    Args:
        array: what it holds; nobody may write to it from here on.
    """

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type as numpy, or ml_dtypes, names it."""
        return self.array.dtype

    def numpy(self) -> npt.NDArray[Any]:
        """Return a copy of the array."""
        return self.array.copy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Return numpy's DLPack capsule of the array; see `DeviceTensor.__dlpack__`."""
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number for host memory."""
        return self.array.__dlpack_device__()
