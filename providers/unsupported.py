"""Known device names that no execution provider of ONNX Runtime serves."""

from __future__ import annotations

from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.providers.base import Availability, CostProfile, EngineSession, Provider, SessionRequest

__all__ = ["UnsupportedProvider"]

_INSTEAD = {
    "tpu": "export the model and run it with a TPU runtime",
    "opengl": "use 'gpu', which runs on Vulkan, Direct3D 12 or Metal",
}


class UnsupportedProvider(Provider):
    """Says of a device that nothing here can run on it, and what comes closest."""

    name: ClassVar[str] = "unsupported"
    kinds: ClassVar[tuple[str, ...]] = ("tpu", "opengl")
    selectable: ClassVar[bool] = False

    def probe(self, device: Device) -> Availability:
        """Return that there is no execution provider for the device."""
        return Availability(False, _reason(device), _INSTEAD[device.kind])

    def open(self, request: SessionRequest) -> EngineSession:
        """Refuse; see `Provider.open`."""
        raise DeviceUnavailableError(request.device, _reason(request.device), _INSTEAD[request.device.kind])

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return None: what cannot run has no cost."""
        return None


def _reason(device: Device) -> str:
    return f"no ONNX Runtime execution provider serves {device.family.display}"
