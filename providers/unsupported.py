"""`UnsupportedProvider`, which refuses the known devices that no execution provider serves."""

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
    """Refuses the known devices that no execution provider serves, and names an alternative."""

    name: ClassVar[str] = "unsupported"
    kinds: ClassVar[tuple[str, ...]] = ("tpu", "opengl")
    selectable: ClassVar[bool] = False

    def probe(self, device: Device) -> Availability:
        """Return that there is no execution provider for the device."""
        reason = f"no ONNX Runtime execution provider serves {device.family.display}"
        return Availability(False, reason, _INSTEAD[device.kind])

    def open(self, request: SessionRequest) -> EngineSession:
        """Refuse; see `Provider.open`."""
        found = self.probe(request.device)
        raise DeviceUnavailableError(request.device, found.reason, found.remedy)

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return None: what cannot run has no cost."""
        return None
