"""`DevicePolicy`: which devices may be chosen, which are preferred, and how the choice is made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias, TypeVar

from rlx_ort import environment
from rlx_ort.device import Device, DeviceEntry, DeviceLike, as_devices, parse_device, parse_device_list, priority_rank
from rlx_ort.errors import DeviceParseError

T = TypeVar("T")
Devices: TypeAlias = DeviceLike | Iterable[DeviceEntry]
"""Devices or their names, or one string that lists some, as in `"cuda,cpu"`."""

_UNRANKED = 255


def _whole(runs: object) -> int:
    """Return a number of runs; raises `DeviceParseError` if it is not whole."""
    try:
        return operator.index(runs)  # type: ignore[arg-type]  # it is being checked
    except TypeError as err:
        raise DeviceParseError(repr(runs), f"runs are a whole number, such as 5, not {runs!r}") from err


class DevicePickStrategy:
    """How an automatic choice is made: `COST_MODEL`, `BENCHMARK(runs)`, or both as `ADAPTIVE`."""

    __slots__ = ()
    COST_MODEL: ClassVar[DevicePickStrategy]
    BENCHMARK: ClassVar[type[Benchmark]]
    ADAPTIVE: ClassVar[DevicePickStrategy]


@dataclass(frozen=True, slots=True)
class CostModel(DevicePickStrategy):
    """Choose the device with the smallest predicted time."""


@dataclass(frozen=True, slots=True)
class Benchmark(DevicePickStrategy):
    """Choose the device with the smallest measured time over `runs` runs; less than 1 counts as 1."""

    runs: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", max(_whole(self.runs), 1))


@dataclass(frozen=True, slots=True)
class Adaptive(DevicePickStrategy):
    """Choose by prediction if one is clearly the best, else by timing the close ones, `runs` runs each."""

    runs: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", max(_whole(self.runs), 1))


DevicePickStrategy.COST_MODEL = CostModel()
DevicePickStrategy.BENCHMARK = Benchmark
DevicePickStrategy.ADAPTIVE = Adaptive()


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """Which devices may be chosen. Frozen: the `with_` methods return a changed copy.

    Lists take devices, names, or one string such as `"cuda,cpu"`. In doubt a device is refused:

    - `allow` is exact: `cuda` (the same device as `cuda:0`) allows the first CUDA device, and `cuda:1` the second.
    - `deny` is wide: a kind without an index, or with index 0, denies every index of the kind and the kinds that reach
      the same hardware through it or under another name: `cuda` also denies `tensorrt` and `nv-tensorrt-rtx`, and each
      of `gpu`, `webgpu` and `vulkan` the other two. `cuda:1` denies that index alone, with TensorRT on it. To keep the
      first device out and use the second, allow the second.

    A denial applies to kind and index, not to a card, because identifying the card would probe a denied device:
    without CUDA, `webgpu` and `directx` may still use an NVIDIA GPU. Deny them as well to keep that GPU unused.

    Attributes:
        allow: the only devices that may be chosen, or None for no restriction; empty means none may.
        deny: devices that must not be chosen, even when allowed or asked for.
        prefer: devices that win when their predicted times are close, best first; adds no device.
        pick: how the choice is made.

    Raises:
        DeviceParseError: a name in a list is no known device.
    """

    allow: tuple[Device, ...] | None = None
    deny: tuple[Device, ...] = ()
    prefer: tuple[Device, ...] = ()
    pick: DevicePickStrategy = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.allow is not None:
            object.__setattr__(self, "allow", as_devices(self.allow))
        object.__setattr__(self, "deny", as_devices(() if self.deny is None else self.deny))
        object.__setattr__(self, "prefer", as_devices(() if self.prefer is None else self.prefer))
        if not isinstance(self.pick, DevicePickStrategy):
            raise DeviceParseError(repr(self.pick), f"a pick is a strategy such as Benchmark(5), not {self.pick!r}")

    @classmethod
    def all(cls) -> DevicePolicy:
        """Return the policy that restricts nothing."""
        return cls()

    @classmethod
    def only(cls, devices: Devices) -> DevicePolicy:
        """Return the policy that allows exactly these devices; none at all is legal and leaves nothing viable."""
        return cls(allow=as_devices(devices))

    def with_deny(self, devices: Devices) -> DevicePolicy:
        """Return a copy that denies these devices as well."""
        return replace(self, deny=self.deny + as_devices(devices))

    def with_prefer(self, devices: Devices) -> DevicePolicy:
        """Return a copy that prefers these devices after those already preferred."""
        return replace(self, prefer=self.prefer + as_devices(devices))

    def with_benchmark_pick(self, runs: int) -> DevicePolicy:
        """Return a copy that chooses by timing `runs` runs, at least 1, on each device."""
        return replace(self, pick=Benchmark(runs))

    def with_adaptive_pick(self, runs: int = 5) -> DevicePolicy:
        """Return a copy that chooses by prediction, and times devices whose predictions are too close."""
        return replace(self, pick=Adaptive(runs))

    @classmethod
    def from_env(cls, prefix: str = "RLX") -> DevicePolicy:
        """Return the policy that the environment describes.

        Reads `<prefix>_DEVICES`, `_DENY_DEVICES`, `_PREFER_DEVICES`, `_BENCHMARK_PICK` and `_ADAPTIVE_PICK`. A prefix
        of your own is taken literally first, then with `RLX_` before it. An empty variable counts as unset. Those that
        name a device for a run, `_DEVICE` and `_DEVICE_CHAIN`, are checked as well.

        Raises:
            DeviceParseError: a variable does not parse, both picks are set, or an `RLX_` variable that does not exist
                is nearly called like one that does. It is not ignored, because a typo must not widen what may run.
        """
        if misspelt := environment.misspelt():
            raise DeviceParseError(misspelt[0], f"there is no variable {misspelt[0]}; did you mean {misspelt[1]}?")
        device_from_env(prefix)
        device_chain_from_env(prefix)
        keys = ("DEVICES", "DENY_DEVICES", "PREFER_DEVICES")
        allow, deny, prefer = (_parsed(prefix, key, parse_device_list) for key in keys)
        allowed = None if allow is None else tuple(allow)
        return cls(allowed, tuple(deny or ()), tuple(prefer or ()), _pick_from_env(prefix))

    def pick_strategy(self) -> DevicePickStrategy:
        """Return how the choice is made."""
        return self.pick

    def probe_set(self) -> list[Device]:
        """Return the devices a report has rows for: the allow list as given, else every known device and index."""
        from rlx_ort.providers.registry import known_devices

        return known_devices() if self.allow is None else list(self.allow)

    def allows(self, device: Device | str) -> bool:
        """Return whether a device may be chosen: not denied, and on the allow list if there is one."""
        return self.refusal(device) is None

    def refusal(self, device: Device | str) -> str | None:
        """Return why the policy refuses a device, with the rule that hit, or None; a denial is named first."""
        device = Device(device)
        denial = next((denied for denied in self.deny if _covers(denied, device)), None)
        if denial is not None:
            covered = "" if denial == device else f", which covers {device.label}"
            return f"denied by the policy (deny: {denial.label}{covered})"
        if self.allow is not None and device not in self.allow:
            return f"outside the policy's allow list (only: {labels(self.allow)})"
        return None

    def apply(self, candidates: Devices) -> list[Device]:
        """Return the candidates that may be chosen, best first: by preference, then by platform priority.

        The sort is stable and keeps duplicates.
        """
        allowed = [device for device in as_devices(candidates) if self.allows(device)]
        return sorted(allowed, key=lambda device: (self.prefer_rank(device), priority_rank(device)))

    def prefer_rank(self, device: Device | str) -> int:
        """Return the device's place among the preferred ones; the others share one last place."""
        device = Device(device)
        return self.prefer.index(device) if device in self.prefer else _UNRANKED


