"""`PlacedTensors`: mutable parameters in devices' memory, one copy for all sessions on a device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from rlx_ort.ir.tensor import TensorData
from rlx_ort.providers.engine.binding import DeviceTensor

__all__ = ["PlacedTensors"]


class PlacedTensors:
    """Device and parameter -> the tensor that was uploaded last, for as long as a session holds it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[TensorData, weakref.ref[DeviceTensor]]] = {}
        self._lock = threading.Lock()

    def get(self, device: str, name: str, data: TensorData, upload: Callable[[], DeviceTensor]) -> DeviceTensor:
        """Return the tensor of some data on a device, uploaded now unless some session has it already."""
        with self._lock:
            known = self._known.get((device, name))
            found = known[1]() if known is not None and known[0] is data else None
            return found or self._put(device, name, data, upload)

    def renew(self, device: str, name: str, data: TensorData, upload: Callable[[], DeviceTensor]) -> DeviceTensor:
        """Upload anew; a session that takes the place of another must not keep it alive by the tensors it made."""
        with self._lock:
            return self._put(device, name, data, upload)

    def _put(self, device: str, name: str, data: TensorData, upload: Callable[[], DeviceTensor]) -> DeviceTensor:
        made = upload()
        self._known[device, name] = (data, weakref.ref(made))
        return made
