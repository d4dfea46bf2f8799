"""Profiles on disk: one file for each key, written at once, read in milliseconds, and never trusted blindly."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort import epoch
from rlx_ort import kept as records
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from rlx_ort.providers.base import Availability
from rlx_ort.storage import cache_folder, cache_root, read_regular, stamp_of, write_atomic

if TYPE_CHECKING:
    from rlx_ort.calibration.model import MeasuredCostModel

_log = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 120.0
_MOST_ADDED = 2000  # 160 KB, read in 5 ms
_FOLDER = "calibration"


@dataclass(frozen=True, slots=True)
class Found:
    """The stored profile of a device, or None with the reason why there is none or why it does not count."""

    profile: CalibrationProfile | None
    reason: str = ""


@dataclass(slots=True)
class _Memory:
    """A device's profile in this process: the state of its file, and the model made of it when asked."""

    stamp: tuple[int, ...] | None
    found: Found
    model: MeasuredCostModel | None = None


_lock = threading.Lock()
_generation = [0]
_keys: dict[tuple[Device, str, Availability], ProfileKey] = {}
_memory: dict[tuple[Device, str], _Memory] = {}
_unsaved: dict[str, CalibrationProfile] = {}  # by file name


def generation() -> int:
    """Return a number that changes whenever this process measures a device or forgets its profiles."""
    return _generation[0]


def key_of(device: Device) -> ProfileKey:
    """Return the key of the device's profile, the same for all names of it; made once a process.

    Raises:
        CalibrationError: the device does not work here or has no execution provider.
    """
    from rlx_ort.providers.engine import runtime
    from rlx_ort.providers.hardware import device_threads
    from rlx_ort.providers.plugins import plugin_for
    from rlx_ort.providers.registry import availability, provider_of, same_hardware

    provider = provider_of(device)
    state = availability(device)
    if provider is None or not provider.ep_name or not state.available:
        why = state.reason or "it has no execution provider of ONNX Runtime"
        raise CalibrationError(f"{device.display} cannot be calibrated: {why}")
    with _lock:
        known = _keys.get((device, provider.ep_name, state))
    if known is not None:
        return known
    problem = runtime.runtime_problem()
    if problem is not None:
        raise CalibrationError(f"{device.display} cannot be calibrated: {problem.reason}")
    plugin = plugin_for(provider.ep_name)
    key = ProfileKey(
        device=same_hardware(device)[0].label,
        ep=provider.ep_name,
        hardware=state.hardware,
        identity=state.identity,
        engine=runtime.describe_runtime(),
        ep_version="" if plugin is None else plugin.version,
        driver=state.driver,
        threads=device_threads(device),
    )
    with _lock:
        return _keys.setdefault((device, provider.ep_name, state), key)


def find(device: Device) -> Found:
    """Return the device's stored profile, or why there is none that counts; takes milliseconds, measures nothing."""
    return _remembered(device).found


def measured_model(device: Device) -> MeasuredCostModel | None:
    """Return the cost model of the device's stored profile, or None when it has none."""
    from rlx_ort.calibration.model import MeasuredCostModel
    from rlx_ort.providers.registry import provider_of

    memory = _remembered(device)
    if memory.model is None and memory.found.profile is not None:
        try:
            provider = provider_of(device)
            shipped = None if provider is None else provider.default_profile(device)
            memory.model = MeasuredCostModel(device, memory.found.profile, shipped=shipped)
        except CalibrationError as err:
            _log.info("%s has no usable calibration: %s", device.display, err)
            memory.found = Found(None, str(err))
    return memory.model


def keep(device: Device, profile: CalibrationProfile) -> Path | None:
    """Write a profile and return its path; None, with a warning, where it cannot be written.

    The file appears whole or not at all. The profile counts in this process either way.
    """
    with _lock:
        _generation[0] += 1
        epoch.advance()
        _unsaved[profile.key.file_name] = profile
        _memory.clear()
    try:
        path = cache_folder(_FOLDER) / profile.key.file_name
        write_atomic(path, profile.to_json().encode())
    except OSError as err:
        _log.warning("the calibration of %s counts for this process only, it cannot be kept: %s", device.display, err)
        return None
    with _lock:
        _unsaved.pop(profile.key.file_name, None)
        _memory.clear()
    return path


def kept(profile: CalibrationProfile) -> bool:
    """Return whether a profile is not one that counts in this process only, because it could not be written."""
    with _lock:
        return profile.key.file_name not in _unsaved


def forget() -> None:
    """Forget the stored profiles in this process; files stay."""
    with _lock:
        _generation[0] += 1
        epoch.advance()
        _keys.clear()
        _memory.clear()
        _unsaved.clear()


def locked(device: Device) -> contextlib.AbstractContextManager[bool]:
    """Hold the device's lock among processes; gives whether another process held it, see `kept.locked`."""
    return records.locked(cache_root() / _FOLDER / key_of(device).file_name, _LOCK_TIMEOUT_S)


def _remembered(device: Device) -> _Memory:
    try:
        key = key_of(device)
    except CalibrationError as err:
        return _Memory(None, Found(None, str(err)))
    path = cache_root() / _FOLDER / key.file_name  # the folder is not made
    stamp = None
    with contextlib.suppress(OSError):
        stamp = stamp_of(path.stat())
    with _lock:
        known = _memory.get((device, str(path)))
        unsaved = _unsaved.get(key.file_name)
    if known is not None and known.stamp == stamp:
        return known
    stored = Found(unsaved) if unsaved is not None else _read(path, key)
    if stored.reason:
        _log.info("%s has no calibration: %s", device.display, stored.reason)
    memory = _Memory(stamp, stored)
    with _lock:
        _memory[device, str(path)] = memory
    return memory


def _read(path: Path, key: ProfileKey) -> Found:
    try:
        text = read_regular(path).decode("utf-8")
    except FileNotFoundError:
        return Found(None, _why_none(path, key))
    except (OSError, UnicodeDecodeError) as err:
        return Found(None, f"{path.name} cannot be read: {err}")
    try:
        profile = CalibrationProfile.from_json(text)
    except CalibrationError as err:
        return Found(None, f"{path.name} is damaged and will be measured again: {err}")
    difference = key.difference(profile.key)
    return Found(None, f"{path.name} is of another machine or version: {difference}") if difference else Found(profile)


def _why_none(path: Path, key: ProfileKey) -> str:
    """Return how another profile of the device differs, or that there is none."""
    for other in sorted(path.parent.glob(f"{path.name.rsplit('-', 1)[0]}-*.json"))[:3]:
        with contextlib.suppress(OSError, UnicodeDecodeError, CalibrationError):
            profile = CalibrationProfile.from_json(read_regular(other).decode("utf-8"))
            return f"the profile {other.name} is of another machine or version: {key.difference(profile.key)}"
    return "it was never calibrated on this machine; run `rlx-ort calibrate`"


def add(device: Device, rows: Iterable[Row]) -> None:
    """Add rows of single nodes to a device's stored profile, in the place of those of the same kernel and size.

    The newest are kept, of all that were added.
    """
    stored = find(device).profile
    if stored is not None:
        known = {(row.kernel, row.size, row.dtype): row for row in (*stored.rows, *rows)}
        table = [row for row in known.values() if not row.kernel.startswith("?")]
        added = [row for row in known.values() if row.kernel.startswith("?")]
        keep(device, dataclasses.replace(stored, rows=(*table, *added[-_MOST_ADDED:])))