def device_from_env(prefix: str = "RLX") -> Device | None:
    """Return the device that `<prefix>_DEVICE` names, or None when it is unset or empty.

    Raises:
        DeviceParseError: the variable names no known device.
    """
    return _parsed(prefix, "DEVICE", parse_device)


def device_chain_from_env(prefix: str = "RLX") -> list[Device]:
    """Return the devices of `<prefix>_DEVICE_CHAIN`, in order; empty when it is unset or empty.

    Raises:
        DeviceParseError: a name in the variable does not parse.
    """
    return _parsed(prefix, "DEVICE_CHAIN", parse_device_list) or []


def chain_with(device: Device | str | None) -> list[Device]:
    """Return the device given, if any, and then those of `RLX_DEVICE_CHAIN` that are not it."""
    chain = device_chain_from_env()
    return chain if device is None else list(dict.fromkeys([Device(device), *chain]))


def labels(devices: Iterable[Device]) -> str:
    """Return the labels of devices as one text, `none` when there are none."""
    return ", ".join(device.label for device in devices) or "none"


def _covers(denied: Device, device: Device) -> bool:
    """Return whether a denial of one device covers another one; index 0 covers every index of its kind."""
    same_hardware = device.kind == denied.kind or device.kind in denied.family.covers
    return same_hardware and denied.index in (0, device.index)


def _read(prefix: str, key: str) -> tuple[str, str] | None:
    """Return the name and value of the first variable that is set and not empty."""
    literal = f"{prefix}_{key}"
    for name in dict.fromkeys((literal, literal if literal.startswith(environment.PREFIX) else f"RLX_{literal}")):
        value = environment.lookup(name)
        if value is not None and value.strip():
            return name, value
    return None


def _parsed(prefix: str, key: str, parse: Callable[[str], T]) -> T | None:
    parsed = _read(prefix, key)
    if parsed is None:
        return None
    name, value = parsed
    try:
        return parse(value)
    except DeviceParseError as err:
        raise DeviceParseError(err.input, f"{name}: {err.message}") from err


def _pick_from_env(prefix: str) -> DevicePickStrategy:
    benchmark, adaptive = _read(prefix, "BENCHMARK_PICK"), _read(prefix, "ADAPTIVE_PICK")
    if benchmark is not None and adaptive is not None:
        text = f"{benchmark[0]}={benchmark[1]} and {adaptive[0]}={adaptive[1]} are two ways to choose; unset one"
        raise DeviceParseError(adaptive[1], text)
    if benchmark is not None:
        return Benchmark(_runs(*benchmark))
    return CostModel() if adaptive is None else Adaptive(_runs(*adaptive))


def _runs(name: str, value: str) -> int:
    digits = value.strip()
    if not (digits.isascii() and digits.isdigit()):
        raise DeviceParseError(value, f"{name} must be a whole number of runs, such as 5, not {value!r}")
    return int(digits)
