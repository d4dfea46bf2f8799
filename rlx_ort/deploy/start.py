"""Starts a warmed package on one device in the shortest time: from the compile cache alone, without reading the model.

`open_package` gives everything, and first results nearly as soon; it looks at all files of the package, this only at
the index, and at the names and sizes of the others. What it does not know, it hands to `open_package`. This module
loads few others, since their import would take longer than the start.
"""

from __future__ import annotations

import gc
import hashlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort.deploy.container import compare_files, open_container, read_index
from rlx_ort.deploy.quick import QuickSession, find_quick

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType

    import numpy.typing as npt

    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.graph_devices import GraphDevices

__all__ = ["StartedPackage", "start_package"]


def start_package(
    path: str | os.PathLike[str],
    device: str = "cpu",
    *,
    require_signature: str | os.PathLike[str] | None = None,
    sha256: str | None = None,
    min_serial: int = 0,
) -> StartedPackage:
    """Return a package ready to run on a device, from what `rlx-ort package warm` left in the compile cache.

    A package that was not warmed here, or for another device than the CPU, is opened in full. The first runs use the
    weights as they lie in the cache's file, which all processes share; after four, a thread opens the session with
    packed weights, and later runs use that. The two differ by rounding.

    Of the package's own files only the index, `rlx.json`, is read here: by its digest the cache finds what was made of
    the verified package. Names and sizes of all others are compared with it, their bytes when it is opened in full.
    What is opened in full later has the same index, or it is refused. A package whose signature is asked for is opened
    in full at once, which looks at it.

    Args:
        path: the package, a folder or a file.
        device: the device's name.
        require_signature: PEM file of the public key that must have signed the package; by default what
            `RLX_PACKAGE_KEY` names, if it is set.
        sha256: the digest of the index that is wanted, hexadecimal, as `rlx-ort package inspect` prints it.
        min_serial: the lowest serial number to accept.

    Raises:
        PackageError: there is no package at the path, or it cannot be opened in full either.
        IntegrityError: it is not what it says it is, or not the one that was asked for.
        DeviceError: the device cannot be had.
    """
    from rlx_ort import environment

    place = Path(path)
    key = require_signature or environment.get("PACKAGE_KEY") or None
    quick, digest = None, sha256
    ruled = environment.get("DEVICES") or environment.get("DENY_DEVICES")  # what is opened in full obeys them
    if device == "cpu" and key is None and not ruled:
        collecting = gc.isenabled()
        gc.disable()  # nothing of what is imported here is ever garbage
        try:
            quick, digest = _quick_session(place, sha256, min_serial)
            if quick is not None and not quick.open():
                quick = None
        finally:
            if collecting:
                gc.enable()
    started = StartedPackage(place, device, quick, key=key, sha256=digest, min_serial=min_serial)
    if quick is None:
        started.compiled  # noqa: B018  # errors belong to the start, not to the first run
    return started


def _quick_session(path: Path, sha256: str | None, min_serial: int) -> tuple[QuickSession | None, str]:
    """Return what a package starts from, if anything, and the digest of its index.

    Raises:
        PackageError: there is no package at the path.
        IntegrityError: it breaks a rule of the format, or its files are not those that its index lists.
    """
    container = open_container(path)
    try:
        raw = read_index(container)
        digest = hashlib.sha256(raw).hexdigest()
        if sha256 is not None and digest != sha256.lower():
            return None, sha256  # whoever opens it in full says so
        quick = find_quick(digest)
        if quick is None:
            return None, digest
        index = json.loads(raw)  # the package with this very index was verified when it was warmed
        compare_files(container, {name: (entry["size"], entry["crc32"]) for name, entry in index["files"].items()})
        return (quick if index["serial"] >= min_serial else None), digest
    finally:
        container.close()


class StartedPackage:
    """A package on one device. `run` may be called from several threads.

    Attributes:
        path: the package.
        device: the device's name.
        quick: whether it was started from the compile cache alone.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        quick: QuickSession | None = None,
        *,
        key: str | os.PathLike[str] | None = None,
        sha256: str | None = None,
        min_serial: int = 0,
    ) -> None:
        self.path = path
        self.device = device
        self.quick = quick is not None
        self._quick = quick
        self._key = key
        self._sha256 = sha256
        self._min_serial = min_serial
        self._lock = threading.Lock()
        self._runner: GraphDevices | None = None
        self._compiled: CompiledGraph | None = None

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> list[Any]:
        """Run once and return the outputs in order.

        Arrays of the declared dtypes and shapes go straight to the engine. All else is checked, converted or refused
        by the graph's own rules, for which the package is opened in full the first time.

        Raises:
            InputError: an input is missing, unknown, or of another shape or dtype.
            EngineError: the run failed.
        """
        quick = self._quick
        results = None if quick is None else quick.run(inputs)
        return self.compiled.run(inputs) if results is None else results

    @property
    def runner(self) -> GraphDevices:
        """The package opened in full, on every device; opened when it is first asked for.

        Raises:
            IntegrityError: another package is at the path than the one it was started with.
        """
        with self._lock:
            if self._runner is None:
                from rlx_ort.deploy.open import open_package

                self._runner = open_package(
                    self.path, require_signature=self._key, sha256=self._sha256, min_serial=self._min_serial
                )
                self._sha256 = self._runner.package_sha256
            return self._runner

    @property
    def compiled(self) -> CompiledGraph:
        """The graph on the device, with everything a `CompiledGraph` can; opens the package in full."""
        runner = self.runner
        with self._lock:
            quick, self._quick = self._quick, None
            if quick is not None:
                quick.close()  # its threads go to the session that is opened now
            if self._compiled is None:
                self._compiled = runner.compile(self.device)
            return self._compiled

    def close(self) -> None:
        """Give the sessions up; runs that are in them finish. Closing twice is harmless."""
        with self._lock:
            quick, self._quick = self._quick, None
            runner, self._runner, self._compiled = self._runner, None, None
        if quick is not None:
            quick.close()
        if runner is not None:
            runner.close()

    def __enter__(self) -> StartedPackage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
