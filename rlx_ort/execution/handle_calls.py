"""The calls of a compiled graph that are about handles; `handles.py` holds the values."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from rlx_ort.execution.handles import Handles
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.execution.engine_slot import Engine

__all__ = ["HandleCalls"]


class HandleCalls(abc.ABC):
    """Handles in host memory, and on the device; on the CPU the device's memory is the host's."""

    _handles: Handles
    _plain: bool

    @abc.abstractmethod
    def run_read_outputs(self, inputs: Mapping[str, Any], indices: Sequence[int] | None = None) -> list[Any]:
        """Run once and return the listed outputs."""

    @abc.abstractmethod
    def _engine(self) -> Engine:
        """Return an engine with the newest weights."""

    @abc.abstractmethod
    def _settled(self) -> None:
        """Wait for committed runs."""

    def bind_handle(self, name: str, array: npt.ArrayLike) -> bool:
        """Keep a copy of an array that runs are fed with where they do not supply the input of that name.

        A handle named `out0` is overwritten with output 0 after every run, and so on; see also `set_handle_feed`.
        Returns True: every device supports it.

        Raises:
            InputError: no input, and no output by number, has the name, or the array is not of its type.
        """
        self._settled()
        self._handles.bind(name, array)
        self._plain = False
        return True

    def read_handle(self, name: str) -> npt.NDArray[Any] | None:
        """Return a copy of a handle in host memory, or None when there is none; waits for committed runs."""
        self._settled()
        return self._handles.read(name)

    def set_handle_feed(self, handle: str, out_idx: int) -> bool:
        """Overwrite a handle in host memory with an output after every run from now on; returns True.

        Raises:
            InputError: there is no such handle or output, or their dtypes differ.
        """
        self._settled()
        self._handles.feed(handle, out_idx)
        return True

    def bind_gpu_handle(self, name: str, array: Any) -> bool:
        """Upload an array as the value of an input that stays on the device from run to run.

        A `DeviceTensor` of another graph on the same device is taken without a copy, and so is any object with
        `__dlpack__` in a device's own memory; what is in host memory is copied. Returns True: every device supports it.

        Raises:
            InputError: no input has the name, or the array is not of its type.
            EngineError: the device did not take it.
        """
        self._settled()
        engine = self._engine()
        held = self._handles.to_hold(name, array, engine)
        tensor = held if isinstance(held, DeviceTensor) else engine.binder.upload(held)
        self._handles.bind_device(name, tensor)
        self._plain = False
        return True

    def has_gpu_handle(self, name: str) -> bool:
        """Return whether a handle on the device has the name."""
        return self._handles.has_device(name)

    def set_gpu_handle_feed(self, handle: str, out_idx: int) -> bool:
        """Move an output into a handle on the device after every run from now on, without a way over the host.

        Its shape may differ from the last, where the graph takes that. No run writes to memory that it reads. Returns
        True: every device supports it.

        Raises:
            InputError: there is no such handle or output, or their dtypes differ.
        """
        self._settled()
        self._handles.feed_device(handle, out_idx)
        return True

    def read_gpu_handle(self, name: str) -> npt.NDArray[Any] | None:
        """Return a handle on the device as a copy on the host, or None when there is none; waits for the device."""
        self._settled()
        return self._handles.read_device(name)

    def run_feed_gpu_handle(self, inputs: Mapping[str, Any], handle: str, out_idx: int) -> npt.NDArray[Any]:
        """Set a feed, run, and return that output; the feed stays set.

        Raises:
            InputError: there is no such handle or output, or an input is wrong.
            EngineError: the run failed.
        """
        self.set_gpu_handle_feed(handle, out_idx)
        found: npt.NDArray[Any] = self.run_read_outputs(inputs, [out_idx])[0]
        return found
