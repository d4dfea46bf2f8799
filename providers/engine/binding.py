"""The memory side of sessions: tensors that stay on the device, fixed buffers.

The classes here work with any session through its `run`, in host memory, such as those of the null provider, so callers
need no second path. `ort_binding` has those of ONNX Runtime, and `binder_of`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Loop: TypeAlias = Callable[[Sequence[Any]], list[Any]]
Run: TypeAlias = Callable[[Sequence[str], Mapping[str, Any]], list[Any]]
"""Runs a session: `(output_names, feeds) -> arrays`."""

_DLPACK_CPU = 1


class Slots:
    """Fixed input and output buffers of a session for one set of input shapes; for one thread at a time.

    These are those of any session: results are copied to the buffers of the outputs that are `fixed`.
    """

    _buffers: Arrays = MappingProxyType({})

    def __init__(self, run: Run, inputs: Sequence[str], outputs: Arrays, fixed: Collection[str]) -> None:
        self._run = run
        self._inputs = inputs
        self._outputs = list(outputs)
        self._buffers = {name: outputs[name].copy() for name in fixed}

    @property
    def bound(self) -> Arrays:
        """Output name -> the buffer that every run writes it to; other outputs are new arrays each time."""
        return self._buffers

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Copy the arrays in, run, and return the output buffers, which the next run overwrites.

        The arrays have the dtypes and shapes the slots were made for.

        Raises:
            EngineError: the run failed.
        """
        results = self._run(self._outputs, dict(zip(self._inputs, arrays, strict=True)))
        outputs = dict(zip(self._outputs, results, strict=True))
        for name, buffer in self._buffers.items():
            if buffer.shape != outputs[name].shape:
                raise EngineError(f"output {name!r} has shape {outputs[name].shape} in place of {buffer.shape}")
            buffer[...] = outputs[name]
        return list({**outputs, **self._buffers}.values())


class BoundRun(abc.ABC):
    """A run whose inputs and outputs keep their memory from run to run; for one thread at a time."""

    @abc.abstractmethod
    def run(self) -> None:
        """Run once on the present contents of the input arrays; outputs are in their arrays afterwards.

        Raises:
            EngineError: the run failed. Outputs, and inputs that an output writes to, may have changed in part.
        """

    @abc.abstractmethod
    def replace(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind another array, of any shape, to an input."""


class Binder:
    """The memory side of a session; this one works through `run`, with host memory, where an engine has no other."""

    def __init__(self, run: Run) -> None:
        self.run_arrays = run

    @property
    def on_host(self) -> bool:
        """Whether runs read their inputs in host memory, so that a buffer stays bound while its content changes."""
        return True

    def upload(self, array: npt.NDArray[Any]) -> DeviceTensor:
        """Return a tensor on the device with a copy of the array.

        Raises:
            EngineError: the device did not take it, it is out of memory or lacks the element type.
        """
        return HostTensor(array.copy())

    def adopt(self, source: Any) -> DeviceTensor | None:
        """Return the tensor behind an object with `__dlpack__` without a copy, or None if it is on another device."""
        kind, _ = source.__dlpack_device__()
        return HostTensor(np.from_dlpack(source)) if int(kind) == _DLPACK_CPU else None

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run on arrays and device tensors; outputs in `resident` come as device tensors, the others as arrays.

        No output shares memory with an input.

        Raises:
            InputError: the engine refused a feed.
            EngineError: the run failed.
        """
        ready = {name: value.array if isinstance(value, HostTensor) else value for name, value in feeds.items()}
        results = self.run_arrays(outputs, ready)
        return [
            HostTensor(result) if name in resident else result for name, result in zip(outputs, results, strict=True)
        ]

    def loop(self, inputs: Sequence[str], outputs: Sequence[str], resident: Collection[str]) -> Loop:
        """Return a run to be repeated by one thread at a time, prepared once; see `run`.

        It takes arrays and device tensors in the order of the inputs, and may keep them until the next run. Nothing
        more can be done with it after an `EngineError`.
        """
        return lambda values: self.run(dict(zip(inputs, values, strict=True)), outputs, resident)

    def bound(self, inputs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any] | str]) -> BoundRun | None:
        """Return a run over memory that is bound once, or None where the engine cannot bind it.

        Args:
            inputs: arrays, which may be written to between runs, and device tensors.
            outputs: the array that an output is written to, or the name of an input whose memory it is written to: a
                device tensor of the caller's own, since no other tensor's elements change.

        Raises:
            EngineError: the engine did not take a value.
        """
        return None

    def slots(self, inputs: Arrays, outputs: Arrays, fixed: Collection[str]) -> Slots | None:
        """Return buffers like these arrays, or None where the engine cannot bind such element types.

        Outputs in `fixed` always have the shape of the array given, and buffers for them begin as copies of it; the
        shape of the others may vary.
        """
        return Slots(self.run_arrays, tuple(inputs), outputs, fixed)


class WrappedBinder(Binder):
    """The memory side of a session whose runs do more than those of another binder, which makes the tensors."""

    def __init__(self, binder: Binder) -> None:
        self._binder = binder

    @property
    def on_host(self) -> bool:
        """Whether runs read their inputs in host memory; see `Binder.on_host`."""
        return self._binder.on_host

    def upload(self, array: npt.NDArray[Any]) -> DeviceTensor:
        """Return a tensor on the device; see `Binder.upload`."""
        return self._binder.upload(array)

    def adopt(self, source: Any) -> DeviceTensor | None:
        """Return a tensor without a copy; see `Binder.adopt`."""
        return self._binder.adopt(source)


class DeviceTensor(abc.ABC):
    """A tensor in the memory of a device; its elements never change, and every session on the device takes it.

    It is made by an upload or by a run, and keeps the session that made it alive.
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

    @abc.abstractmethod
    def __dlpack__(self, **kwargs: Any) -> Any:
        """Return a DLPack capsule over the tensor's memory, without a copy.

        Raises:
            BufferError: the device's memory, or the element type, cannot be shared this way.
        """

    @abc.abstractmethod
    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of the device type, and the device's index.

        Raises:
            BufferError: the memory cannot be shared through DLPack.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dtype.name}{list(self.shape)}>"


class HostTensor(DeviceTensor):
    """A tensor in host memory, for engines that have no memory of their own; the array is not written to any more."""

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
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()
