"""`RLX_*` variables, and overrides set from code that come before the process environment.

Keys get the prefix `RLX_` unless they already have it: `get("DEVICE")` and `get("RLX_DEVICE")` read the same
variable. `lookup` reads a key literally, for policies with a prefix of their own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from rlx_ort import epoch

PREFIX = "RLX_"
T = TypeVar("T")

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "RLX_DEVICE": "the device to run on, unless the code names one; skipped with a warning when it cannot run",
        "RLX_DEVICES": "the only devices that may be used; `cuda` is the first CUDA device, `cuda:1` the second",
        "RLX_DENY_DEVICES": "devices that must not be used; wins over RLX_DEVICES; `cuda` is every CUDA device",
        "RLX_PREFER_DEVICES": "devices that win when predictions are within 5 % of each other, best first",
        "RLX_BENCHMARK_PICK": "choose by timing this many runs on each device instead of by prediction",
        "RLX_ADAPTIVE_PICK": "choose by prediction, and time this many runs where predictions are too close to tell",
        "RLX_DEVICE_CHAIN": "devices to try one after the other",
        "RLX_KERNEL_DISPATCH": "`native` or `common` forces that form on every op that has both; default "
        "`prefer_native`",
        "RLX_DISPATCH_REPORT": "flag: log at compile, as a warning of `rlx_ort.dispatch`, where every op went",
        "RLX_VERBOSE": "flag: as RLX_DISPATCH_REPORT",
        "RLX_RESILIENCE": "`on`, or settings such as `timeout_s=2,bridge=off`: other devices answer for one that fails "
        "or opens; see `Resilience`",
        "RLX_WORKERS": "the threads that all sessions together may use; the process's share of the cores by default",
        "RLX_SHARED_POOL": "flag: one pool of threads for all sessions; sessions of other libraries then fail to open",
        "RLX_AUTO_CALIBRATE": "flag: measure a device that was never calibrated here when a prediction first needs it; "
        "takes up to 8 seconds a device",
        "RLX_CACHE": "`on`, `off` or `found`: how sessions use the compile cache; `off` by default, "
        "and `found` for packages",
        "RLX_CACHE_LIMIT": "the most the compile cache takes on disk, such as 4G; 10G by default",
        "RLX_DEVICE_MEMORY": "the most memory that the sessions of this process take on each device, such as "
        "`cuda=8GB,cpu=2GB`, or `8GB` for each device but the CPU; see docs/resilience.md",
        "RLX_PACKAGE_KEY": "a PEM file: `open_package` takes only packages that this public key has signed",
        "RLX_CACHE_DIR": "the folder for data that is kept between runs; the system's cache folder by default",
        "RLX_ENGINE_WARNINGS": "flag: show ONNX Runtime's own warnings on stderr; off in the command line, and as "
        "ONNX Runtime has it in programs",
        "RLX_ALLOW_ORT_TELEMETRY": "flag: leave ONNX Runtime's telemetry on",
    }
)
"""The variables that are read, with their meaning; lists are separated by commas, semicolons or spaces."""

_NEARLY = 0.9  # likeness of a misspelt name: one wrong, missing or exchanged letter
_overrides: dict[str, str] = {}
_lock = threading.Lock()


def get(key: str) -> str | None:
    """Return the value of an `RLX_` variable: the override if there is one, else the environment's, else None."""
    return lookup(_prefixed(key))


def lookup(name: str) -> str | None:
    """Return the value of a variable by its literal name, overrides first."""
    with _lock:
        if name in _overrides:
            return _overrides[name]
    return os.environ.get(name)


def reader(*keys: str) -> tuple[Callable[[Any], object], list[Any]]:
    """Return a function and a key of it for each variable; its result changes with the process environment in 30 ns.

    Overrides do not count: they end the epoch (`rlx_ort.epoch`).
    """
    names, raw = [_prefixed(key) for key in keys], getattr(os.environ, "_data", None)
    if isinstance(raw, dict) and hasattr(os.environ, "encodekey"):
        return raw.get, [os.environ.encodekey(name) for name in names]
    return os.environ.get, names


def set_override(key: str, value: str) -> None:
    """Set an `RLX_` variable for this process without touching the environment."""
    _set({_prefixed(key): value})


def unset_override(key: str) -> None:
    """Remove an override; the process environment shows through again."""
    with _lock:
        _overrides.pop(_prefixed(key), None)
    epoch.advance()


def clear_overrides() -> None:
    """Remove every override."""
    with _lock:
        _overrides.clear()
    epoch.advance()


def _set(values: Mapping[str, str]) -> None:
    with _lock:
        _overrides.update(values)
    epoch.advance()


@contextmanager
def override(values: Mapping[str, str]) -> Iterator[None]:
    """Set several variables for the length of a `with` block and restore earlier overrides.

    Keys that have no `RLX_` prefix get one, as everywhere here.
    """
    with _lock:
        before = dict(_overrides)
    _set({_prefixed(key): value for key, value in values.items()})
    try:
        yield
    finally:
        with _lock:
            _overrides.clear()
            _overrides.update(before)
        epoch.advance()


class RlxEnv:
    """Collects several variables and sets them at once.

    Example:
        >>> with RlxEnv().set("DENY_DEVICES", "cuda").flag("VERBOSE").guard():
        ...     get("VERBOSE")
        '1'
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: object) -> RlxEnv:
        """Note a variable and its value, which becomes text; nothing is set yet."""
        self._values[_prefixed(key)] = str(value)
        return self

    def flag(self, key: str, on: bool = True) -> RlxEnv:
        """Note a variable that is on or off; nothing is set yet."""
        return self.set(key, "1" if on else "0")

    def apply(self) -> None:
        """Set every noted variable as an override, for as long as the process lives."""
        _set(self._values)

    def guard(self) -> AbstractContextManager[None]:
        """Return a `with` block in which the noted variables are set; see `override`."""
        return override(self._values)


def flag(key: str) -> bool:
    """Return whether a variable is on: unset, empty, `0`, `false`, `off` and `no` are off, all else is on."""
    value = get(key)
    if value is None:
        return False
    text = value.strip().lower()
    return text not in ("", "0", "false", "off", "no")


def parse_or(key: str, default: T, parse: Callable[[str], T]) -> T:
    """Return `parse` of a variable, or the default when it is unset or `parse` raises ValueError."""
    value = get(key)
    if value is None:
        return default
    try:
        return parse(value)
    except ValueError:
        return default


def misspelt() -> tuple[str, str] | None:
    """Return an `RLX_` variable that is set and does not exist, with the one it is nearly called like, or None.

    Other unknown names are left alone: programs may have policies of their own, such as `RLX_MYAPP_DEVICES`.
    """
    with _lock:
        unknown = {name for name in (*os.environ, *_overrides) if name.startswith(PREFIX)} - VARIABLES.keys()
    if not unknown:
        return None
    import difflib

    near = ((name, difflib.get_close_matches(name, VARIABLES, n=1, cutoff=_NEARLY)) for name in sorted(unknown))
    return next(((name, known[0]) for name, known in near if known), None)


def _prefixed(key: str) -> str:
    return key if key.startswith(PREFIX) else PREFIX + key
