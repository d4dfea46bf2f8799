"""The registry: which providers exist, which one serves a device, and which devices work here.

A device works when its provider opened a one-node session on it and the node ran there. The registry remembers the
answer for the life of the process, so only the first question costs something. No graph is involved.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping

from rlx_ort import epoch
from rlx_ort.device import Device, DeviceKind, as_devices, priority_rank, register_kind
from rlx_ort.errors import DeviceUnavailableError, InputError, NoViableDeviceError
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import Availability, Provider
from rlx_ort.providers.engine.recipe import unknown_option

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

    The answer of a probe is remembered until the process ends or `forget` is called. `generation` grows when a provider
    is registered or answers are forgotten, which makes derived results stale.
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
        known = {device.kind for device in Device.all()}
        for kind in (kind for kind in provider.kinds if kind not in known):
            if not kind or kind != kind.strip().lower() or set(kind) & set(":,; "):
                wanted = "lower case, without spaces, commas, semicolons and colons"
                raise ValueError(f"device kind {kind!r} must be {wanted}")
            register_kind(DeviceKind(kind, kind.capitalize()))
        with self._lock:
            self._advance()
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

    def availability(self, device: Device, *, again: bool = False) -> Availability:
        """Return whether a device works here. The first question opens a one-node session on it.

        With `again` it is probed now; a device that works then counts as working from now on.
        """
        with self._lock:
            provider = self._by_kind.get(device.kind)
            probing = self._probing.setdefault(device, threading.Lock())
        if provider is None:
            reason = "no ONNX Runtime execution provider runs this kind of device"
            remedy = "choose another device, or add a provider with rlx_ort.register_provider"
            return Availability(False, reason, remedy)
        with probing:  # one probe a device, whatever the number of threads
            known = self._answers.get(device)
            if known is not None and not again:
                return known
            answer = provider.probe(device)
            with self._lock:
                if self._by_kind.get(device.kind) is provider and (known is None or answer.available):
                    self._answers[device] = answer
                    if known is not None and not known.available:
                        self._advance()
            return answer

    def forget(self) -> None:
        """Forget every answer, so that devices are probed again."""
        with self._lock:
            self._advance()
            self._answers.clear()

    def _advance(self) -> None:
        self.generation += 1
        epoch.advance()


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


def is_available(device: Device | str) -> bool:
    """Return whether the device works here; never raises for a known name. The first call may open a session."""
    return availability(device).available


def availability(device: Device | str) -> Availability:
    """Return whether the device works here and, when it does not, the reason and the remedy."""
    return default_registry().availability(Device(device))


def memory_limit(device: Device, options: CompileOptions) -> int | None:
    """Return the most bytes that a session can have on a device; see `Provider.memory_limit`."""
    provider = provider_of(device)
    return None if provider is None else provider.memory_limit(device, options, availability(device).memory_bytes)


def check_provider_options(options: CompileOptions) -> None:
    """Refuse provider options that no device has, or not the device that they are for.

    Raises:
        InputError: an option is none; the message has the nearest names.
    """
    registry, known, listed = default_registry(), set[str](), True
    for provider in registry.providers():
        listed = listed and (provider.option_keys is not None or not provider.ep_name)
        known |= provider.option_keys or set()
    for name, value in options.provider_options.items():
        if isinstance(value, Mapping):
            served = registry.for_device(Device(name))
            own = None if served is None else served.option_keys
            wrong = "" if own is None else unknown_option(f"{name} has no", value, own)
        else:
            wrong = unknown_option("no device has the", [name], known) if listed else ""
        if wrong:
            raise InputError(f"CompileOptions(provider_options=...): {wrong}")


def require_available(device: Device) -> None:
    """Return if the device works here, else raise `DeviceUnavailableError` with the reason and the remedy."""
    state = availability(device)
    if not state.available:
        raise DeviceUnavailableError(device, state.reason, state.remedy)


def provider_of(device: Device) -> Provider | None:
    """Return the provider that serves a device, or None when there is none, or only one that explains why."""
    provider = default_registry().for_device(device)
    # A provider without an execution provider that is not selectable only has the name and runs nothing.
    return provider if provider is not None and (provider.ep_name or provider.selectable) else None


def known_devices(wanted: Callable[[Device], bool] = lambda device: True) -> list[Device]:
    """Return the wanted ones of all known kinds, and of all indexes that hardware discovery sees; nothing is probed."""
    kinds = Device.all()
    providers = default_registry().providers()
    asked = (provider for provider in providers if any(wanted(Device(kind)) for kind in provider.kinds))
    devices = dict.fromkeys([*kinds, *(device for provider in asked for device in provider.devices())])
    order = {device.kind: place for place, device in enumerate(kinds)}
    return sorted(filter(wanted, devices), key=lambda device: (order[device.kind], device.index))


def available_devices() -> list[Device]:
    """Return the devices that work here, the first of each kind, in the order of `Device.all()`."""
    return [device for device in Device.all() if is_available(device)]


def available_apple_devices() -> list[Device]:
    """Return those of metal, mlx and gpu that work here, in this order; empty except on macOS."""
    if sys.platform != "darwin":
        return []
    return [device for device in (Device.METAL, Device.MLX, Device.GPU) if is_available(device)]


def fastest_device() -> Device:
    """Return the best device that works here by platform priority; no graph and no variable is considered.

    Raises:
        NoViableDeviceError: no device works here.
    """
    working = [device for device in available_devices() if is_selectable(device)]
    if not working:
        rows = [(device, availability(device).reason) for device in Device.all() if provider_of(device)]
        raise NoViableDeviceError("no device works here:", rows)
    return fastest_among(working)


def fastest_among(devices: Device | str | Iterable[Device | str]) -> Device:
    """Return the device with the best platform priority; of several unknown to it, the first.

    Raises:
        NoViableDeviceError: the list is empty.
        DeviceParseError: a name is no known device.
    """
    given = as_devices(devices)
    if not given:
        raise NoViableDeviceError("the list of devices is empty")
    return min(given, key=priority_rank)


def is_selectable(device: Device) -> bool:
    """Return whether automatic choice may take the device; not those of test providers."""
    provider = provider_of(device)
    return provider is not None and provider.selectable


def same_hardware(device: Device) -> list[Device]:
    """Return the devices that work here and are the same hardware by the same provider, this one and its other names.

    `gpu`, `webgpu` and `vulkan` are one device; the one with the best platform priority is the first.
    """
    provider = provider_of(device)
    kinds = {device.kind, *device.family.covers}.intersection(() if provider is None else provider.kinds)
    if len(kinds) < 2:
        return [device]
    return sorted(filter(is_available, (Device(kind, device.index) for kind in kinds)), key=priority_rank)


def full_name(device: Device | str) -> str:
    """Return the device's name for people; the CPU's also names its matrix library."""
    device = Device(device)
    name = device.family.display + (f" {device.index}" if device.index else "")
    return f"{name} (MLAS)" if device.kind == Device.CPU.kind else name


def supports_run_slots(device: Device | str) -> bool:
    """Return whether `run_slots` works on the device: on every device with a provider, here or not."""
    return provider_of(Device(device)) is not None


def drain_device(device: Device | str) -> None:
    """Wait until the device has nothing left to do in this process.

    ONNX Runtime finishes a run before it returns, so only a run in another thread can still be in flight. On devices
    that run one session at a time it is waited for; on others it is not.
    """
    if (provider := provider_of(Device(device))) is not None:
        with provider.run_lock():
            return
