"""The check before first use: a device that gives wrong answers for the golden cases is not chosen.

What came of it is kept in the cache folder, for the package, the device, and every version that decides what the
device computes; so it is done once a machine, and again after an update of ONNX Runtime, a provider or a driver.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort.deploy.golden import check_device
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError, NoViableDeviceError, RunError
from rlx_ort.storage import cache_folder, write_atomic

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.graph_devices import GraphDevices

__all__ = ["admit_devices"]

_log = logging.getLogger(__name__)
_FOLDER = "first-use"
_SCHEMA = 1


def admit_devices(package: Package, runner: GraphDevices) -> None:
    """Deny the chosen device if it fails the golden cases, then the next, until one is right.

    A denial covers what `DevicePolicy` says: the other indexes of the kind, and the kinds on the same hardware.

    The runner's policy denies the ones that failed, and its `last_attempts` says why.

    Raises:
        NoViableDeviceError: none is right; it lists each with its reason.
        IntegrityError: the package was changed.
    """
    refused: list[tuple[Device, str]] = []
    inputs = package.arrays(package.cases[0].inputs)
    while True:
        try:
            device = runner.resolve_with_inputs(inputs)
        except NoViableDeviceError as err:
            if not refused:
                raise
            message = f"no device gives the golden outputs of {package.path}"
            raise NoViableDeviceError(message, refused) from err
        reason = _verdict(package, runner, device, inputs)
        if not reason:
            break
        _log.warning("%s is not used for %s: %s", device.display, package.path, reason)
        refused.append((device, reason))
        runner.set_policy(runner.policy.with_deny([device]))
    runner.last_attempts = tuple(refused)


def _verdict(package: Package, runner: GraphDevices, device: Device, inputs: Mapping[str, Any]) -> str:
    """Return why a device is refused, or an empty text; from the cache where it is known."""
    path = _path(package, runner, device)
    known = None if path is None else _read(path)
    if known is not None:
        return known

    def compile_it() -> CompiledGraph:
        compiled = runner.compile_resolved_with_inputs(inputs)
        if compiled.device != device:  # it refused the graph, and the next one was taken
            raise RunError(dict(runner.last_attempts).get(device, f"{device.display} was not chosen again"))
        return compiled

    parity = check_device(package, runner, device, compile_it)
    if path is not None and not parity.reason:  # what did not run today may run tomorrow
        _write(path, device, parity.verdict)
    return parity.verdict


def _path(package: Package, runner: GraphDevices, device: Device) -> Path | None:
    from rlx_ort.calibration.store import key_of

    try:
        versions = key_of(device)
        folder = cache_folder(_FOLDER)
    except (CalibrationError, OSError) as err:
        _log.debug("the golden check of %s is not kept: %s", device.display, err)
        return None
    options = runner.options.on(device)
    fields = [(name, _plain(getattr(options, name))) for name in sorted(options.__dataclass_fields__)]
    parts = (_SCHEMA, package.sha256, device.label, versions, fields)
    return folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


def _plain(value: object) -> str:
    return repr(sorted(value.items())) if hasattr(value, "items") else repr(value)


def _read(path: Path) -> str | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] == _SCHEMA and isinstance(document["refused"], str):
            return str(document["refused"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        _log.debug("no golden check is known: %s", err)
    return None


def _write(path: Path, device: Device, refused: str) -> None:
    document = {"schema": _SCHEMA, "device": device.label, "refused": refused}
    try:
        write_atomic(path, json.dumps(document).encode())
    except OSError as err:
        _log.warning("the golden check of %s cannot be kept: %s", device.display, err)
