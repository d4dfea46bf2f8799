"""The golden check: the stored inputs, run on a device, must give the stored outputs within a stated error.

A package may ask for the check before its first use: a device with wrong outputs is then not chosen. The verdict is
kept in the cache folder for the package, the device, and every version that affects its results. The check
therefore runs once per machine, and again after an update of ONNX Runtime, a provider or a driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlx_ort import kept
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError, NoViableDeviceError, PackageError, RlxError, RunError
from rlx_ort.faults import first_that_works
from rlx_ort.numerics import relative_error
from rlx_ort.storage import cache_root

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.graph_devices import GraphDevices

_log = logging.getLogger(__name__)
_SCHEMA = 1

# Of the largest value of an output. f32: a thousand times its epsilon, which long sums in another order reach; tf32,
# f16 and bf16: ten times theirs (2**-10, 2**-10, 2**-8), since every layer rounds again.
TOLERANCES: Mapping[str, float] = MappingProxyType({"f32": 1e-4, "tf32": 1e-2, "f16": 1e-2, "bf16": 4e-2})
"""Precision -> largest error, for packages that set none."""


@dataclass(frozen=True, slots=True)
class OutputParity:
    """One output of one golden case; cases are counted from 0.

    `error` is the largest difference over the largest expected value; for whole numbers, the share that differ. `ok`
    means that it is at most the tolerance.
    """

    name: str
    case: int
    error: float
    ok: bool


@dataclass(frozen=True, slots=True)
class DeviceParity:
    """The outputs of a device for the golden cases, compared with the expected ones.

    `precision` is the arithmetic it was asked for. If the device did not run, `outputs` is empty and `reason` is not.
    """

    device: Device
    precision: str
    tolerance: float
    outputs: tuple[OutputParity, ...] = ()
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the device ran and every output is right."""
        return not self.reason and all(output.ok for output in self.outputs)

    @property
    def worst(self) -> OutputParity | None:
        """The output with the largest error, or None when nothing ran."""
        return max(self.outputs, key=lambda output: output.error, default=None)

    @property
    def verdict(self) -> str:
        """Why the device is refused, in one line; empty when it is right."""
        worst = self.worst
        if self.reason or self.ok or worst is None:
            return self.reason
        what = f"output {worst.name!r} of golden case {worst.case} is off by {worst.error:.3g}"
        return f"{what}; in {self.precision} at most {self.tolerance:.3g} is right"


def check_device(
    package: Package, runner: GraphDevices, device: Device, compile: Callable[[], CompiledGraph] | None = None
) -> DeviceParity:
    """Run the golden cases on a device and compare the outputs; opens a session there.

    `compile` gives the compiled graph in place of `runner.compile(device)`. A device that is not here, refuses the
    graph or fails is a result with a reason, not an error.

    Raises:
        IntegrityError: the package was changed.
        PackageError: a golden case does not fit the graph.
    """
    precision = runner.options.on(device).precision.value
    tolerance = package.index.tolerances.get(precision, TOLERANCES[precision])
    outputs: list[OutputParity] = []
    try:
        compiled = runner.compile(device) if compile is None else compile()
        for number, case in enumerate(package.cases):
            names = list(compiled.output_specs)
            results = compiled.run(package.arrays(case.inputs))
            got = dict(zip(names, results, strict=True))
            for name, expected in package.arrays(case.outputs).items():
                if name not in got:
                    raise PackageError(f"golden case {number} of {package.path} names {name!r}, which is not an output")
                error = relative_error(got[name], expected)
                outputs.append(OutputParity(name, number, error, error <= tolerance))
    except PackageError:
        raise
    except RlxError as err:
        return DeviceParity(device, precision, tolerance, reason=str(err))
    return DeviceParity(device, precision, tolerance, tuple(outputs))


def admit_devices(package: Package, runner: GraphDevices) -> None:
    """Deny the chosen device if it fails the golden cases, then the next, until one is right.

    A denial covers the other indexes of the kind and the kinds on the same hardware; see `DevicePolicy`. Afterwards the
    runner's policy denies the devices that failed, and its `last_attempts` has the reasons.

    Raises:
        NoViableDeviceError: none is right; it lists each with its reason.
        IntegrityError: the package was changed.
    """
    refused: list[tuple[Device, str]] = []
    inputs = package.arrays(package.cases[0].inputs)

    def check(device: Device) -> None:
        reason = _verdict(package, runner, device, inputs)
        if reason:
            raise RunError(reason)

    def refuse(device: Device, error: Exception) -> None:
        _log.warning("%s is not used for %s: %s", device.display, package.path, error)
        refused.append((device, str(error)))
        runner.set_policy(runner.policy.with_deny([device]))

    try:
        first_that_works(iter(lambda: runner.resolve_with_inputs(inputs), None), check, refuse)
    except NoViableDeviceError as err:
        if not refused:
            raise
        raise NoViableDeviceError(f"no device gives the golden outputs of {package.path}", refused) from err
    runner.last_attempts = tuple(refused)


def _verdict(package: Package, runner: GraphDevices, device: Device, inputs: Mapping[str, Any]) -> str:
    """Return why a device is refused, or an empty text; from the cache where it is known."""
    path = _path(package, runner, device)
    known = None if path is None else kept.read(path, _SCHEMA, lambda document: _text(document["refused"]))
    if known is not None:
        return known

    def compile_it() -> CompiledGraph:
        compiled = runner.compile_resolved_with_inputs(inputs)
        if compiled.device != device:  # it refused the graph, and the next one was taken
            raise RunError(dict(runner.last_attempts).get(device, f"{device.display} is not chosen a second time"))
        return compiled

    parity = check_device(package, runner, device, compile_it)
    if path is not None and not parity.reason:  # a case that did not run may run later
        kept.write(path, _SCHEMA, {"device": device.label, "refused": parity.verdict})
    return parity.verdict


def _path(package: Package, runner: GraphDevices, device: Device) -> Path | None:
    from rlx_ort.calibration.store import key_of

    try:
        versions = key_of(device)
    except CalibrationError as err:
        _log.debug("the golden check of %s is not kept: %s", device.display, err)
        return None
    facts = (_SCHEMA, package.sha256, device.label, versions, runner.options.on(device).key)
    return cache_root() / "first-use" / f"{kept.digest_of(facts)}.json"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not text")
    return value
