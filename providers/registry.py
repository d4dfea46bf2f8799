"""The registry: which providers exist, which one serves a device, and the remembered answers of their probes."""

from __future__ import annotations

import functools
import importlib
import threading

from rlx_ort.device import Device, DeviceKind, register_kind
from rlx_ort.providers.base import Availability, Provider

__all__ = ["ProviderRegistry", "default_registry", "register_provider"]

# Module -> class. One line a file; nothing else here or in the core names a provider.
_MODULES = (
    ("cpu", "CpuProvider"),
    ("cuda", "CudaProvider"),
    ("rocm", "RocmProvider"),
    ("rocm", "AmdGpuProvider"),
    ("directml", "DirectMlProvider"),
    ("coreml", "CoreMlProvider"),
    ("mlx", "MlxProvider"),
    ("webgpu", "WebGpuProvider"),
    ("openvino", "OpenVinoProvider"),
    ("tensorrt", "TensorRtProvider"),
    ("tensorrt", "TensorRtRtxProvider"),
    ("qnn", "QnnProvider"),
    ("null", "UnsupportedProvider"),
)


class ProviderRegistry:
    """Providers by device kind. An ordinary object: tests and applications may have their own.

    The answer of a probe is remembered until the process ends or `forget` is called.

    Attributes:
        generation: grows when a provider is registered or answers are forgotten, which makes derived results stale.
    """

    def __init__(self, providers: tuple[Provider, ...] = ()) -> None:
        self.generation = 0
        self._by_kind: dict[str, Provider] = {}
        self._answers: dict[Device, Availability] = {}
        self._probing: dict[Device, threading.Lock] = {}
        self._lock = threading.Lock()
        for provider in providers:
            self.register(provider)

    def register(self, provider: Provider) -> None:
        """Add a provider, replacing those that served its kinds before; new kinds become known.

        Raises:
            ValueError: one of its kinds is not a valid device name.
        """
        for kind in provider.kinds:
            _make_known(kind)
        with self._lock:
            self.generation += 1
            for kind in provider.kinds:
                self._by_kind[kind] = provider
            self._answers = {
                device: answer for device, answer in self._answers.items() if device.kind not in provider.kinds
            }

    def for_device(self, device: Device) -> Provider | None:
        """Return the provider that serves a device, or None; whether the device works is another question."""
        with self._lock:
            return self._by_kind.get(device.kind)

    def providers(self) -> tuple[Provider, ...]:
        """Return the providers, each once, in the order they were registered."""
        with self._lock:
            return tuple(dict.fromkeys(self._by_kind.values()))

    def registered_devices(self) -> tuple[Device, ...]:
        """Return the devices of all providers, in the order of `Device.all()`; nothing is probed."""
        found = dict.fromkeys(device for provider in self.providers() for device in provider.devices())
        order = {device.kind: place for place, device in enumerate(Device.all())}
        return tuple(sorted(found, key=lambda device: (order[device.kind], device.index)))

    def availability(self, device: Device) -> Availability:
        """Return whether a device works here. The first question opens a one-node session on it."""
        with self._lock:
            provider = self._by_kind.get(device.kind)
            known = self._answers.get(device)
            probing = self._probing.setdefault(device, threading.Lock())
        if provider is None:
            return Availability(False, f"no provider is registered for {device.display}")
        if known is not None:
            return known
        with probing:  # one probe a device, whatever the number of threads
            with self._lock:
                known = self._answers.get(device)
            if known is not None:
                return known
            answer = provider.probe(device)
            with self._lock:
                if self._by_kind.get(device.kind) is provider:
                    self._answers[device] = answer
            return answer

    def forget(self) -> None:
        """Forget every answer, so that devices are probed again."""
        with self._lock:
            self.generation += 1
            self._answers.clear()


@functools.cache
def default_registry() -> ProviderRegistry:
    """Return the registry of the process, filled with the providers of this package on the first call."""
    registry = ProviderRegistry()
    for module_name, class_name in _MODULES:
        module = importlib.import_module(f"rlx_ort.providers.{module_name}")
        registry.register(getattr(module, class_name)())
    return registry


def register_provider(provider: Provider) -> None:
    """Add a provider to the process's registry, replacing any that served its kinds."""
    default_registry().register(provider)


def _make_known(kind: str) -> None:
    if kind in {device.kind for device in Device.all()}:
        return
    if not kind or kind != kind.strip().lower() or set(kind) & set(":,; "):
        raise ValueError(f"device kind {kind!r} must be lower case, without spaces, commas, semicolons and colons")
    register_kind(DeviceKind(kind, kind.capitalize()))
