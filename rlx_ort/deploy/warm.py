"""Fills the compile cache for a package ahead of its first run, and records the entry for the next quick start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.deploy.names import required_key
from rlx_ort.deploy.open import narrowed_policy, runner_of
from rlx_ort.deploy.package import Package
from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CacheUse, CompileOptions, PlacementRule
from rlx_ort.selection.policy import DevicePolicy

if TYPE_CHECKING:
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.ir.types import ValueType
    from rlx_ort.providers.engine.compiled.models import Opening
    from rlx_ort.providers.engine.compiled.starts import Interface

__all__ = ["WarmedDevice", "warm_opened", "warm_package"]


@dataclass(frozen=True)
class WarmedDevice:
    """The result of warming a package for one device.

    Attributes:
        device: the device's label.
        entry: the digest of the cache's entry, empty where there is none.
        nbytes: its size on disk.
        seconds: how long opening took, filling included.
        starts: whether `open_package` and `start_package` start from it without the graph.
        problem: why there is no entry; empty when there is one.
    """

    device: str
    entry: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    starts: bool = False
    problem: str = ""


def warm_package(
    path: str | os.PathLike[str],
    devices: Sequence[Device] | None = None,
    progress: Callable[[Device], object] | None = None,
    *,
    require_signature: str | os.PathLike[str] | None = None,
    sha256: str | None = None,
    min_serial: int = 0,
) -> list[WarmedDevice]:
    """Compile a package for devices, by default all that may run it and that work here, and keep the results.

    Without `devices`, the package's policy and the `RLX_*` variables must both allow a device. Takes as long as
    compiling, and writes up to twice the size of the model. A second call finds everything in the cache.

    Args:
        path: the package, a folder or a file.
        devices: what to compile for; each must take every node. By default all that may run, helped by the CPU.
        progress: called with each device before its turn.
        require_signature: as in `open_package`.
        sha256: as in `open_package`.
        min_serial: as in `open_package`.

    Raises:
        PackageError: there is no package, or it needs newer versions.
        IntegrityError: its contents do not match its index, or it is not signed by the key.
        DeviceParseError: one of the `RLX_*` variables does not parse.
    """
    key = required_key(require_signature)
    with Package(path, key=key, sha256=sha256, min_serial=min_serial) as package:
        return warm_opened(package, devices, progress)


def warm_opened(
    package: Package, devices: Sequence[Device] | None = None, progress: Callable[[Device], object] | None = None
) -> list[WarmedDevice]:
    """Compile an open package; see `warm_package`."""
    # A named device must take every node; under an automatic choice the CPU may help.
    rule = PlacementRule.ASSISTED if devices is None else PlacementRule.STRICT
    policy = narrowed_policy(package.index.policy, DevicePolicy.from_env())
    with runner_of(package, policy, CompileOptions(placement=rule, cache=CacheUse.ON)) as runner:
        return [
            _warmed(package, runner.policy, runner.options, device, progress)
            for device in (devices if devices is not None else runner.devices())
        ]


def _warmed(
    package: Package,
    policy: DevicePolicy,
    options: CompileOptions,
    device: Device,
    progress: Callable[[Device], object] | None,
) -> WarmedDevice:
    from rlx_ort.providers.engine.compiled.models import watched

    if progress is not None:
        progress(device)
    began = time.perf_counter()
    try:
        with watched() as openings, runner_of(package, policy, options) as runner:
            compiled = runner.compile(device)
            seconds = time.perf_counter() - began
            if not openings:
                problem = f"nothing of {device.display} can be kept, or the cache is not writable; see the log"
                return WarmedDevice(device.label, seconds=seconds, problem=f"{problem} of rlx_ort.cache")
            last = openings[-1]
            starts = _note(package, compiled, last)
            return WarmedDevice(device.label, last.entry.digest, last.entry.nbytes, seconds, starts)
    except RlxError as err:
        return WarmedDevice(device.label, seconds=time.perf_counter() - began, problem=str(err))


def _note(package: Package, compiled: CompiledGraph, opening: Opening) -> bool:
    """Record the quick start of the package if it can start without the graph, and return whether it can."""
    from rlx_ort.providers.engine.compiled.starts import note_start
    from rlx_ort.providers.engine.compiled.store import default_store
    from rlx_ort.providers.engine.runtime import describe_runtime

    inputs = [_interface(name, kind) for name, kind in compiled.input_specs.items()]
    outputs = [_interface(name, kind) for name, kind in compiled.output_specs.items()]
    known = (tuple(item for item in side if item is not None) for side in (inputs, outputs))
    plain = opening.recipe.on_cpu and None not in inputs + outputs and not opening.request.options.custom_op_libraries
    # Golden cases run when the package is opened in full; a start from the cache would skip them.
    plain = plain and not package.index.verify_on_first_use
    # Mutable parameters are inputs of the session that the caller does not feed.
    if not plain or len(opening.request.model.input_types) != len(inputs):
        return False
    found_inputs, found_outputs = known
    note_start(default_store(), package.sha256, opening.entry.digest, describe_runtime(), (found_inputs, found_outputs))
    return True


def _interface(name: str, kind: ValueType) -> Interface | None:
    """Return the name, numpy dtype and shape of an input or output, or None for types that numpy lacks."""
    from rlx_ort.providers.engine.compiled.starts import Interface

    if not isinstance(kind, TensorType) or kind.shape is None or kind.dtype.numpy.isbuiltin != 1:
        return None
    return Interface(name, kind.dtype.numpy.name, tuple(kind.shape))
