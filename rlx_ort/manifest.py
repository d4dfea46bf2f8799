"""`BackendsManifest`: which providers this installation has and what brings them, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Backend", "BackendsManifest"]


@dataclass(frozen=True, slots=True)
class Backend:
    """One provider of this installation.

    Attributes:
        name: the provider's name.
        kinds: the device kinds it serves.
        ep: ONNX Runtime's name of the execution provider.
        devices: labels of the devices its hardware discovery lists, without proof that they work.
        version: the version of the plugin that brings it, empty for one that is built into ONNX Runtime.
    """

    name: str
    kinds: tuple[str, ...]
    ep: str
    devices: tuple[str, ...]
    version: str = ""


@dataclass(frozen=True, slots=True)
class BackendsManifest:
    """What this installation can run on.

    Attributes:
        package: the package's name.
        version: its version.
        engine: ONNX Runtime's package and version, empty where it cannot be used.
        backends: the providers that run something.
    """

    package: str
    version: str
    engine: str
    backends: tuple[Backend, ...]

    @classmethod
    def current(cls) -> BackendsManifest:
        """Return the manifest of this process; no session is opened."""
        import rlx_ort
        from rlx_ort.providers.engine import runtime
        from rlx_ort.providers.plugins import plugin_for
        from rlx_ort.providers.registry import default_registry

        found = []
        for provider in default_registry().providers():
            if not provider.ep_name and not provider.selectable:
                continue  # it only explains why its devices cannot be used
            plugin = plugin_for(provider.ep_name)
            labels = tuple(device.label for device in provider.devices())
            version = "" if plugin is None else plugin.version
            found.append(Backend(provider.name, provider.kinds, provider.ep_name, labels, version))
        engine = "" if runtime.runtime_problem() is not None else runtime.describe_runtime()
        return cls("rlx_ort", rlx_ort.__version__, engine, tuple(found))

    def json(self) -> str:
        """Return the manifest as JSON text."""
        return json.dumps(asdict(self), indent=2)
